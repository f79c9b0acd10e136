"""The journal: what recent rounds did, as it travelled, with which a late or joining node catches up."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zeroband.elastic.rounds.background import BackgroundRound

AWAITED_S = 20.0
"""Longest wait for an entry; below the time-out of the joiners' requests."""


@dataclass(frozen=True)
class JournalEntry:
    """What a committed round did to the state."""

    round: int
    update: Tensor
    """(nbytes,) uint8 on CPU, from which `Exchange.unpack` makes the round's result; nobody writes to it any more."""
    record: Mapping[str, Any]
    """The verdict's record."""
    state_digest: str
    """Digest of the outer state after the round."""


class Journal:
    """The newest entries, bounded in number and bytes. Any thread may read while the main thread adds."""

    def __init__(self, *, max_rounds: int, max_bytes: int) -> None:
        self._entries: OrderedDict[int, JournalEntry] = OrderedDict()
        self._max_rounds = max_rounds
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._newest = -1
        self._packing: BackgroundRound[None] | None = None
        self._bytes = 0

    def record(self, round: int, pack: Callable[[], Tensor], record: Mapping[str, Any], state: str) -> None:
        """Add a round, whose update is packed beside what follows; what it is packed from may change after `settle`.

        Packing many values touches as much new memory, which takes longer than the packing.
        """
        self.settle()
        self._packing = BackgroundRound(lambda: self.add(JournalEntry(round, pack(), record, state)), name="journal")

    def settle(self) -> None:
        """Wait until what was to be packed is. The thread that records, or that follows it."""
        packing, self._packing = self._packing, None
        if packing is not None:
            packing.wait()

    def add(self, entry: JournalEntry) -> None:
        """Keep an entry, and forget the oldest ones beyond the bounds; the newest always stays."""
        with self._changed:
            self._forget(entry.round)
            self._entries[entry.round], self._newest = entry, entry.round
            self._bytes += entry.update.numel()
            while len(self._entries) > 1 and (len(self._entries) > self._max_rounds or self._bytes > self._max_bytes):
                self._forget(next(iter(self._entries)))
            self._changed.notify_all()

    def _forget(self, round: int) -> None:
        entry = self._entries.pop(round, None)
        self._bytes -= 0 if entry is None else entry.update.numel()

    def cut(self, round: int) -> None:
        """This round did not change the state by an update: nobody can catch up from before it."""
        self.settle()
        with self._changed:
            self._entries.clear()
            self._bytes = 0
            self._newest = round
            self._changed.notify_all()

    def await_entry(self, round: int, *, patience_s: float = AWAITED_S) -> JournalEntry | None:
        """The entry of a round; one that is newer than all entries is awaited. Any thread but the main one.

        Joiners learn of a verdict from the store, often before their donor has applied it.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._newest >= round, timeout=patience_s)
            return self._entries.get(round)
