"""Where checkpoints lie: a local folder or any fsspec URL, behind the few operations that saving and loading need.

Local files are written next to their place, synced and renamed; objects of a store appear whole when their upload ends.
So a path either holds all that was written to it or what it held before. Any process and thread.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Sequence
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
    """Why storage failed, in words, with what the system said."""
    told = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.errno in _ERRNO_WORDS:
        return f"{_ERRNO_WORDS[error.errno]} ({told:.300})"
    chain = f"{told} {error.__cause__!r}"
    if any(word in chain for word in _CREDENTIALS):
        return f"the credentials are refused or expired ({told:.300})"
    return told[:300]


def is_lasting(error: OSError) -> bool:
    """Whether storage will most likely go on failing until somebody does something about it."""
    return error.errno in _LASTING


class Storage(ABC):
    """The folder of one run. Paths are relative to it, with `/`.

    Everything raises OSError when the storage fails.
    """

    renames: bool
    """Whether a whole folder can be renamed in one step, which no reader sees half done."""

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    def write(self, path: str, pieces: Iterable[Data]) -> None:
        """Put a whole file in place, durably; folders on its way are made."""

    @abstractmethod
    def open(self, path: str) -> BinaryIO:
        """A file for reading from its start; unbuffered. Raises FileNotFoundError."""

    @abstractmethod
    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """The bytes start..stop-1 of a file; fewer where it ends before. Raises FileNotFoundError."""

    def is_in_place(self) -> bool:
        """Whether what is written now lies where it did when this object was made: no mount went since."""
        return True

    @abstractmethod
    def names(self) -> list[str]:
        """The folder's own entries, sorted; none where there is no folder."""

    @abstractmethod
    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of every file below a folder, by its path relative to that folder; none where there is no folder."""

    @abstractmethod
    def create(self, path: str, data: bytes) -> bool:
        """Write a file unless it exists; whether it was written. Stores without locks may let two writers through."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file, or a folder with all that is in it; nothing where there is none."""

    @abstractmethod
    def rename(self, old: str, new: str) -> None:
        """Rename a folder in one step, durably. Only where `renames`."""

    def read(self, path: str) -> bytes:
        """A small file. Raises FileNotFoundError."""
        with self.open(path) as file:
            return cast(Any, file).readall()


class LocalStorage(Storage):
    """A folder of this machine, or of a network mount. `node_id`: whose files are next to their places meanwhile."""

    renames = True

    def __init__(self, root: Path, node_id: str) -> None:
        super().__init__(str(root))
        self._root = root
        self._node_id = node_id
        with contextlib.suppress(OSError):  # which whatever is asked of the folder raises as well
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
        """A synced file in the same folder, gone afterwards unless it was moved."""
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

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        with (self._root / path).open("rb") as file:
            file.seek(start)
            return file.read(stop - start)

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
    """The device that a folder lies on, or is made on where it is not there."""
    return next(place.stat().st_dev for place in (folder, *folder.absolute().parents) if place.exists())


def _put_unless_there(fresh: Path, place: Path, data: bytes) -> None:
    """Have a file at its place, whole from the start where the mount knows hard links. Raises FileExistsError."""
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
    """Make renames in a folder durable, where its file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class ObjectStorage(Storage):
    """A prefix of an object store, through fsspec: no renames, no empty folders."""

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

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        with _as_os_errors():
            return cast(bytes, self._fs.cat_file(self._at(path), start=start, end=stop))

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
    """A file of an object store; whatever its client raises becomes an OSError."""

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
    """The clients of object stores raise errors of many kinds, of which not all are OSErrors."""
    try:
        yield
    except (OSError, AssertionError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def open_storage(path: str, run_id: str, node_id: str = "reader") -> Storage:
    """The folder of a run below `ckpt.path`, for a node that writes there or for anybody who reads.

    Raises ConfigError where its kind of URL cannot be used here.
    """
    return open_folder(path, node_id, key="ckpt.path", below=run_id)


def open_folder(path: str, writer: str, *, key: str, below: str = "") -> Storage:
    """A folder at a path or URL, or one below it, for files that are written whole and in one go.

    writer: in whose name files lie next to their places meanwhile; key: what the user calls the path.
    Raises ConfigError where its kind of URL cannot be used here.
    """
    core: Any = importlib.import_module("fsspec.core")  # has no types
    try:
        fs, root = core.url_to_fs(path, use_listings_cache=False, skip_instance_cache=True)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{key}={path!r} cannot be opened: {error}") from error
    if "file" in fs.protocol:
        return LocalStorage(Path(root) / below, writer)
    return ObjectStorage(fs, f"{root.rstrip('/')}/{below}", f"{path.rstrip('/')}/{below}".rstrip("/"))


def read_exactly(file: BinaryIO, outs: Sequence[memoryview]) -> None:
    """Fill buffers from a file, in order. Raises EOFError where it is too short."""
    for out in outs:
        while out:
            count = cast(Any, file).readinto(out)
            if not count:
                raise EOFError("it ends too early")
            out = out[count:]
