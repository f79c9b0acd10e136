"""A committed round's state and update, as they are journalled, served, fetched, staged and saved.

File and wire formats have separate records of the same values.
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
    """The verdict's record, with the run's progress."""
    state_digest: str
    """Digest of the sections, in their order."""
    sections: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """(n,) float32 each, on CPU; empty if they were read into the caller's buffers."""

    @property
    def is_gone(self) -> bool:
        """Whether a later round has overwritten the sections; never for a copy."""
        return False

    def read(self, part: Tensor, room: Tensor) -> Tensor | None:
        """Return a part of a section, (n,) uint8, unchanged as long as `room` is; None if it is gone.

        `room`: buffer of at least n bytes, which may hold the result.
        """
        return part


@dataclass(frozen=True, kw_only=True)
class LiveState(RoundState):
    """The outer state without a copy: gone once the next round is applied. Any thread."""

    lock: threading.Lock
    """Held while the sections change."""
    round_now: Callable[[], int]

    @property
    def is_gone(self) -> bool:
        return self.round_now() != self.round

    def read(self, part: Tensor, room: Tensor) -> Tensor | None:
        copy = room[: part.numel()]
        with self.lock:
            if self.is_gone:
                return None
            np.copyto(
                copy.numpy(), part.numpy()
            )  # single-threaded: torch would use a thread pool for each server thread
        return copy


@dataclass(frozen=True)
class RoundUpdate:
    """The update of a committed round, as it was transferred."""

    round: int
    update: Tensor
    """(nbytes,) uint8 on CPU, immutable, for `Exchange.unpack`; empty on local ranks that did not fetch it."""
    record: Mapping[str, Any]
    """The verdict's record."""
    state_digest: str
    """Digest of the outer state after the round."""
