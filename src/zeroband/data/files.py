"""Finds and opens the files behind paths, globs and URLs, through fsspec.

Failing storage is retried, and a file is read on from where it broke off.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeVar, cast

from zeroband.data.hub import require_hub
from zeroband.data.listing import (
    LOCAL,
    Listing,
    RemoteTree,
    Tree,
    files_below,
    files_matching,
    has_magic,
)
from zeroband.data.retries import Damaged, Retries, classify, refusing
from zeroband.errors import ConfigError

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
"""Endings, in any case, of files that are decompressed when read."""
_TIME_KEYS = ("mtime", "LastModified", "last_modified", "Last-Modified", "updated", "created")
_STDLIB_SUFFIXES = {".py", ".txt", ".rst", ".md"}
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "sitecustomize.py"}
_PATHS = "data.source.paths"
_BUFFER_BYTES = 1 << 20
_HTTP_TIMEOUT_S = 60.0
"""To connect, and between received bytes."""
_RENEW_S = 1.0
"""Threads that are refused at the same time share one new client."""

_T = TypeVar("_T")


FileSystem: TypeAlias = Any
"""fsspec's AbstractFileSystem, which has no type hints."""


def pause(wait_s: float) -> bool:
    """Sleep before a retry. Returns False: only a signal stops the retries."""
    time.sleep(wait_s)
    return False


class Client:
    """An fsspec file system with retries; recreated when its credentials are refused. Any thread.

    key: configuration key of `url`. stopped: cancels all waits; by default only a signal does.
    """

    def __init__(
        self,
        url: str,
        system: FileSystem,
        retry_s: float,
        *,
        key: str = _PATHS,
        stopped: threading.Event | None = None,
    ) -> None:
        self._url, self._key = url, key
        self.system = system
        self._retries = Retries(retry_s, renew=self._renew, pause=pause if stopped is None else stopped.wait)
        self._lock = threading.Lock()
        self._renewed_s = float("-inf")

    def name(self, path: str) -> str:
        """Return a path as a user would write it."""
        return self.system.unstrip_protocol(path).removeprefix("file://")

    def retry(self, call: Callable[[FileSystem], _T], name: str) -> _T:
        """Return the result of a call, with retries. `name`: the file, for messages. Raises StorageLost."""
        return self._retries.run(lambda: call(self.system), name)

    def run(self, call: Callable[[FileSystem], _T], name: str) -> _T:
        """Like `retry`, but raises StorageLost only for transient failures, and ConfigError for others."""
        with refusing("data.source cannot be read"):
            return self.retry(call, name)

    def _renew(self) -> None:
        """Create a client with fresh credentials; requests in flight keep the old one."""
        with self._lock:
            if time.monotonic() - self._renewed_s >= _RENEW_S:
                self.system, _ = resolve(self._url, self._key, skip_instance_cache=True)
                self._renewed_s = time.monotonic()


@dataclass(frozen=True)
class SourceFile:
    """One file of a source. Access to its storage raises StorageLost and ConfigError, each naming the file."""

    name: str
    """A local path or a URL."""
    path: str
    client: Client

    @property
    def size(self) -> int | None:
        """Size in bytes as stored; None if the storage does not report it."""
        return _size(self._info())

    @property
    def has_ranges(self) -> bool:
        """Whether the storage supports range requests."""
        return self.client.run(lambda system: sends_ranges(system, self.path), self.name)

    def stamp(self) -> list[str]:
        """Return name, size, modification time and ETag: a change of the file changes one of them."""
        return stamp_of(self.name, self._info())

    @contextmanager
    def open(self) -> Generator[BinaryIO]:
        """Open the file for reading, decompressed if its name ends with one of COMPRESSED.

        Raises: ConfigError naming the file for any failure to open, read or decompress it inside the block;
        StorageLost if retries ran out.
        """
        ending = next((ending for ending in COMPRESSED if self.path.casefold().endswith(ending)), None)
        try:
            with cast(BinaryIO, io.BufferedReader(FileReader(self), _BUFFER_BYTES)) as raw:
                yield raw if ending is None else _decompressed(raw, ending)
        except _errors_of(ending) as e:
            raise ConfigError(f"data.source: cannot read {self.name}: {e}") from e

    def _info(self) -> dict[str, Any]:
        return self.client.run(lambda system: system.info(self.path), self.name)


