"""Files of token ids, read in pieces wherever fsspec finds them. Any thread; every failure is waited out here.

What is on a disk of this machine, or a mount, is read as it is; of anything else byte ranges are asked for.
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
_ANSWER_S = 60.0
"""For an answer as a whole, which is a block or a piece; doubled each time that it was too short."""
_LONGEST_ANSWER_S = 600.0
_OPEN_FILES = 64
_PAGE = 1024
"""Numbers that are read at a time: 8 KiB, of which a search needs one for each of its last steps."""
_PAGES = 512
_STAMPS = ("ETag", "etag", "mtime", "LastModified", "updated", "last_commit", "blob_id")

Check = Callable[[bytes], None]
"""Raises Damaged where bytes are not as they should be."""


class TokenStorage:
    """Where the files of a set lie: at a path, a glob or an fsspec URL. A path is absolute and of the storage.

    Raises: ConfigError where its kind cannot be read here. All methods but `close` raise StorageLost where a file
    cannot be had, and will not be.
    """

    def __init__(self, url: str, retry_s: float) -> None:
        system, self.root = resolve(url, _KEY, skip_instance_cache=True)
        """What was asked for, as a path: a folder, a file or a glob."""
        self.is_local = is_local(system)
        self._stopped = threading.Event()
        self._client = Client(url, system, retry_s, key=_KEY, stopped=self._stopped)
        self._knows_ranges = not is_http(system)
        self._files: dict[str, _OpenFile] = {}
        """Files of this machine that stay open."""
        self._lock = threading.Lock()

    def name(self, path: str) -> str:
        """A path as a user would write it."""
        return self._client.name(path)

    def matches(self, pattern: str) -> list[str]:
        """Files that match a glob, by name; a path without one is itself, whether it is there or not."""
        if not has_magic(pattern) or self._run(lambda system: system.lexists(pattern), pattern):
            return [pattern]
        if self.is_local:
            listing = self._run(lambda _: files_matching(pattern), pattern)
        else:
            listing = files_matching(pattern, RemoteTree(self._client.retry, self.name))
        listing.tell(pattern)
        return listing.files

    def size(self, path: str) -> int:
        """Bytes of a file."""
        size = self._run(lambda system: system.info(path).get("size"), path)
        if size is None:
            raise ConfigError(f"data.source.path: the server does not say how large {self.name(path)} is")
        return int(size)

    def stamp(self, path: str) -> str | None:
        """What changes when the file does, if the storage knows such a thing."""
        info = self._run(lambda system: system.info(path), path)
        return next((str(info[key]) for key in _STAMPS if info.get(key) is not None), None)

    def read(self, path: str, start: int, stop: int, check: Check | None = None) -> bytes:
        """Bytes start..stop-1. Where they are not as `check` wants them, they are read anew."""
        if self.is_local:
            return self._read_here(path, start, stop, check)
        self._require_ranges(path)
        answer_s = _ANSWER_S

        def call(system: Any) -> bytes:
            nonlocal answer_s
            try:
                content = _part(system, path, start, stop, answer_s)
            except TimeoutError:
                answer_s = min(2 * answer_s, _LONGEST_ANSWER_S)
                raise
            return _checked(content, stop - start, check)

        return self._run(call, path)

    def read_into(self, path: str, start: int, out: npt.NDArray[Any]) -> bool:
        """Fill an array with the bytes from `start` on, if that can be done at once; whether it was."""
        if (file := self._files.get(path)) is None:
            return False
        try:
            return os.preadv(file.descriptor, [memoryview(cast("bytearray", out))], start) == out.nbytes
        except OSError:
            return False  # `read` waits it out

    def whole(self, path: str) -> Iterator[bytes]:
        """A file from its start in pieces of any size."""
        size = self.size(path)
        for start in range(0, size, _PIECE_BYTES):
            yield self.read(path, start, min(start + _PIECE_BYTES, size))

    def close(self) -> None:
        """Have everything that waits for the storage end."""
        self._stopped.set()
        self._files.clear()

    def _run(self, call: Callable[[Any], Any], path: str) -> Any:
        return self._client.retry(call, self.name(path))

    def _read_here(self, path: str, start: int, stop: int, check: Check | None) -> bytes:
        if check is None and (file := self._files.get(path)) is not None:
            try:
                content = os.pread(file.descriptor, stop - start, start)
            except OSError:
                content = b""  # it is waited out below
            if len(content) == stop - start:
                return content

        def call(_: Any) -> bytes:
            try:
                file = self._opened(path)  # held while it is read: other threads drop it from those that are open
                content = _pread(file.descriptor, start, stop)
            except OSError:
                self._files.clear()  # of a mount that went and came back
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
        """Raise ConfigError where a server sends whole files only; it is asked once, for one of its files."""
        if not self._knows_ranges:
            if not self._run(lambda system: sends_ranges(system, path), path):
                raise ConfigError(
                    f"data.source.path: the server of {self.name(path)} sends whole files only, not the bytes that are "
                    "asked for; copy the set to a disk, or choose a server that knows byte ranges, such as nginx"
                )
            self._knows_ranges = True


class _OpenFile:
    """A file that stays open for as long as it is read."""

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


def _part(system: Any, path: str, start: int, stop: int, answer_s: float) -> bytes:
    if getattr(system, "async_impl", False):
        return system.cat_file(path, start=start, end=stop, timeout=answer_s)
    with system.open(path, "rb", cache_type="none") as file:  # others would read far ahead
        file.seek(start)
        return file.read(stop - start)


def _checked(content: bytes, expected: int, check: Check | None) -> bytes:
    if len(content) != expected:
        raise Damaged(f"{len(content)} bytes came where {expected} should lie")
    if check is not None:
        check(content)
    return content


# -- files of which any part may be needed at any time: a set's hashes, the indices of Megatron ------------------------
#
# They may be gigabytes, so they are not read into memory; and they are read rather than mapped, so that a disk or a
# mount that fails is an error and no signal that ends the process.


class FileInPlace:
    """A file on a disk of this machine, or on a mount, where it lies. Raises: StorageLost where it is not there."""

    def __init__(self, storage: TokenStorage, path: str) -> None:
        self._storage, self._path = storage, path
        self.size = storage.size(path)

    def read(self, start: int, stop: int) -> bytes:
        """Bytes start..stop-1. Raises StorageLost."""
        return self._storage.read(self._path, start, stop)

    def drop(self) -> None:
        """Do nothing: what is damaged is the file itself."""


class StoredNumbers:
    """Integers of 8 bytes in a file, of which the pages that were needed last stay in memory. `read`: of the file."""

    def __init__(self, read: Callable[[int, int], bytes], dtype: str, offset: int, count: int) -> None:
        self._count = count

        def read_page(number: int) -> npt.NDArray[np.integer]:
            first, behind = number * _PAGE, min((number + 1) * _PAGE, count)
            return np.frombuffer(read(offset + 8 * first, offset + 8 * behind), dtype)

        self._page = functools.lru_cache(_PAGES)(read_page)  # without a reference to this, which would outlive its use

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int) -> int:
        number, within = divmod(place, _PAGE)
        return int(self._page(number)[within])
