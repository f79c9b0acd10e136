"""The outer state of this node: the round that its sections hold, their digest, and copies for other nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from zeroband.elastic.membership.progress import Progress
from zeroband.node.mesh import LocalMesh, barrier
from zeroband.state.crash_memory import NodeMemory
from zeroband.state.digest import digest_of
from zeroband.state.flat import SharedBuffers
from zeroband.state.round_state import LiveState, RoundState

LaterPart = tuple[int, int, int]
"""Values [start, stop) of all sections that are from a later round than the rest, and that round."""


class OuterState:
    """Sections in shared memory, and their round. All local ranks call each method, unless it says otherwise.

    `sections`: names of the buffers. `memory`: labels their content, on local rank 0; None: no label is kept.
    """

    def __init__(
        self, buffers: SharedBuffers, sections: tuple[str, ...], local: LocalMesh, memory: NodeMemory | None = None
    ) -> None:
        self.sections = sections
        self.round = -1
        """The newest committed round that the sections hold; -1 before the founding."""
        self.record: Mapping[str, Any] = {}
        """Record of that round's verdict."""
        self.progress = Progress.at_start()
        self.digest = ""
        """Digest of the sections; local rank 0 only, empty on the others."""
        self.later: Sequence[LaterPart] = ()
        """Parts of a fetched state that are from later rounds; meaningless once the state has reached these."""
        self.lock = threading.Lock()
        """Held by local rank 0 while the sections change."""
        self._buffers = buffers
        self._local = local
        self._memory = memory

    @contextmanager
    def changing(self, sections: Mapping[str, Tensor] | None = None) -> Generator[None]:
        """Block copies while the sections are written; the caller ends with `note`.

        `sections`: copied into them first. Local rank 0 holds the lock; the other ranks may write after the barrier.
        """
        with self.lock:
            for name, section in (sections or {}).items():
                self._buffers[name].copy_(section)
            barrier(self._local)
            yield

    def note(self, round: int, record: Mapping[str, Any], digest: str) -> None:
        """Note the round that the sections now hold."""
        self.round = round
        self.record = record
        self.progress = Progress.from_record(record["progress"])
        self.digest = digest
        if self._memory is not None and self.is_one_round:
            self._memory.stamp(self.sections, round, record, digest)

    def compute_digest(self) -> str:
        """Digest of the sections as they are; local rank 0 only, empty on the others."""
        barrier(self._local)
        return digest_of(*(self._buffers[name] for name in self.sections)) if self._local.rank == 0 else ""

    @property
    def is_one_round(self) -> bool:
        """Whether all sections are from the same round."""
        return all(newest <= self.round for *_, newest in self.later)

    def live(self) -> LiveState:
        """The sections themselves. Any thread of local rank 0."""
        with self.lock:
            sections = {name: self._buffers[name] for name in self.sections}
            now: Callable[[], int] = lambda: self.round  # noqa: E731
            return LiveState(self.round, self.record, self.digest, sections, lock=self.lock, round_now=now)

    def copy(self) -> RoundState:
        """A copy of the sections. Any thread of local rank 0."""
        with self.lock:
            sections = {name: self._buffers[name].clone() for name in self.sections}
            return RoundState(self.round, self.record, self.digest, sections)
