"""Storage of checkpoints: a local folder or an fsspec URL, behind the few operations that saving and loading need.

Local files are written to a temporary file, synced and renamed; objects appear whole when their upload ends. So a path
has either its new or its former content. Any process and thread.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any, BinaryIO, cast

from zeroband.errors import ConfigError

Data = bytes | memoryview

_ERRNO_WORDS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "no file may grow so large here",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EIO: "the device fails",
    errno.ESTALE: "the network mount is stale",
    errno.ENOTCONN: "the network mount is gone",
    errno.ENODEV: "the mount is gone",
}
_LASTING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
_CREDENTIALS = ("ExpiredToken", "InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied", "NoCredentials", "401")


def reason_of(error: BaseException) -> str:
    """Describe a storage error, with the system's message."""
    told = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.errno in _ERRNO_WORDS:
        return f"{_ERRNO_WORDS[error.errno]} ({told:.300})"
    chain = f"{told} {error.__cause__!r}"
    if any(word in chain for word in _CREDENTIALS):
        return f"the credentials are refused or expired ({told:.300})"
    return told[:300]


def is_lasting(error: OSError) -> bool:
    """Whether a storage error will most likely persist until somebody intervenes."""
    return error.errno in _LASTING


class Storage(ABC):
    """The folder of one run. Paths are relative to it, with `/`. All methods raise OSError if the storage fails."""

    renames: bool
    """Whether a folder can be renamed atomically."""

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    def write(self, path: str, pieces: Iterable[Data]) -> None:
        """Write a whole file durably; creates its folders."""

    @abstractmethod
    def open(self, path: str) -> BinaryIO:
        """Open a file for unbuffered reading. Raises FileNotFoundError."""

    def is_in_place(self) -> bool:
        """Whether the folder is still on the same device as at the start: an unmounted path must not be written to."""
        return True

    @abstractmethod
    def names(self) -> list[str]:
        """Return the folder's entries, sorted; empty without a folder."""

    @abstractmethod
    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of every file below a folder, by relative path; empty without a folder."""

    @abstractmethod
    def create(self, path: str, data: bytes) -> bool:
        """Write a file unless it exists; returns whether it did. Storages without locks may admit two writers."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file, or a folder with its content, if it exists."""

    @abstractmethod
    def rename(self, old: str, new: str) -> None:
        """Rename a folder atomically and durably. Only if `renames`."""

    def read(self, path: str) -> bytes:
        """Read a small file. Raises FileNotFoundError."""
        with self.open(path) as file:
            return cast(Any, file).readall()


