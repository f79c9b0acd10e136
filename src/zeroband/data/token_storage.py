"""Byte-range reads of token files through fsspec, with retries. Safe to use from any thread."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zeroband.data.files import Client, is_http, is_local, resolve, sends_ranges, stamp_of
from zeroband.data.listing import RemoteTree, files_matching, has_magic
from zeroband.data.retries import Damaged
from zeroband.errors import ConfigError

_KEY = "data.source.path"
_TIMEOUT_S = 60.0
"""For a whole response; doubled after each time-out."""
_MAX_TIMEOUT_S = 600.0
_OPEN_FILES = 64

Check = Callable[[bytes], None]
"""Raises Damaged for wrong bytes."""


class TokenStorage(Client):
    """Storage of a set, given as a path, a glob or an fsspec URL. Paths are absolute within the storage.

    Raises: ConfigError for an unsupported protocol. All methods except `close` raise StorageLost once retries are
    exhausted or pointless.
    """

    def __init__(self, url: str, retry_s: float) -> None:
        system, self.root = resolve(url, _KEY, skip_instance_cache=True)
        """The URL as a path: a folder, a file or a glob."""
        self.is_local = is_local(system)
        self._stopped = threading.Event()
        super().__init__(url, system, retry_s, key=_KEY, stopped=self._stopped)
        self._knows_ranges = not is_http(system)
        self._opened = functools.lru_cache(_OPEN_FILES)(_Descriptor)
        """Local files that stay open, by path."""

    def matches(self, pattern: str) -> list[str]:
        """Return the files that match a glob, sorted; a path without wildcards is returned unchecked."""
        if not has_magic(pattern) or self.retry(lambda system: system.lexists(pattern), self.name(pattern)):
            return [pattern]
        if self.is_local:
            listing = self.retry(lambda _: files_matching(pattern), self.name(pattern))
        else:
            listing = files_matching(pattern, RemoteTree(self.retry, self.name))
        listing.log(pattern)
        return listing.files

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        size = self.retry(lambda system: system.info(path).get("size"), self.name(path))
        if size is None:
            raise ConfigError(f"data.source.path: the server does not report the size of {self.name(path)}")
        return int(size)

    def stamp(self, path: str) -> list[str]:
        """Return name, size, modification time and ETag: a change of the file changes one of them."""
        return stamp_of(self.name(path), self.retry(lambda system: system.info(path), self.name(path)))

    def read(self, path: str, start: int, stop: int, check: Check | None = None) -> bytes:
        """Return bytes start..stop-1; reads them again if `check` raises Damaged."""
        if self.is_local and check is None:  # a tenth of the time that an own opening takes
            try:
                file = self._opened(path)  # keeps the descriptor open while another thread evicts it
                content = os.pread(file.number, stop - start, start)
            except OSError:
                content = b""
            if len(content) == stop - start:
                return content
            self._opened.cache_clear()  # stale after a remount
        self._require_ranges(path)
        timeout_s = _TIMEOUT_S

        def call(system: Any) -> bytes:
            nonlocal timeout_s
            try:
                content = _read_range(system, path, start, stop, timeout_s)
            except TimeoutError:
                timeout_s = min(2 * timeout_s, _MAX_TIMEOUT_S)
                raise
            if len(content) != stop - start:
                raise Damaged(f"got {len(content)} bytes instead of {stop - start}")
            if check is not None:
                check(content)
            return content

        return self.retry(call, self.name(path))

    @property
    def is_closed(self) -> bool:
        return self._stopped.is_set()

    def close(self) -> None:
        """Cancel all waits for the storage."""
        self._stopped.set()
        self._opened.cache_clear()

    def _require_ranges(self, path: str) -> None:
        """Raise ConfigError if the server ignores range requests; checked once, on its first file."""
        if not self._knows_ranges:
            if not self.retry(lambda system: sends_ranges(system, path), self.name(path)):
                raise ConfigError(
                    f"data.source.path: the server of {self.name(path)} does not support range requests; copy the set "
                    "to a disk, or use a server that does, such as nginx"
                )
            self._knows_ranges = True


class _Descriptor:
    """A file that is closed with its last reference."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.number)


def _read_range(system: Any, path: str, start: int, stop: int, timeout_s: float) -> bytes:
    if getattr(system, "async_impl", False):
        return system.cat_file(path, start=start, end=stop, timeout=timeout_s)
    # fsspec's own file of a local path costs twice as much as a plain one; its other cache types read far ahead
    with Path(path).open("rb") if is_local(system) else system.open(path, "rb", cache_type="none") as file:
        file.seek(start)
        return file.read(stop - start)
