"""Byte-range reads of token files through fsspec, with retries. Safe to use from any thread.

Files on local disks and mounts are read directly; remote ones by range requests.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from zeroband.data.files import Client, is_http, is_local, resolve, sends_ranges
from zeroband.data.listing import RemoteTree, files_matching, has_magic
from zeroband.data.retries import Damaged
from zeroband.errors import ConfigError

_KEY = "data.source.path"
_PIECE_BYTES = 4 << 20
_TIMEOUT_S = 60.0
"""For a whole response; doubled after each time-out."""
_MAX_TIMEOUT_S = 600.0
_OPEN_FILES = 64
_PAGE = 1024
"""Integers per page (8 KiB); the last steps of a binary search stay within one page."""
_PAGES = 512
_STAMPS = ("ETag", "etag", "mtime", "LastModified", "updated", "last_commit", "blob_id")

Check = Callable[[bytes], None]
"""Raises Damaged for wrong bytes."""


class TokenStorage:
    """Storage of a set, given as a path, a glob or an fsspec URL. Paths are absolute within the storage.

    Raises: ConfigError for an unsupported protocol. All methods except `close` raise StorageLost once retries are
    exhausted or pointless.
    """

    def __init__(self, url: str, retry_s: float) -> None:
        system, self.root = resolve(url, _KEY, skip_instance_cache=True)
        """The URL as a path: a folder, a file or a glob."""
        self.is_local = is_local(system)
        self._stopped = threading.Event()
        self._client = Client(url, system, retry_s, key=_KEY, stopped=self._stopped)
        self._knows_ranges = not is_http(system)
        self._files: dict[str, _OpenFile] = {}
        """Local files that stay open, by path."""
        self._lock = threading.Lock()

    def name(self, path: str) -> str:
        """Return a path as a user would write it."""
        return self._client.name(path)

    def matches(self, pattern: str) -> list[str]:
        """Return the files that match a glob, sorted; a path without wildcards is returned unchecked."""
        if not has_magic(pattern) or self._run(lambda system: system.lexists(pattern), pattern):
            return [pattern]
        if self.is_local:
            listing = self._run(lambda _: files_matching(pattern), pattern)
        else:
            listing = files_matching(pattern, RemoteTree(self._client.retry, self.name))
        listing.log(pattern)
        return listing.files

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        size = self._run(lambda system: system.info(path).get("size"), path)
        if size is None:
            raise ConfigError(f"data.source.path: the server does not report the size of {self.name(path)}")
        return int(size)

    def stamp(self, path: str) -> str | None:
        """Return the file's ETag, modification time or similar, if the storage has one."""
        info = self._run(lambda system: system.info(path), path)
        return next((str(info[key]) for key in _STAMPS if info.get(key) is not None), None)

    def read(self, path: str, start: int, stop: int, check: Check | None = None) -> bytes:
        """Return bytes start..stop-1; reads them again if `check` raises Damaged."""
        if self.is_local:
            return self._read_local(path, start, stop, check)
        self._require_ranges(path)
        timeout_s = _TIMEOUT_S

        def call(system: Any) -> bytes:
            nonlocal timeout_s
            try:
                content = _read_range(system, path, start, stop, timeout_s)
            except TimeoutError:
                timeout_s = min(2 * timeout_s, _MAX_TIMEOUT_S)
                raise
            return _checked(content, stop - start, check)

        return self._run(call, path)

    def read_into(self, path: str, start: int, out: npt.NDArray[Any]) -> bool:
        """Fill `out` from an open local file, from byte `start` on; return whether that succeeded."""
        if (file := self._files.get(path)) is None:
            return False
        try:
            return os.preadv(file.descriptor, [memoryview(cast("bytearray", out))], start) == out.nbytes
        except OSError:
            return False  # `read` retries

    def whole(self, path: str) -> Iterator[bytes]:
        """Yield a whole file in pieces."""
        size = self.size(path)
        for start in range(0, size, _PIECE_BYTES):
            yield self.read(path, start, min(start + _PIECE_BYTES, size))

    def close(self) -> None:
        """Cancel all waits for the storage."""
        self._stopped.set()
        self._files.clear()

    def _run(self, call: Callable[[Any], Any], path: str) -> Any:
        return self._client.retry(call, self.name(path))

    def _read_local(self, path: str, start: int, stop: int, check: Check | None) -> bytes:
        if check is None and (file := self._files.get(path)) is not None:
            try:
                content = os.pread(file.descriptor, stop - start, start)
            except OSError:
                content = b""  # retried below
            if len(content) == stop - start:
                return content

        def call(_: Any) -> bytes:
            try:
                file = self._opened(path)  # keeps the descriptor open while another thread evicts the entry
                content = _pread(file.descriptor, start, stop)
            except OSError:
                self._files.clear()  # descriptors are stale after a remount
                raise
            return _checked(content, stop - start, check)

        return self._run(call, path)

    def _opened(self, path: str) -> _OpenFile:
        with self._lock:
            file = self._files.get(path)
            if file is None:
                while len(self._files) >= _OPEN_FILES:
                    self._files.popitem()
                file = self._files[path] = _OpenFile(path)
        return file

    def _require_ranges(self, path: str) -> None:
        """Raise ConfigError if the server ignores range requests; checked once, on its first file."""
        if not self._knows_ranges:
            if not self._run(lambda system: sends_ranges(system, path), path):
                raise ConfigError(
                    f"data.source.path: the server of {self.name(path)} does not support range requests; copy the set "
                    "to a disk, or use a server that does, such as nginx"
                )
            self._knows_ranges = True


