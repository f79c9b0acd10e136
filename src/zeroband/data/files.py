"""The files behind paths, globs and URLs, through fsspec and pyarrow. Lists and opens them; knows no format.

A storage that fails is waited out as `retries` says, and a file is then read on from where it broke off.
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
    require_readable,
)
from zeroband.data.retries import Damaged, Retries, failure_of
from zeroband.errors import ConfigError, StorageLost
from zeroband.observe.log import get_logger

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
"""Endings, in any case, of files that are decompressed as they are read."""
_TIME_KEYS = ("mtime", "LastModified", "last_modified", "Last-Modified", "updated", "created")
_STDLIB_SUFFIXES = {".py", ".txt", ".rst", ".md"}
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "sitecustomize.py"}
_PATHS = "data.source.paths"
_BUFFER_BYTES = 1 << 20
_SILENCE_S = 60.0
"""For a server to be reached, and for the next bytes of its answer."""
_RENEW_S = 1.0
"""All threads are refused at once, and one new client is enough for them."""

_log = get_logger(__name__)

_T = TypeVar("_T")


FileSystem: TypeAlias = Any
"""fsspec's AbstractFileSystem, which has no types."""


def pause(wait_s: float) -> bool:
    """Sleep between two attempts. Returns False: who waits here goes on until a signal ends the process."""
    time.sleep(wait_s)
    return False


class Client:
    """A file system of fsspec whose failures are waited out; it is made anew where its credentials are refused.

    key: what names `url` in a configuration. stopped: ends all waiting, where it is not a signal that does. Any thread.
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
        """A path as a user would write it."""
        return self.system.unstrip_protocol(path).removeprefix("file://")

    def retry(self, call: Callable[[FileSystem], _T], name: str) -> _T:
        """What a call gives, when it does; `name` is what it asks for, for messages. Raises StorageLost."""
        return self._retries.run(lambda: call(self.system), name)

    def run(self, call: Callable[[FileSystem], _T], name: str) -> _T:
        """What `retry` gives. Raises: StorageLost where it was waited for in vain, else ConfigError."""
        try:
            return self.retry(call, name)
        except StorageLost as lost:
            if lost.can_pass:
                raise
            raise ConfigError(f"data.source cannot be read: {lost}") from lost

    def _renew(self) -> None:
        """Take a client that reads its credentials anew; requests under way keep the old one."""
        with self._lock:
            if time.monotonic() - self._renewed_s >= _RENEW_S:
                self.system, _ = resolve(self._url, self._key, skip_instance_cache=True)
                self._renewed_s = time.monotonic()


@dataclass(frozen=True)
class SourceFile:
    """One file of a source. What asks its storage raises StorageLost and ConfigError, each naming the file."""

    name: str
    """Name as a user would write it: a path, or a URL when it is not local."""
    path: str
    client: Client

    @property
    def size(self) -> int | None:
        """Bytes, before it is decompressed; None where its store does not say."""
        return _size(self._info())

    @property
    def has_ranges(self) -> bool:
        """Whether it can be read from its middle: some servers send whole files only."""
        return self.client.run(lambda system: sends_ranges(system, self.path), self.name)

    def stamp(self) -> list[str]:
        """Name, size and time of the last change, or the store's tag: what changes when the file does."""
        info = self._info()
        changed = next((info[key] for key in _TIME_KEYS if info.get(key) is not None), None)
        return [self.name, str(info.get("size")), str(changed), str(info.get("ETag") or info.get("blob_id"))]

    @contextmanager
    def open(self) -> Generator[BinaryIO]:
        """The bytes of the file, decompressed when its name ends with one of COMPRESSED.

        Raises: ConfigError naming the file, for any failure to open, read or decompress it inside the block, and
        StorageLost where its storage was waited for in vain.
        """
        ending = next((ending for ending in COMPRESSED if self.path.casefold().endswith(ending)), None)
        try:
            with cast(BinaryIO, io.BufferedReader(FileReader(self, self.client.run), _BUFFER_BYTES)) as raw:
                yield raw if ending is None else _decompressed(raw, ending)
        except OSError as e:  # of what makes sense of the bytes
            raise ConfigError(f"data.source: cannot read {self.name}: {e}") from e

    def _info(self) -> dict[str, Any]:
        return self.client.run(lambda system: system.info(self.path), self.name)