class Files:
    """Finds files; keeps one client per file system. retry_s: how long failing storage is retried."""

    def __init__(self, retry_s: float = 0.0) -> None:
        self.retry_s = retry_s
        self._clients: dict[FileSystem, Client] = {}

    def find(
        self, paths: Sequence[str], in_folders: tuple[str, ...] = (), *, logs_skipped: bool = False
    ) -> list[SourceFile]:
        """Find the files of paths, globs and fsspec URLs: in the given order, sorted within a glob, each once.

        A folder stands for the visible files below it that end with one of `in_folders`, in any case.
        `logs_skipped`: log what was named but skipped.
        Raises: ConfigError naming a path that matches no file, has an unknown protocol, or is not readable;
        StorageLost.
        """
        found = [file for path in paths for file in self._expand(path, in_folders, logs_skipped=logs_skipped)]
        return list({file.name: file for file in found}.values())

    def _expand(self, pattern: str, in_folders: tuple[str, ...], *, logs_skipped: bool) -> list[SourceFile]:
        system, path = resolve(pattern, _PATHS)
        client = self._clients.setdefault(system, Client(pattern, system, self.retry_s))
        kind = client.run(lambda system: _kind(system, path), pattern)
        endings = in_folders if kind == "directory" else None
        if kind == "file":
            if is_local(system):
                LOCAL.require_file(path)
            listing = Listing([path])
        elif kind == "directory" and not in_folders:
            raise ConfigError(f"data.source.paths: {pattern!r} is a folder; name its files, like {pattern}/*.txt")
        elif is_local(system):
            listing = client.run(lambda _: _list(LOCAL, path, endings), pattern)
        elif kind == "directory" or has_magic(path):
            listing = _list(RemoteTree(client.run, client.name), path, endings)
        else:
            listing = Listing()
        if logs_skipped:
            listing.log(pattern)
        if not listing.files:
            skipped = "; ".join(f"skipped {reason}: {names[0]}" for reason, names in listing.skipped.items() if names)
            raise ConfigError(f"data.source.paths: no file matches {pattern!r}{skipped and f' ({skipped})'}")
        return [SourceFile(client.name(match), match, client) for match in sorted(listing.files)]


def find_files(paths: Sequence[str], retry_s: float = 0.0, *, logs_skipped: bool = False) -> list[SourceFile]:
    """Find files as `Files.find` does."""
    return Files(retry_s).find(paths, logs_skipped=logs_skipped)


def _list(tree: Tree, path: str, endings: tuple[str, ...] | None) -> Listing:
    return files_matching(path, tree) if endings is None else files_below(path, endings, tree)


