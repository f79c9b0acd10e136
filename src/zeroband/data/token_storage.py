"""Files of token ids, read in pieces wherever fsspec finds them. Any thread; every failure is waited out here.

What is on a disk of this machine, or a mount, is read as it is; of anything else byte ranges are asked for.
"""

from __future__ import annotations

import functools
import io
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import numpy as np
import numpy.typing as npt

from zeroband.data.files import (
    Client,
    Reading,
    SourceFile,
    is_http,
    is_local,
    remote_tree,
    resolve,
    sends_ranges,
)
from zeroband.data.listing import files_matching, has_magic
from zeroband.data.retries import Damaged, Retries
from zeroband.errors import ConfigError
from zeroband.observe.log import get_logger

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

_log = get_logger(__name__)


class TokenStorage(Protocol):
    """Where the files of a set lie; a path is absolute and of the storage.

    All methods but `close` raise StorageLost where a file cannot be had, and will not be.
    """

    root: str
    """What was asked for, as a path: a folder, a file or a glob."""
    is_local: bool
    sends_ranges: bool
    """Whether a part of a file can be had without all of it."""

    def name(self, path: str) -> str:
        """A path as a user would write it."""
        ...

    def matches(self, pattern: str) -> list[str]:
        """Files that match a glob, by name; a path without one is itself, whether it is there or not."""
        ...

    def size(self, path: str) -> int:
        """Bytes of a file."""
        ...

    def stamp(self, path: str) -> str | None:
        """What changes when the file does, if the storage knows such a thing."""
        ...

    def read(self, path: str, start: int, stop: int, check: Callable[[bytes], None] | None = None) -> bytes:
        """Bytes start..stop-1. `check` raises Damaged where they are not as they should be, and they are read anew."""
        ...

    def read_into(self, path: str, start: int, out: npt.NDArray[Any]) -> bool:
        """Fill an array with the bytes from `start` on, if that can be done at once; whether it was."""
        return False

    def whole(self, path: str) -> Iterator[bytes]:
        """A file from its start in pieces of any size."""
        size = self.size(path)
        for start in range(0, size, _PIECE_BYTES):
            yield self.read(path, start, min(start + _PIECE_BYTES, size))

    def retry(self, call: Callable[[], None], path: str) -> None:
        """Do what reads a file, again while it fails for now."""
        ...

    def close(self) -> None:
        """Have everything that waits for the storage end."""
        ...


def open_storage(url: str, retry_s: float) -> TokenStorage:
    """The storage of a path, a glob or an fsspec URL. Raises: ConfigError where its kind cannot be read here."""
    system, root = resolve(url, _KEY, skip_instance_cache=True)
    stopped = threading.Event()
    if is_local(system):
        return _LocalFiles(root, retry_s, stopped)
    return _RemoteFiles(Client(url, system, retry_s, key=_KEY, stopped=stopped), root, stopped)


class _LocalFiles(TokenStorage):
    """Files of this machine or of a mount; a few stay open."""

    is_local = sends_ranges = True

    def __init__(self, root: str, retry_s: float, stopped: threading.Event) -> None:
        self.root = root
        self._stopped = stopped
        self._files: dict[str, _OpenFile] = {}
        self._retries = Retries(retry_s, renew=self._files.clear, pause=stopped.wait)
        self._lock = threading.Lock()

    def name(self, path: str) -> str:
        return path

    def matches(self, pattern: str) -> list[str]:
        if not has_magic(pattern) or os.path.lexists(pattern):
            return [pattern]
        listing = self._retries.run(lambda: files_matching(pattern), pattern)
        listing.tell(pattern)
        return listing.files

    def size(self, path: str) -> int:
        return self._retries.run(lambda: Path(path).stat().st_size, path)

    def stamp(self, path: str) -> str | None:
        return self._retries.run(lambda: str(Path(path).stat().st_mtime_ns), path)

    def read(self, path: str, start: int, stop: int, check: Callable[[bytes], None] | None = None) -> bytes:
        if check is None and (file := self._files.get(path)) is not None:
            try:
                content = os.pread(file.descriptor, stop - start, start)
            except OSError:
                content = b""  # it is waited out below
            if len(content) == stop - start:
                return content

        def call() -> bytes:
            try:
                file = self._opened(path)  # held while it is read: other threads drop it from those that are open
                content = _pread(file.descriptor, start, stop)
            except OSError:
                self._files.clear()  # of a mount that went and came back
                raise
            return _checked(content, stop - start, check)

        return self._retries.run(call, path)

    def read_into(self, path: str, start: int, out: npt.NDArray[Any]) -> bool:
        if (file := self._files.get(path)) is None:
            return False
        try:
            return os.preadv(file.descriptor, [memoryview(cast("bytearray", out))], start) == out.nbytes
        except OSError:
            return False  # `read` waits it out

    def retry(self, call: Callable[[], None], path: str) -> None:
        self._retries.run(call, path)

    def close(self) -> None:
        self._stopped.set()
        self._files.clear()

    def _opened(self, path: str) -> _OpenFile:
        with self._lock:
            file = self._files.get(path)
            if file is None:
                while len(self._files) >= _OPEN_FILES:
                    self._files.popitem()
                file = self._files[path] = _OpenFile(path)
        return file


class _OpenFile:
    """A file that stays open for as long as somebody reads it."""

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