class Files:
    """What finds files, and keeps a client for each of their file systems.

    retry_s: how long one that fails is asked again.
    """

    def __init__(self, retry_s: float = 0.0) -> None:
        self.retry_s = retry_s
        self._clients: dict[FileSystem, Client] = {}

    def find(self, paths: Sequence[str], in_folders: tuple[str, ...] = (), *, says: bool = False) -> list[SourceFile]:
        """The files that paths, globs and fsspec URLs name: in the given order, within a glob by name, each once.

        A folder stands for the files below it that end with one of `in_folders`, in any case, hidden ones left out.
        `says`: what is named and left out is logged, with how many there are and the first one.
        Raises: ConfigError naming the path that matches nothing or is a folder without such files, whose protocol is
        not known, or that this user may not read; StorageLost.
        """
        found = [file for path in paths for file in self._expand(path, in_folders, says=says)]
        return list({file.name: file for file in found}.values())

    def _expand(self, pattern: str, in_folders: tuple[str, ...], *, says: bool) -> list[SourceFile]:
        system, path = resolve(pattern, _PATHS)
        client = self._clients.setdefault(system, Client(pattern, system, self.retry_s))
        kind = client.run(lambda system: _kind(system, path), pattern)
        endings = in_folders if kind == "directory" else None
        if kind == "file":
            if is_local(system):
                require_readable(path)
            listing = Listing([path])
        elif kind == "directory" and not in_folders:
            raise ConfigError(f"data.source.paths: {pattern!r} is a folder; name its files, like {pattern}/*.txt")
        elif is_local(system):
            listing = client.run(lambda _: _list(LOCAL, path, endings), pattern)
        elif kind == "directory" or has_magic(path):
            listing = _list(RemoteTree(client.run, client.name), path, endings)
        else:
            listing = Listing()
        if says:
            listing.tell(pattern)
        if not listing.files:
            there = "; ".join(f"left out: {reason}: {names[0]}" for reason, names in listing.left_out.items() if names)
            raise ConfigError(f"data.source.paths: no file matches {pattern!r}{there and f' ({there})'}")
        return [SourceFile(client.name(match), match, client) for match in sorted(listing.files)]


def find_files(paths: Sequence[str], retry_s: float = 0.0, *, says: bool = False) -> list[SourceFile]:
    """What `Files.find` finds."""
    return Files(retry_s).find(paths, says=says)


def _list(tree: Tree, path: str, endings: tuple[str, ...] | None) -> Listing:
    """The files below a folder that have one of the endings; None: those that a glob names."""
    return files_matching(path, tree) if endings is None else files_below(path, endings, tree)


