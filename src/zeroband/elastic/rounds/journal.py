"""The journal: the updates of recent rounds as they travelled, with which a late or joining node catches up.

It lies on disk and is bounded by time: a joiner on a slow link needs hours to fetch a large state, and then all rounds
of those hours. Entries that are not being read use no memory except page cache, which the kernel reclaims as needed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroband.elastic.rounds.background import BackgroundRound
from zeroband.observe.log import get_logger
from zeroband.state.round_state import RoundUpdate
from zeroband.state.slot import bytes_of

AWAITED_S = 20.0
"""Longest wait for an entry; less than the time-out of joiners' requests."""

MAX_ROUNDS = 4096
"""Each entry is a memory mapping, of which a process has 65530 by default, and has a record in memory."""

_AT_ONCE = 1 << 16
"""Up to this many values are packed at once: that takes less than the 0.1 ms of starting a thread."""

Allocator = Callable[[int], Tensor]
"""Allocates (nbytes,) uint8 for an update."""

Keep = Callable[[Tensor], Tensor]
"""Stores a copy of (nbytes,) uint8 and returns it."""

_log = get_logger(__name__)


@dataclass(frozen=True)
class JournalBounds:
    """Limits of a journal; its newest entry always stays."""

    keep_s: float
    """Largest age of an entry."""
    max_bytes: int
    """On disk."""
    max_rounds: int = MAX_ROUNDS


class Journal:
    """The newest entries, in files of a folder. Any thread may read while the main thread adds.

    The files have no names, so nothing is left behind however the process ends. `clock`: gives the entries' ages.
    """

    def __init__(self, folder: Path, bounds: JournalBounds, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._bounds = bounds
        self._clock = clock
        self._entries: OrderedDict[int, tuple[RoundUpdate, float]] = OrderedDict()
        """By round, with the time of arrival."""
        self._changed = threading.Condition()
        self._newest = -1
        self._packing: BackgroundRound[None] | None = None
        self._bytes = 0

    def record(
        self, round: int, pack: Callable[[Keep], Tensor], record: Mapping[str, Any], state: str, *, values: int
    ) -> None:
        """Add a round. Its update is packed in a thread; the source of `pack` must not change before `settle`.

        Few `values` are packed at once, as starting a thread takes longer. `pack`: stores its output by the given Keep.
        """
        self.settle()
        if values <= _AT_ONCE:
            self._pack(round, pack, record, state)
        else:
            self._packing = BackgroundRound(lambda: self._pack(round, pack, record, state), name="journal")

    def settle(self) -> None:
        """Wait until packing is done. Called by the recording thread, or after it has ended."""
        packing, self._packing = self._packing, None
        if packing is not None:
            packing.wait()

    def _pack(self, round: int, pack: Callable[[Keep], Tensor], record: Mapping[str, Any], state: str) -> None:
        try:
            update = pack(self._write)
        except OSError as error:
            fields = {"round": round, "folder": str(self._folder), "error": str(error)}
            _log.warning(
                "the journal cannot be written; joiners get past rounds from other members", extra={"fields": fields}
            )
            self._clear(round)
        else:
            self.add(RoundUpdate(round, update, record, state))

    def room(self, nbytes: int, data: Tensor | None = None) -> Tensor:
        """Allocate (nbytes,) uint8 on disk, dropping old entries if needed. Raises OSError on a full disk. Any thread.

        `data`: initial content; writing it by system call takes a fifth of the time of faulting in a new mapping.
        """
        with self._changed:
            self._keep(self._bounds.max_rounds - 1, self._bounds.max_bytes - nbytes)
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._folder) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)  # a full disk is an error here and not a bus error later
            written = 0
            while data is not None and written < nbytes:
                written += os.pwrite(file.fileno(), bytes_of(data[written:]), written)
            # torch's mapping holds no descriptor; one of `mmap` would hold one for each of thousands of entries
            return torch.from_file(f"/dev/fd/{file.fileno()}", shared=True, size=nbytes, dtype=torch.uint8)

    def _write(self, data: Tensor) -> Tensor:
        return self.room(data.numel(), data)

    def add(self, entry: RoundUpdate) -> None:
        """Add an entry and drop the oldest ones beyond the bounds; the newest always stays."""
        _give_back_pages(entry.update)
        with self._changed:
            self._forget(entry.round)
            self._keep(self._bounds.max_rounds - 1, self._bounds.max_bytes - entry.update.numel())
            self._entries[entry.round] = entry, self._clock()
            self._newest = entry.round
            self._bytes += entry.update.numel()
            self._changed.notify_all()

    def _keep(self, rounds: int, nbytes: int) -> None:
        """Drop the oldest entries until at most `rounds` and `nbytes` are left, and none is too old."""
        oldest_s = self._clock() - self._bounds.keep_s
        while self._entries:
            round, (_, came_at_s) = next(iter(self._entries.items()))
            if len(self._entries) <= rounds and self._bytes <= nbytes and came_at_s >= oldest_s:
                return
            self._forget(round)

    def _forget(self, round: int) -> None:
        entry, _ = self._entries.pop(round, (None, 0.0))
        self._bytes -= 0 if entry is None else entry.update.numel()

    def cut(self, round: int) -> None:
        """Drop all entries: this round did not change the state by an update, so no node can catch up across it."""
        self.settle()
        self._clear(round)

    def _clear(self, round: int) -> None:
        with self._changed:
            self._entries.clear()
            self._bytes = 0
            self._newest = round
            self._changed.notify_all()

    def await_entry(self, round: int, *, timeout_s: float = AWAITED_S) -> RoundUpdate | None:
        """The entry of a round; waits if the round is newer than all entries. Any thread but the main one.

        Joiners learn of a verdict from the store, often before their donor has applied it.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._newest >= round, timeout=timeout_s)
            entry, _ = self._entries.get(round, (None, 0.0))
            return entry


def _give_back_pages(update: Tensor) -> None:
    """Have what lies in a file take no memory of this process until it is read; the file keeps what was written."""
    if update.numel() and update.untyped_storage().filename is not None:
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        advise(update.data_ptr(), update.numel(), mmap.MADV_DONTNEED)
