"""The state at a round and the update of a round: what is kept, served, fetched, staged and saved of a committed round.

Formats of files and wire have records of their own, which say the same values in their order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class RoundState:
    """The outer state after a committed round."""

    round: int
    record: Mapping[str, Any]
    """The verdict's record, which holds the run's progress."""
    state_digest: str
    """Digest of the sections, in their order."""
    sections: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """(n,) float32 each, on CPU; none where they were read into buffers that the caller has."""

    @property
    def is_gone(self) -> bool:
        """Whether the next round was applied to the sections; never to a copy."""
        return False

    def read(self, part: Tensor, room: Tensor) -> Tensor | None:
        """A part of a section, (n,) uint8, which does not change while the caller keeps `room`; None where it is gone.

        `room`: at least as many bytes, in which it may be.
        """
        return part


@dataclass(frozen=True, kw_only=True)
class LiveState(RoundState):
    """The outer state itself, not copied: gone when the next round is applied. Any thread."""

    lock: threading.Lock
    """Held while the sections are changed."""
    round_now: Callable[[], int]

    @property
    def is_gone(self) -> bool:
        return self.round_now() != self.round

    def read(self, part: Tensor, room: Tensor) -> Tensor | None:
        copy = room[: part.numel()]
        with self.lock:
            if self.is_gone:
                return None
            np.copyto(copy.numpy(), part.numpy())  # by this thread alone: torch would have several for each
        return copy


@dataclass(frozen=True)
class RoundUpdate:
    """What a committed round did to the state, as it travelled."""

    round: int
    update: Tensor
    """(nbytes,) uint8 on CPU, from which `Exchange.unpack` makes the round's result; it does not change any more.

    Empty on local ranks that did not fetch it.
    """
    record: Mapping[str, Any]
    """The verdict's record."""
    state_digest: str
    """Digest of the outer state after the round."""