class LocalStorage(Storage):
    """A folder of this machine or of a network mount. `node_id`: names the temporary files."""

    renames = True

    def __init__(self, root: Path, node_id: str) -> None:
        super().__init__(str(root))
        self._root = root
        self._node_id = node_id
        with contextlib.suppress(OSError):  # later operations raise it again
            self._device = _device_of(root)

    def is_in_place(self) -> bool:
        return self._device == _device_of(self._root)

    def write(self, path: str, pieces: Iterable[Data]) -> None:
        place = self._root / path
        with self._written_next_to(place, pieces) as fresh:
            fresh.replace(place)
        _sync_folder(place.parent)

    @contextlib.contextmanager
    def _written_next_to(self, place: Path, pieces: Iterable[Data]) -> Generator[Path]:
        """Write and sync a temporary file in the same folder, removed afterwards unless it was renamed."""
        place.parent.mkdir(parents=True, exist_ok=True)
        fresh = place.with_name(f".{place.name}.{self._node_id}")
        try:
            with fresh.open("wb", buffering=0) as file:
                for piece in pieces:
                    _write_all(file, memoryview(piece))
                os.fsync(file.fileno())
            yield fresh
        finally:
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)

    def open(self, path: str) -> BinaryIO:
        return cast(BinaryIO, (self._root / path).open("rb", buffering=0))

    def names(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return sorted(entry.name for entry in self._root.iterdir())
        return []

    def sizes(self, folder: str) -> dict[str, int]:
        root = self._root / folder
        files = (Path(at) / name for at, _, names in os.walk(root) for name in names if not name.startswith("."))
        return {file.relative_to(root).as_posix(): file.stat().st_size for file in files}

    def create(self, path: str, data: bytes) -> bool:
        place = self._root / path
        try:
            with self._written_next_to(place, (data,)) as fresh:
                _put_unless_there(fresh, place, data)
        except FileExistsError:
            return False
        _sync_folder(place.parent)
        return True

    def remove(self, path: str) -> None:
        place = self._root / path
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(place) if place.is_dir() else place.unlink()

    def rename(self, old: str, new: str) -> None:
        (self._root / old).rename(self._root / new)
        _sync_folder(self._root)


def _device_of(folder: Path) -> int:
    """Return the device of a folder, or of its nearest existing parent."""
    return next(place.stat().st_dev for place in (folder, *folder.absolute().parents) if place.exists())


def _put_unless_there(fresh: Path, place: Path, data: bytes) -> None:
    """Put a file in its place, atomically if the file system has hard links. Raises FileExistsError."""
    try:
        os.link(fresh, place)
    except FileExistsError:
        raise
    except OSError:
        with place.open("xb", buffering=0) as file:
            _write_all(file, memoryview(data))
            os.fsync(file.fileno())


def _write_all(file: Any, piece: memoryview) -> None:
    piece = piece.cast("B") if piece.format != "B" else piece
    while piece:
        piece = piece[file.write(piece) :]


def _sync_folder(folder: Path) -> None:
    """Make renames in a folder durable, if its file system supports that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class ObjectStorage(Storage):
    """A prefix of an object store through fsspec: no renames and no empty folders."""

    renames = False

    def __init__(self, fs: Any, root: str, url: str) -> None:
        super().__init__(url)
        self._fs = fs
        self._root = root.rstrip("/")

    def write(self, path: str, pieces: Iterable[Data]) -> None:
        with _as_os_errors(), self._fs.open(self._at(path), "wb") as file:
            for piece in pieces:
                file.write(piece)

    def open(self, path: str) -> BinaryIO:
        with _as_os_errors():
            self._fs.invalidate_cache()
            return cast(BinaryIO, _Reading(self._fs.open(self._at(path), "rb", cache_type="none")))

    def names(self) -> list[str]:
        with _as_os_errors(), contextlib.suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            entries = cast("list[str]", self._fs.ls(self._root, detail=False))
            return sorted({entry.rstrip("/").rpartition("/")[2] for entry in entries})
        return []

    def sizes(self, folder: str) -> dict[str, int]:
        with _as_os_errors(), contextlib.suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            root = f"{self._fs._strip_protocol(self._at(folder)).rstrip('/')}/"
            found = cast("dict[str, dict[str, Any]]", self._fs.find(root, detail=True))
            return {path.removeprefix(root): int(entry["size"]) for path, entry in found.items()}
        return {}

    def create(self, path: str, data: bytes) -> bool:
        with _as_os_errors():
            self._fs.invalidate_cache()
            if self._fs.exists(self._at(path)):
                return False
            self.write(path, (data,))
            return True

    def remove(self, path: str) -> None:
        with _as_os_errors(), contextlib.suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            self._fs.rm(self._at(path), recursive=True)

    def rename(self, old: str, new: str) -> None:
        raise AssertionError("an object store cannot rename a folder in one step")

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"


class _Reading(io.RawIOBase):
    """A file of an object store that turns all errors of its client into OSError."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def readinto(self, buffer: Any) -> int:
        with _as_os_errors():
            data = self._file.read(len(buffer))
            buffer[: len(data)] = data
            return len(data)

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()


@contextlib.contextmanager
def _as_os_errors() -> Generator[None]:
    """Turn the many kinds of errors of object store clients into OSError."""
    try:
        yield
    except (OSError, AssertionError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def open_storage(path: str, run_id: str, node_id: str = "reader") -> Storage:
    """Open a run's folder below `ckpt.path`, for a node or any reader. Raises ConfigError for an unusable URL."""
    return open_folder(path, node_id, key="ckpt.path", below=run_id)


def open_folder(path: str, writer: str, *, key: str, below: str = "") -> Storage:
    """Open the folder of a path or URL, or one below it.

    writer: names temporary files; key: the configuration key of the path. Raises ConfigError for an unusable URL.
    """
    core: Any = importlib.import_module("fsspec.core")  # has no types
    try:
        fs, root = core.url_to_fs(path, use_listings_cache=False, skip_instance_cache=True)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{key}={path!r} cannot be opened: {error}") from error
    if "file" in fs.protocol:
        return LocalStorage(Path(root) / below, writer)
    return ObjectStorage(fs, f"{root.rstrip('/')}/{below}", f"{path.rstrip('/')}/{below}".rstrip("/"))


def read_exactly(file: BinaryIO, target: memoryview) -> None:
    """Fill a buffer from a file. Raises EOFError if it is too short."""
    while target:
        count = cast(Any, file).readinto(target)
        if not count:
            raise EOFError("it ends too early")
        target = target[count:]