def _checked(content: bytes, expected: int, check: Callable[[bytes], None] | None) -> bytes:
    if len(content) != expected:
        raise Damaged(f"{len(content)} bytes came where {expected} should lie")
    if check is not None:
        check(content)
    return content


class _RemoteFiles(TokenStorage):
    """Files behind a client of fsspec's."""

    is_local = False

    def __init__(self, client: Client, root: str, stopped: threading.Event) -> None:
        self.root = root
        self._client, self._stopped = client, stopped
        self.sends_ranges = not is_http(client.system)
        self._is_probed = self.sends_ranges
        self._lock = threading.Lock()

    def name(self, path: str) -> str:
        return self._client.name(path)

    def matches(self, pattern: str) -> list[str]:
        if not has_magic(pattern) or self._run(lambda system: system.exists(pattern), pattern):
            return [pattern]
        listing = files_matching(pattern, remote_tree(self._client.retry, self.name))
        listing.tell(pattern)
        return listing.files

    def size(self, path: str) -> int:
        size = self._run(lambda system: system.info(path).get("size"), path)
        if size is None:
            raise ConfigError(f"data.source.path: the server does not say how large {self.name(path)} is")
        return int(size)

    def stamp(self, path: str) -> str | None:
        info = self._run(lambda system: system.info(path), path)
        return next((str(info[key]) for key in _STAMPS if info.get(key) is not None), None)

    def read(self, path: str, start: int, stop: int, check: Callable[[bytes], None] | None = None) -> bytes:
        self._probe(path)
        answer_s = _ANSWER_S

        def call(system: Any) -> bytes:
            nonlocal answer_s
            try:
                content = _part(system, path, start, stop, answer_s)
            except TimeoutError:
                answer_s = min(2 * answer_s, _LONGEST_ANSWER_S)
                raise
            return _checked(content, stop - start, check)

        def skip_to_it(_: Any) -> bytes:
            with self._stream(path) as stream:
                stream.seek(start)
                return _checked(stream.read(stop - start), stop - start, check)

        return self._run(call if self.sends_ranges else skip_to_it, path)

    def whole(self, path: str) -> Iterator[bytes]:
        self._probe(path)
        if self.sends_ranges:
            yield from super().whole(path)
            return
        with self._stream(path) as stream:
            while piece := stream.read(_PIECE_BYTES):
                yield piece

    def retry(self, call: Callable[[], None], path: str) -> None:
        self._run(lambda _: call(), path)

    def close(self) -> None:
        self._stopped.set()

    def _run(self, call: Callable[[Any], Any], path: str) -> Any:
        return self._client.retry(call, self.name(path))

    def _stream(self, path: str) -> BinaryIO:
        """A file from its beginning; read on where it broke off."""
        file = SourceFile(self.name(path), path, self._client)
        return cast(BinaryIO, io.BufferedReader(Reading(file, self._client.retry), _PIECE_BYTES))

    def _probe(self, path: str) -> None:
        """Find out once, by one of its files, whether a server honours Range, which not all do."""
        with self._lock:
            if self._is_probed:
                return
            self.sends_ranges = self._run(lambda system: sends_ranges(system, path), path)
            self._is_probed = True
            if not self.sends_ranges:
                fields = {"file": self.name(path)}
                _log.warning("this server sends whole files, so each is kept whole", extra={"fields": fields})


def _part(system: Any, path: str, start: int, stop: int, answer_s: float) -> bytes:
    if getattr(system, "async_impl", False):
        return system.cat_file(path, start=start, end=stop, timeout=answer_s)
    with system.open(path, "rb", cache_type="none") as file:  # others would read far ahead
        file.seek(start)
        return file.read(stop - start)


# -- files of which any part may be needed at any time: a set's hashes, the indices of Megatron ------------------------
#
# They may be gigabytes, so nobody reads them into memory; and they are read rather than mapped, so that a disk or a
# mount that fails is an error and no signal that ends the process.


class WholeFile(Protocol):
    """A file on a disk of this machine, or on a mount."""

    size: int
    """In bytes."""

    def read(self, start: int, stop: int) -> bytes:
        """Bytes start..stop-1. Raises StorageLost."""
        ...

    def drop(self) -> None:
        """Forget what was fetched of it, as it is damaged."""


class FileInPlace(WholeFile):
    """A file where it lies. Raises: StorageLost where it is not there."""

    def __init__(self, storage: TokenStorage, path: str) -> None:
        self._storage, self._path = storage, path
        self.size = storage.size(path)

    def read(self, start: int, stop: int) -> bytes:
        return self._storage.read(self._path, start, stop)


class StoredNumbers:
    """Integers of 8 bytes in a file, of which the pages that were needed last stay in memory."""

    def __init__(self, file: WholeFile, dtype: str, offset: int, count: int) -> None:
        self._count = count

        def read_page(number: int) -> npt.NDArray[np.integer]:
            first, behind = number * _PAGE, min((number + 1) * _PAGE, count)
            return np.frombuffer(file.read(offset + 8 * first, offset + 8 * behind), dtype)

        self._page = functools.lru_cache(_PAGES)(read_page)  # without a reference to this, which would outlive its use

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int) -> int:
        number, within = divmod(place, _PAGE)
        return int(self._page(number)[within])
