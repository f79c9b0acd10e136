"""The journal: the averaged updates of recent rounds, with which a late or joining node catches up."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from zeroband.outer.flight import Flight

AWAITED_S = 20.0
"""Longest wait for an entry; below the time-out of the joiners' requests."""


@dataclass(frozen=True)
class JournalEntry:
    """What a committed round did to the state."""

    round: int
    result: Tensor
    """Mean of the contributions, (n,) float32 on CPU; nobody writes to it any more."""
    payload: Mapping[str, Any]
    """The verdict's payload."""
    state: str
    """Digest of the outer state after the round."""


class Journal:
    """The newest entries, bounded in number and bytes. Any thread may read while the main thread adds."""

    def __init__(self, *, max_rounds: int, max_bytes: int) -> None:
        self._entries: OrderedDict[int, JournalEntry] = OrderedDict()
        self._max_rounds = max_rounds
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._newest = -1
        self._copying: Flight[None] | None = None

    def copy(self, entry: JournalEntry) -> None:
        """Keep a copy of an entry, made beside what follows; its result may be written to after `settle`.

        A copy of many values touches as much new memory, which takes longer than the copying.
        """
        self.settle()
        self._copying = Flight(lambda: self.add(replace(entry, result=entry.result.clone())), name="journal")

    def settle(self) -> None:
        """Wait until what was to be copied is. The thread that copies, or that follows it."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.wait()

    def add(self, entry: JournalEntry) -> None:
        """Keep an entry, and forget the oldest ones beyond the bounds; the newest always stays."""
        entry_bytes = 4 * entry.result.numel()
        rounds = max(1, min(self._max_rounds, self._max_bytes // max(entry_bytes, 1)))
        with self._changed:
            self._entries[entry.round], self._newest = entry, entry.round
            while len(self._entries) > rounds:
                self._entries.popitem(last=False)
            self._changed.notify_all()

    def cut(self, round: int) -> None:
        """This round did not change the state by an update: nobody can catch up from before it."""
        self.settle()
        with self._changed:
            self._entries.clear()
            self._newest = round
            self._changed.notify_all()

    def await_entry(self, round: int, *, patience_s: float = AWAITED_S) -> JournalEntry | None:
        """The entry of a round; one that is newer than all entries is awaited. Any thread but the main one.

        Joiners learn of a verdict from the store, often before their donor has applied it.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._newest >= round, timeout=patience_s)
            return self._entries.get(round)
