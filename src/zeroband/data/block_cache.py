"""Blocks of ids that were fetched, a small file each, shared by all processes of a machine.

    <set>/in-use                held, shared, by each process that has the set open
    <set>/<n >> 12>/<n>         block n: its bytes, and xxh3-64 of them
    <set>/<n >> 12>/<n>.part    locked by the one who fetches it; the kernel frees the lock when its holder dies
    kept/<name>                 what is fetched whole, hashes and indices; held, shared, by its users

A file is written under another name and renamed, and a block is verified whenever it is read. A use sets its time, so
the oldest go first where room is needed. Any thread and process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

import xxhash

from zeroband.errors import ConfigError, StorageLost
from zeroband.observe.log import get_logger

CACHED = "blocks"
"""Folder of data.cache_dir that holds what was fetched."""
_DIGEST_BYTES = 8
_FOLDER_BITS = 12
_POLL_S = 0.02
_ROOM = 0.98
"""Share of its room that a cache is brought down to, so that it is not looked through for each block."""
_LEAST_ROOM = 0.5
_FULL = (errno.ENOSPC, errno.EDQUOT)
_IN_USE = "in-use"
_KEPT = "kept"
_PART = ".part"

_log = get_logger(__name__)


class BlockCache:
    """The fetched blocks of one set.

    `room_bytes`: what they may take together with what is there of sets that are not open. `makes_room`: whether
    this one sees to that; one process of a node is enough, of the `ranks` that fill it alike.
    Raises: ConfigError where the folder cannot be written.
    """

    def __init__(self, root: Path, fingerprint: str, room_bytes: float, *, makes_room: bool, ranks: int = 1) -> None:
        self._root = root
        self._folder = root / fingerprint
        self._room_bytes = room_bytes
        self._makes_room, self._ranks = makes_room, ranks
        self._lock = threading.Lock()
        self._added_bytes = float("inf")
        """Since the cache was looked through; as much as that may hold is looked through at the first block."""
        self._is_full = False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._in_use = os.open(self._folder / _IN_USE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"data.cache_dir={str(root.parent)!r} cannot hold what is fetched: {error}") from error
        _lock(self._in_use, fcntl.LOCK_SH, waits=True)

    def read(self, block: int) -> bytes | None:
        """The bytes of a block; None where it is not there, or not whole: then it is gone."""
        path = self._path(block)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        bare, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
        if digest != _digest(bare):
            _log.warning("a block in the cache is damaged; fetching it again", extra={"fields": {"file": path}})
            path.unlink(missing_ok=True)
            return None
        self.use(block)
        return bare

    def use(self, block: int) -> bool:
        """Have a block stay longer than what was not used since; whether it is there."""
        try:
            os.utime(self._path(block))
        except OSError:
            return False
        return True

    def drop(self, block: int) -> None:
        """Remove a block."""
        self._path(block).unlink(missing_ok=True)

    @contextmanager
    def claim(self, block: int) -> Generator[Callable[[bytes], None] | None]:
        """The right to fetch a block, and what puts it here then; None while another thread or process has it.

        A disk without room for a block is told once, and the block is not kept.
        """
        part = self._path(block).with_suffix(_PART)
        with claimed(part) as descriptor:
            yield None if descriptor is None else functools.partial(self._put, block, part, descriptor)

    def _put(self, block: int, part: Path, descriptor: int, content: bytes) -> None:
        """Write a claimed block."""
        try:
            os.ftruncate(descriptor, 0)
            _write(descriptor, content, _digest(content))
            part.rename(self._path(block))
        except FileNotFoundError:
            return  # without locks another process may have put the same block there meanwhile
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._shrink(error)
            return
        with self._lock:
            self._added_bytes += len(content)

    def allocate(self, expected: Callable[[], Collection[int]]) -> None:
        """Remove what was not used for longest, but none of the blocks that are expected.

        Looks only where a part of the room was filled since. `expected`: numbers of blocks.
        """
        with self._lock:
            if not self._makes_room or self._added_bytes < (1 - _ROOM) * self._room_bytes / self._ranks:
                return
            self._added_bytes = 0
        found = [*self._blocks(self._folder), *(one for other in self._abandoned() for one in self._blocks(other))]
        found += self._abandoned_files()
        total = sum(size for _, size, _ in found)
        if total <= _ROOM * self._room_bytes:
            return
        stay = {str(self._path(block)) for block in expected()}
        for _, size, path in sorted(found):
            if total <= _ROOM * self._room_bytes:
                break
            if path not in stay:
                with contextlib.suppress(OSError):
                    Path(path).unlink()
                total -= size

    def close(self) -> None:
        """Give the set up, so that others may remove its blocks."""
        os.close(self._in_use)

    def _path(self, block: int) -> Path:
        return self._folder / f"{block >> _FOLDER_BITS:x}" / f"{block:x}"

    def _abandoned(self) -> Iterable[Path]:
        """Folders of other sets that no process has open."""
        for folder in self._root.iterdir():
            if folder != self._folder and folder.is_dir():
                with contextlib.suppress(OSError), _locked(folder / _IN_USE) as is_ours:
                    if is_ours:
                        yield folder

    def _abandoned_files(self) -> Iterable[tuple[float, int, str]]:
        """Last use, size and path of each file that was fetched whole and is not in use."""
        for path in (self._root / _KEPT).glob("*"):
            if path.suffix != _PART:
                with contextlib.suppress(OSError), _locked(path) as is_ours:
                    if is_ours:
                        stat = path.stat()
                        yield stat.st_mtime, stat.st_size, str(path)

    def _blocks(self, folder: Path) -> Iterable[tuple[float, int, str]]:
        """Last use, size and path of each block; what was left of a fetch whose process died is removed."""
        for part in folder.iterdir():
            if not part.is_dir():
                continue
            with contextlib.suppress(FileNotFoundError), os.scandir(part) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        if entry.name.endswith(_PART):
                            with claimed(Path(entry.path)):
                                pass
                            continue
                        stat = entry.stat()
                        yield stat.st_mtime, stat.st_size, entry.path

    def _shrink(self, error: OSError) -> None:
        """Take less room than was asked for, as the disk has not as much."""
        with self._lock:
            there = sum(size for _, size, _ in self._blocks(self._folder))
            self._room_bytes = min(self._room_bytes, max(there, 1) * _LEAST_ROOM)
            self._added_bytes = float("inf")
            is_told, self._is_full = self._is_full, True
        if not is_told:
            fields = {"folder": self._folder, "free": shutil.disk_usage(self._folder).free, "why": error.strerror}
            _log.warning(
                "the disk of the cache is full; going on with less of it: lower data.cache_gb", extra={"fields": fields}
            )


class KeptFile:
    """A file that was fetched whole, which the cache keeps for as long as this exists; used as `FileInPlace` is."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor
        self.size = os.fstat(descriptor).st_size

    def read(self, start: int, stop: int) -> bytes:
        try:
            content = os.pread(self._descriptor, stop - start, start)
        except OSError as error:
            raise StorageLost(
                f"{self._path} cannot be read from the cache: {error}; mend that disk, or set data.cache_dir to another"
            ) from error
        if len(content) < stop - start:
            raise StorageLost(f"{self._path} was cut while it was in use; remove it and start the node again")
        return content

    def drop(self) -> None:
        self._path.unlink(missing_ok=True)

    def __del__(self) -> None:
        os.close(self._descriptor)


