"""The journal: the averaged updates of recent rounds, with which a late or joining node catches up."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


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
        self._lock = threading.Lock()

    def add(self, entry: JournalEntry) -> None:
        """Keep an entry, and forget the oldest ones beyond the bounds; the newest always stays."""
        entry_bytes = 4 * entry.result.numel()
        rounds = max(1, min(self._max_rounds, self._max_bytes // max(entry_bytes, 1)))
        with self._lock:
            self._entries[entry.round] = entry
            while len(self._entries) > rounds:
                self._entries.popitem(last=False)

    def get(self, round: int) -> JournalEntry | None:
        with self._lock:
            return self._entries.get(round)
