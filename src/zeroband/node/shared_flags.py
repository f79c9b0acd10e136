"""The node's flags: a page of shared memory between its ranks, its guardian and its watcher.

Each word has one writer, so plain 8-byte stores need no lock; a reader may see an old value for a moment.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from pathlib import Path

_WORD = struct.Struct("<q")
_PROGRESS, _ADVANCED, _ABORTED, _FENCED, _SERVES, _LISTED, _GENERATION, _SESSION = range(8)
_SESSION_BYTES = 256
"""Most bytes of the session, which follows the last word, its length."""


class SharedFlags:
    """Local rank 0 creates the page before the others open it. No torch."""

    def __init__(self, path: Path, *, create: bool) -> None:
        self.path = path
        descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
        try:
            if create:
                os.ftruncate(descriptor, mmap.PAGESIZE)
            self._page = mmap.mmap(descriptor, mmap.PAGESIZE)
        finally:
            os.close(descriptor)
        self._counts_only: int | None = None

    def _read(self, word: int) -> int:
        return int(_WORD.unpack_from(self._page, word * _WORD.size)[0])

    def _write(self, word: int, value: int) -> None:
        _WORD.pack_into(self._page, word * _WORD.size, value)

    @property
    def progress(self) -> int:
        """Counter of everything that shows the trainer alive: steps, polls, chunks. Written by local rank 0."""
        return self._read(_PROGRESS)

    def advance(self) -> None:
        if self._counts_only in (None, threading.get_ident()):
            self._write(_PROGRESS, self.progress + 1)
            self._write(_ADVANCED, time.monotonic_ns())

    @property
    def advanced_at_s(self) -> float:
        """Time of the last `advance` by `time.monotonic`, one clock for all processes of a machine; 0 before."""
        return self._read(_ADVANCED) / 1e9

    def count_only(self, thread: int | None) -> None:
        """Ignore `advance` on all threads of this process but one, by its ident; None: count all.

        A background transfer must not hide that training hangs.
        """
        self._counts_only = thread

    @property
    def aborted_version(self) -> int:
        """Newest plan that cannot finish: its transfers and older ones stop. Written by the watcher."""
        return self._read(_ABORTED)

    def abort(self, version: int) -> None:
        self._write(_ABORTED, max(version, self.aborted_version))

    @property
    def is_fenced(self) -> bool:
        """Whether the lease was refused: the run continued without this node. Written by the guardian."""
        return self._read(_FENCED) != 0

    def set_fenced(self, fenced: bool) -> None:
        self._write(_FENCED, int(fenced))

    @property
    def serves_state(self) -> bool:
        """Whether others may fetch this node's state. Written by local rank 0, published by the guardian."""
        return self._read(_SERVES) != 0

    def set_serves_state(self, serves: bool) -> None:
        self._write(_SERVES, int(serves))

    @property
    def listed_version(self) -> int:
        """Newest plan that lists this node's member; 0 without one. Written by local rank 0."""
        return self._read(_LISTED)

    def set_listed_version(self, version: int) -> None:
        self._write(_LISTED, version)

    @property
    def generation(self) -> int:
        """Newest generation of the store that this node has pledged. Written by local rank 0."""
        return self._read(_GENERATION)

    def set_generation(self, number: int) -> None:
        self._write(_GENERATION, number)

    @property
    def session(self) -> str:
        """Session of the node's run; empty before. Written by local rank 0, read by the guardian."""
        start, length = (_SESSION + 1) * _WORD.size, self._read(_SESSION)
        return self._page[start : start + length].decode()

    def set_session(self, session: str) -> None:
        said = session.encode()
        assert len(said) <= _SESSION_BYTES, "a session is a short name"
        self._write(_SESSION, 0)
        start = (_SESSION + 1) * _WORD.size
        self._page[start : start + len(said)] = said
        self._write(_SESSION, len(said))

    def close(self) -> None:
        self._page.close()