def keep(root: Path, name: str, make: Callable[[], Iterable[bytes]]) -> KeptFile:
    """The file that holds what `make` yields; made once on a machine, and the others wait while its maker lives.

    Raises: ConfigError where the folder cannot be written.
    """
    path = root / _KEPT / name
    part = path.with_name(f"{name}{_PART}")
    try:
        while (kept := _held(path)) is None:
            with claimed(part) as descriptor:
                if descriptor is not None and not path.exists():
                    os.ftruncate(descriptor, 0)
                    for piece in make():
                        _write(descriptor, piece)
                    os.fsync(descriptor)
                    part.rename(path)
                    continue
            time.sleep(_POLL_S)
    except OSError as error:
        raise ConfigError(f"data.cache_dir={str(root.parent)!r} cannot hold what is fetched: {error}") from error
    return kept


def _held(path: Path) -> KeptFile | None:
    """Hold a file so that it is not removed for room; None where it is not there, or was removed just now."""
    try:
        kept = KeptFile(path, descriptor := os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except FileNotFoundError:
        return None
    _lock(descriptor, fcntl.LOCK_SH, waits=True)
    if not _is_same(descriptor, path):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return kept


def cached_bytes(cache_dir: Path) -> int:
    """Bytes of all that was fetched into a cache folder."""
    found = (Path(folder, name) for folder, _, names in os.walk(cache_dir / CACHED) for name in names)
    total = 0
    for path in found:
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def _digest(content: bytes) -> bytes:
    return xxhash.xxh3_64_digest(content)


def _write(descriptor: int, *parts: bytes) -> None:
    for part in parts:
        left = memoryview(part)
        while left:
            left = left[os.write(descriptor, left) :]


def _lock(descriptor: int, kind: int, *, waits: bool = False) -> bool:
    """Whether it is ours; on a file system that knows no locks it is, at the price of fetching a block twice."""
    try:
        fcntl.flock(descriptor, kind if waits else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL):
            raise
    return True


@contextmanager
def _locked(path: Path) -> Generator[bool]:
    """Hold a file that exists, alone, if it is free."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield _lock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


@contextmanager
def claimed(part: Path) -> Generator[int | None]:
    """Hold a file for what is being written, which is gone afterwards unless it was renamed; None where others do."""
    while True:
        part.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            break
        except FileNotFoundError:  # the folder was removed meanwhile
            continue
    is_ours = False
    try:
        is_ours = _lock(descriptor, fcntl.LOCK_EX) and _is_same(descriptor, part)
        yield descriptor if is_ours else None
    finally:
        if is_ours and _is_same(descriptor, part):
            part.unlink(missing_ok=True)
        os.close(descriptor)


def _is_same(descriptor: int, path: Path) -> bool:
    """Whether the open file still has this name: who held it before may have renamed it."""
    try:
        return os.fstat(descriptor).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False