class _OpenFile:
    """A descriptor that is closed with its last reference."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


def _pread(descriptor: int, start: int, stop: int) -> bytes:
    content = os.pread(descriptor, stop - start, start)
    while len(content) < stop - start and (
        more := os.pread(descriptor, stop - start - len(content), start + len(content))
    ):
        content += more
    return content


def _read_range(system: Any, path: str, start: int, stop: int, timeout_s: float) -> bytes:
    if getattr(system, "async_impl", False):
        return system.cat_file(path, start=start, end=stop, timeout=timeout_s)
    with system.open(path, "rb", cache_type="none") as file:  # other cache types read far ahead
        file.seek(start)
        return file.read(stop - start)


def _checked(content: bytes, expected: int, check: Check | None) -> bytes:
    if len(content) != expected:
        raise Damaged(f"got {len(content)} bytes instead of {expected}")
    if check is not None:
        check(content)
    return content


# -- random access to large metadata files: block hashes, Megatron's indices -------------------------------------------
#
# They may be gigabytes, so they are not loaded into memory. They are read rather than mapped: with a mapping, a failing
# disk or mount would kill the process with SIGBUS.


class FileInPlace:
    """A file on a local disk or mount, read where it is. Raises: StorageLost if it is missing."""

    def __init__(self, storage: TokenStorage, path: str) -> None:
        self._storage, self._path = storage, path
        self.size = storage.size(path)

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes start..stop-1. Raises StorageLost."""
        return self._storage.read(self._path, start, stop)

    def drop(self) -> None:
        """Do nothing: there is no cached copy to discard."""


class StoredInts:
    """A sequence of 8-byte integers in a file, with an LRU cache of pages. `read`: reads a byte range of the file."""

    def __init__(self, read: Callable[[int, int], bytes], dtype: str, offset: int, count: int) -> None:
        self._count = count

        def read_page(number: int) -> npt.NDArray[np.integer]:
            first, end = number * _PAGE, min((number + 1) * _PAGE, count)
            return np.frombuffer(read(offset + 8 * first, offset + 8 * end), dtype)

        self._page = functools.lru_cache(_PAGES)(read_page)  # a closure: a cached method would create a cycle with self

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        number, within = divmod(index, _PAGE)
        return int(self._page(number)[within])