def stdlib_files() -> list[SourceFile]:
    """Sources and docs of this machine's Python standard library, by name; tests and build-specific files left out.

    Equal Python versions give equal texts on most machines; a distribution's patches may differ.
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
    """The bytes of a file, whose storage may fail in the middle of it. `run`: of its client; raises what that does."""

    def __init__(self, file: SourceFile, run: Callable[[Callable[[FileSystem], bytes], str], bytes]) -> None:
        super().__init__()
        self._file, self._run = file, run
        self._at = 0
        self._size: int | None = None
        """What is known of it once something is open."""
        self._stream: BinaryIO | None = None
        self._stream_at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._run(lambda system: self._next(system, len(buffer)), self._file.name)
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
                    f"data.source: the server does not say how large {self._file.name} is, which is read from its end; "
                    "fetch it first, or choose a server that does"
                )
            offset += size
        self._at = offset
        return offset

    def close(self) -> None:
        self._leave()
        super().close()

    def _next(self, system: FileSystem, count: int) -> bytes:
        """At most `count` bytes from where it is read; none at its end."""
        try:
            stream = self._opened(system)
            content = stream.read(count)
        except Exception:
            self._leave()
            raise
        is_cut = self._at < self._size if self._size is not None else self._stream_at < self._at
        if not content and is_cut:
            self._leave()
            raise Damaged(f"it ends before byte {self._at}")
        self._stream_at += len(content)
        return content

    def _opened(self, system: FileSystem) -> BinaryIO:
        """A stream that is where the file is read."""
        if is_http(system):
            return self._opened_over_http(system)
        stream = self._stream
        if stream is None:
            stream = self._stream = cast(BinaryIO, system.open(self._file.path, "rb"))
            self._size = getattr(stream, "size", None)
            self._stream_at = 0
        if self._stream_at != self._at:
            stream.seek(self._at)
            self._stream_at = self._at
        return stream

    def _opened_over_http(self, system: FileSystem) -> BinaryIO:
        """One answer from here to the end of the file, where its server knows byte ranges, else skipped up to here."""
        gap = self._at - self._stream_at
        if self._stream is None or gap < 0 or (gap > _BUFFER_BYTES and _is_part(self._stream)):
            self._leave()
            self._size = _size(system.info(self._file.path))
            if self._size is not None and self._at >= self._size:
                self._stream, self._stream_at = io.BytesIO(), self._at  # servers refuse a range of nothing
                return self._stream
            self._stream = _http_stream(system, self._file.path, self._at, self._size)
            self._stream_at = self._at if _is_part(self._stream) else 0
        while self._stream_at < self._at and (skipped := self._stream.read(self._at - self._stream_at)):
            self._stream_at += len(skipped)
        return self._stream

    def _leave(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            with suppress(Exception):  # it may be what failed
                stream.close()


def sends_ranges(system: FileSystem, path: str) -> bool:
    """Whether a part of a file can be had without all of it. Raises what fsspec does."""
    if not is_http(system):
        return True
    size = _size(system.info(path))
    if size is None or size < 2:
        return size is not None  # whatever is sent of so little is all of it
    with _http_stream(system, path, 1, size) as stream:
        return _is_part(stream)


def _http_stream(system: Any, path: str, at: int, size: int | None) -> BinaryIO:
    """The answer of a server to who asks for a file from some byte on. Raises what fsspec does."""
    aiohttp: Any = importlib.import_module("aiohttp")  # which fsspec speaks HTTP with
    patience = aiohttp.ClientTimeout(total=None, sock_connect=_SILENCE_S, sock_read=_SILENCE_S)
    headers = {**system.kwargs.get("headers", {}), "Accept-Encoding": "identity"}
    if at and size is not None:
        headers["Range"] = f"bytes={at}-{size - 1}"
    return system.open(path, "rb", block_size=0, size=1, timeout=patience, headers=headers)


def _is_part(stream: Any) -> bool:
    """Whether a server answered with a part of a file."""
    return getattr(stream, "r", None) is not None and stream.r.status == 206


def is_local(system: FileSystem) -> bool:
    """Whether its paths are those of this machine."""
    return "file" in _protocols(system)


def is_http(system: FileSystem) -> bool:
    """Whether it is a web server, which may know no byte ranges."""
    return bool({"http", "https"} & _protocols(system))


def _protocols(system: FileSystem) -> set[str]:
    return {system.protocol} if isinstance(system.protocol, str) else set(system.protocol)


def _size(info: dict[str, Any]) -> int | None:
    return None if info.get("size") is None else int(info["size"])


def _kind(system: FileSystem, path: str) -> str | None:
    """`file`, `directory`, another thing, or None where there is nothing. Raises what fsspec does."""
    try:
        return str(system.info(path)["type"])
    except FileNotFoundError as error:  # which fsspec makes of other failures of HTTP, too
        if (failure := failure_of(error)) is not None and failure.kind != "gone":
            raise
        return None


def resolve(url: str, key: str, **options: bool) -> tuple[FileSystem, str]:
    """The file system of a path or URL, and what it is called there. Raises ConfigError where there is none."""
    require_hub(url, key)
    core: Any = importlib.import_module("fsspec.core")  # has no types
    try:
        system, path = core.url_to_fs(str(Path(url).expanduser()) if url.startswith("~") else url, **options)
    except (ValueError, ImportError) as e:
        if key == _PATHS:
            raise ConfigError(f"data.source.paths: {url!r} is no path or URL that can be read here: {e}") from e
        raise ConfigError(f"data.source.path={url!r} is no path or URL that can be read here: {e}") from e
    return system, path


class _Unpacked(io.RawIOBase):
    """The content of a compressed stream. Raises OSError for one that is cut or damaged, whatever its library does."""

    def __init__(self, content: BinaryIO, errors: tuple[type[Exception], ...]) -> None:
        super().__init__()
        self._content = content
        self._errors = errors

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            content = self._content.read(len(buffer))
        except self._errors as error:
            raise OSError(str(error)) from error
        buffer[: len(content)] = content
        return len(content)


def _decompressed(raw: BinaryIO, ending: str) -> BinaryIO:
    if ending == ".xz":
        lzma = importlib.import_module("lzma")
        unpacked = _Unpacked(lzma.open(raw), (EOFError, lzma.LZMAError))
    elif ending == ".zst":
        zstd = importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
        window = zstd.DecompressionParameter.window_log_max  # archives of `zstd --long=31` need the largest there is
        unpacked = _Unpacked(zstd.open(raw, options={window: window.bounds()[1]}), (EOFError, zstd.ZstdError))
    else:
        pa: Any = importlib.import_module("pyarrow")  # has no types
        unpacked = pa.CompressedInputStream(raw, {".gz": "gzip", ".bz2": "bz2"}[ending])
    return cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, unpacked), buffer_size=_BUFFER_BYTES))