def stdlib_files() -> list[SourceFile]:
    """Return sources and docs of this machine's Python standard library, without tests and build-specific files.

    Equal Python versions have equal texts on most machines; distributions may patch them.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(_stdlib_texts(root))
    if not paths:
        raise ConfigError(f"data.source.paths is empty and {root} holds no Python sources; name files to train on")
    return find_files(paths)


def _stdlib_texts(root: Path) -> Iterator[str]:
    for folder, folders, names in os.walk(root, onerror=_refuse):
        folders[:] = [name for name in folders if name not in _STDLIB_SKIPPED]
        for name in names:
            skipped = name in _STDLIB_SKIPPED or name.startswith("_sysconfigdata")
            if Path(name).suffix in _STDLIB_SUFFIXES and not skipped:
                yield str(Path(folder, name))


def _refuse(error: OSError) -> None:
    raise ConfigError(f"the Python standard library, which data.source.paths = [] names, cannot be read: {error}")


class FileReader(io.RawIOBase):
    """A seekable stream over a file that survives storage failures; raises the errors of its client."""

    def __init__(self, file: SourceFile) -> None:
        super().__init__()
        self._file = file
        self._at = 0
        self._size: int | None = None
        """Set when a stream is opened."""
        self._stream: BinaryIO | None = None
        self._stream_at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._file.client.run(lambda system: self._next(system, len(buffer)), self._file.name)
        buffer[: len(content)] = content
        self._at = self._stream_at
        return len(content)

    def readall(self) -> bytes:
        return b"".join(iter(lambda: self.read(_BUFFER_BYTES) or b"", b""))

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_CUR:
            offset += self._at
        elif whence == io.SEEK_END:
            if (size := self._file.size) is None:
                raise ConfigError(
                    f"data.source: the server does not report the size of {self._file.name}, which must be read from "
                    "its end; download it first, or use another server"
                )
            offset += size
        self._at = offset
        return offset

    def close(self) -> None:
        self._drop_stream()
        super().close()

    def _next(self, system: FileSystem, count: int) -> bytes:
        """Read at most `count` bytes from the current position; none at the end."""
        try:
            stream = self._positioned(system)
            content = stream.read(count)
        except Exception:
            self._drop_stream()
            raise
        is_truncated = self._at < self._size if self._size is not None else self._stream_at < self._at
        if not content and is_truncated:
            self._drop_stream()
            raise Damaged(f"it ends before byte {self._at}")
        self._stream_at += len(content)
        return content

    def _positioned(self, system: FileSystem) -> BinaryIO:
        """Return a stream at the current position."""
        if is_http(system):
            return self._positioned_http(system)
        stream = self._stream
        if stream is None:
            stream = self._stream = cast(BinaryIO, system.open(self._file.path, "rb"))
            self._size = getattr(stream, "size", None)
            self._stream_at = 0
        if self._stream_at != self._at:
            stream.seek(self._at)
            self._stream_at = self._at
        return stream

    def _positioned_http(self, system: FileSystem) -> BinaryIO:
        """Return one response from here to the end; if the server ignores ranges, discard the bytes before."""
        gap = self._at - self._stream_at
        if self._stream is None or gap < 0 or (gap > _BUFFER_BYTES and _is_partial(self._stream)):
            self._drop_stream()
            self._size = _size(system.info(self._file.path))
            if self._size is not None and self._at >= self._size:
                self._stream, self._stream_at = io.BytesIO(), self._at  # servers reject an empty range
                return self._stream
            self._stream = _http_stream(system, self._file.path, self._at, self._size)
            self._stream_at = self._at if _is_partial(self._stream) else 0
        while self._stream_at < self._at and (skipped := self._stream.read(self._at - self._stream_at)):
            self._stream_at += len(skipped)
        return self._stream

    def _drop_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            with suppress(Exception):  # the stream may be what failed
                stream.close()


def stamp_of(name: str, info: dict[str, Any]) -> list[str]:
    """Return the name, size, modification time and ETag of a file, as far as its storage reports them."""
    changed = next((info[key] for key in _TIME_KEYS if info.get(key) is not None), None)
    return [name, str(info.get("size")), str(changed), str(info.get("ETag") or info.get("blob_id"))]


def sends_ranges(system: FileSystem, path: str) -> bool:
    """Return whether a file can be read in part. Raises what fsspec does."""
    if not is_http(system):
        return True
    size = _size(system.info(path))
    if size is None or size < 2:
        return size is not None
    with _http_stream(system, path, 1, size) as stream:
        return _is_partial(stream)


def _http_stream(system: Any, path: str, at: int, size: int | None) -> BinaryIO:
    """Request a file from byte `at` on. Raises what fsspec does."""
    aiohttp: Any = importlib.import_module("aiohttp")  # a dependency of fsspec's HTTP file system
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_HTTP_TIMEOUT_S, sock_read=_HTTP_TIMEOUT_S)
    headers = {**system.kwargs.get("headers", {}), "Accept-Encoding": "identity"}
    if at and size is not None:
        headers["Range"] = f"bytes={at}-{size - 1}"
    return system.open(path, "rb", block_size=0, size=1, timeout=timeout, headers=headers)


def _is_partial(stream: Any) -> bool:
    """Whether the response is 206 Partial Content."""
    return getattr(stream, "r", None) is not None and stream.r.status == 206


def is_local(system: FileSystem) -> bool:
    """Return whether paths refer to this machine."""
    return "file" in _protocols(system)


def is_http(system: FileSystem) -> bool:
    """Return whether it is a web server, which may ignore range requests."""
    return bool({"http", "https"} & _protocols(system))


def _protocols(system: FileSystem) -> set[str]:
    return {system.protocol} if isinstance(system.protocol, str) else set(system.protocol)


def _size(info: dict[str, Any]) -> int | None:
    return None if info.get("size") is None else int(info["size"])


def _kind(system: FileSystem, path: str) -> str | None:
    """Return `file`, `directory`, another type, or None if the path is missing. Raises what fsspec does."""
    try:
        return str(system.info(path)["type"])
    except FileNotFoundError as error:  # fsspec also raises it for other HTTP failures
        if (failure := classify(error)) is not None and failure.kind != "missing":
            raise
        return None


def resolve(url: str, key: str, **options: bool) -> tuple[FileSystem, str]:
    """Return the file system of a path or URL, and the path in it. Raises ConfigError for an unsupported one."""
    require_hub(url, key)
    core: Any = importlib.import_module("fsspec.core")  # has no type hints
    try:
        system, path = core.url_to_fs(str(Path(url).expanduser()) if url.startswith("~") else url, **options)
    except (ValueError, ImportError) as e:
        if key == _PATHS:
            raise ConfigError(f"data.source.paths: {url!r} is not a readable path or URL: {e}") from e
        raise ConfigError(f"data.source.path={url!r} is not a readable path or URL: {e}") from e
    return system, path


def _decompressed(raw: BinaryIO, ending: str) -> BinaryIO:
    """Return a decompressed stream, which raises OSError, EOFError or its library's error for damaged content."""
    if ending == ".xz":
        stream = importlib.import_module("lzma").LZMAFile(raw)  # Python may be built without it
    elif ending == ".zst":
        zstd = _zstd()
        window = zstd.DecompressionParameter.window_log_max  # `zstd --long=31` needs the largest window
        stream = zstd.open(raw, options={window: window.bounds()[1]})
    else:
        pa: Any = importlib.import_module("pyarrow")  # has no type hints
        stream = pa.CompressedInputStream(raw, {".gz": "gzip", ".bz2": "bz2"}[ending])
    return cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, stream), buffer_size=_BUFFER_BYTES))


def _errors_of(ending: str | None) -> tuple[type[Exception], ...]:
    """Return what reading a file with this ending raises if its content is damaged."""
    if ending == ".xz":
        return OSError, EOFError, importlib.import_module("lzma").LZMAError
    if ending == ".zst":
        return OSError, EOFError, _zstd().ZstdError
    return (OSError,)


def _zstd() -> Any:
    return importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
