"""Files of token ids, read in pieces wherever fsspec finds them. Any thread; every failure is waited out here.

What is on a disk of this machine, or a mount, is read as it is; of anything else byte ranges are asked for.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, cast

import numpy.typing as npt

from zeroband.data.files import remote_tree, tell_left_out
from zeroband.data.hub import require_hub
from zeroband.data.listing import files_matching, has_magic
from zeroband.data.retries import Damaged, Retries
from zeroband.errors import ConfigError
from zeroband.observe.log import get_logger

_PIECE_BYTES = 4 << 20
_ANSWER_S = 60.0
"""For an answer as a whole, which is a block or a piece; doubled each time that it was too short."""
_LONGEST_ANSWER_S = 600.0
_RENEW_S = 1.0
"""All threads are refused at once, and one new client is enough for them."""
_OPEN_FILES = 64
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
        ...

    def retry(self, call: Callable[[], None], path: str) -> None:
        """Do what reads a file, again while it fails for now."""
        ...

    def close(self) -> None:
        """Have everything that waits for the storage end."""
        ...


def open_storage(url: str, retry_s: float) -> TokenStorage:
    """The storage of a path, a glob or an fsspec URL. Raises: ConfigError where its kind cannot be read here."""
    system, root = _opened(url)
    stopped = threading.Event()
    if "file" in _protocols(system):
        return _LocalFiles(root, retry_s, stopped)
    return _RemoteFiles(system, root, functools.partial(_opened, url), retry_s, stopped)


def _opened(url: str) -> tuple[Any, str]:
    require_hub(url, "data.source.path")
    core: Any = importlib.import_module("fsspec.core")  # has no types
    try:
        system, root = core.url_to_fs(
            str(Path(url).expanduser()) if url.startswith("~") else url, skip_instance_cache=True
        )
    except (ValueError, ImportError) as error:
        raise ConfigError(f"data.source.path={url!r} is no path or URL that can be read here: {error}") from error
    return system, root


def _protocols(system: Any) -> tuple[str, ...]:
    return (system.protocol,) if isinstance(system.protocol, str) else tuple(system.protocol)


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
        tell_left_out(pattern, listing)
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

    def whole(self, path: str) -> Iterator[bytes]:
        size = self.size(path)
        for start in range(0, size, _PIECE_BYTES):
            yield self.read(path, start, min(start + _PIECE_BYTES, size))

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
    """Files behind a client of fsspec's, which is made anew where its credentials are refused."""

    is_local = False

    def __init__(
        self, system: Any, root: str, reopen: Callable[[], tuple[Any, str]], retry_s: float, stopped: threading.Event
    ) -> None:
        self.root = root
        self._system = system
        self._reopen = reopen
        self._stopped = stopped
        self._retries = Retries(retry_s, renew=self._renew, pause=stopped.wait)
        self._is_http = bool({"http", "https"} & set(_protocols(system)))
        self.sends_ranges = not self._is_http
        self._is_probed = not self._is_http
        self._lock = threading.RLock()
        """Who asks a server what it can do may be refused, and renews the client meanwhile."""
        self._renewed_s = float("-inf")

    def name(self, path: str) -> str:
        return str(self._system.unstrip_protocol(path))

    def matches(self, pattern: str) -> list[str]:
        if not has_magic(pattern) or self._run(lambda: self._system.exists(pattern), pattern):
            return [pattern]
        tree = remote_tree(lambda call, name: self._retries.run(lambda: call(self._system), name), self._system)
        listing = files_matching(pattern, tree)
        tell_left_out(pattern, listing)
        return listing.files

    def size(self, path: str) -> int:
        def call() -> int:
            size = self._system.info(path).get("size")
            if size is None:
                raise ConfigError(f"data.source.path: the server does not say how large {self.name(path)} is")
            return int(size)

        return self._run(call, path)

    def stamp(self, path: str) -> str | None:
        info = self._run(lambda: self._system.info(path), path)
        return next((str(info[key]) for key in _STAMPS if info.get(key) is not None), None)

    def read(self, path: str, start: int, stop: int, check: Callable[[bytes], None] | None = None) -> bytes:
        self._probe(path)
        answer_s = _ANSWER_S

        def call() -> bytes:
            nonlocal answer_s
            try:
                content = (
                    self._part(path, start, stop, answer_s) if self.sends_ranges else self._skipped(path, start, stop)
                )
            except TimeoutError:
                answer_s = min(2 * answer_s, _LONGEST_ANSWER_S)
                raise
            return _checked(content, stop - start, check)

        return self._run(call, path)

    def whole(self, path: str) -> Iterator[bytes]:
        self._probe(path)
        if self.sends_ranges:
            size = self.size(path)
            for start in range(0, size, _PIECE_BYTES):
                yield self.read(path, start, min(start + _PIECE_BYTES, size))
            return
        given = 0
        with ExitStack() as opened:
            stream: Any = None

            def call() -> bytes:
                nonlocal stream
                try:
                    if stream is None:
                        stream = opened.enter_context(self._stream(path))
                        _skip(stream, given)
                    return stream.read(_PIECE_BYTES)
                except Exception:
                    stream = None  # the file is sent from its beginning again, and gone on with where it broke off
                    opened.close()
                    raise

            while piece := self._run(call, path):
                given += len(piece)
                yield piece

    def retry(self, call: Callable[[], None], path: str) -> None:
        self._run(call, path)

    def close(self) -> None:
        self._stopped.set()

    def _run(self, call: Callable[[], Any], path: str) -> Any:
        return self._retries.run(call, self.name(path))

    def _part(self, path: str, start: int, stop: int, answer_s: float) -> bytes:
        if getattr(self._system, "async_impl", False):
            return self._system.cat_file(path, start=start, end=stop, timeout=answer_s)
        with self._system.open(path, "rb", cache_type="none") as file:  # others would read far ahead
            file.seek(start)
            return file.read(stop - start)

    def _skipped(self, path: str, start: int, stop: int) -> bytes:
        """A part of a file that comes from its beginning only."""
        taken = bytearray()
        with self._stream(path) as stream:
            _skip(stream, start)
            while len(taken) < stop - start and (piece := stream.read(stop - start - len(taken))):
                taken += piece
        return bytes(taken)

    def _stream(self, path: str, **headers: str) -> Any:
        aiohttp: Any = importlib.import_module("aiohttp")  # which fsspec speaks HTTP with
        patience = aiohttp.ClientTimeout(total=None, sock_connect=_ANSWER_S, sock_read=_ANSWER_S)
        given = {"headers": headers} if headers else {}
        return self._system.open(path, "rb", block_size=0, size=1, timeout=patience, **given)

    def _probe(self, path: str) -> None:
        """Find out once whether a server honours Range, which not all do, by one byte of a file."""
        with self._lock:
            if self._is_probed:
                return

            def call() -> bool:
                with self._stream(path, Range="bytes=0-0") as stream:
                    return len(stream.read(1) + stream.read(1)) == 1

            self.sends_ranges = self._run(call, path)
            self._is_probed = True
            if not self.sends_ranges:
                fields = {"file": self.name(path)}
                _log.warning("this server sends whole files, so each is kept whole", extra={"fields": fields})

    def _renew(self) -> None:
        """Take a client with credentials that are read anew; requests under way keep the old one."""
        with self._lock:
            if time.monotonic() - self._renewed_s >= _RENEW_S:
                self._system, _ = self._reopen()
                self._renewed_s = time.monotonic()


def _skip(stream: Any, size: int) -> None:
    """Read past the first bytes."""
    while size and (piece := stream.read(min(size, _PIECE_BYTES))):
        size -= len(piece)
