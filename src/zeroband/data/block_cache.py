"""On-disk LRU cache of fetched token blocks, one file per block, shared by all processes of a machine.

    <set>/in-use                shared lock of every process that has the set open
    <set>/<n >> 12>/<n>         block n, followed by its xxh3-64
    <set>/<n >> 12>/<n>.part    exclusive lock of the process that fetches block n

Files are written to a temporary name and renamed; blocks are verified on every read. Reads update the modification
time, and eviction removes the oldest files first. The kernel releases a lock when its holder dies. Safe to use from any
thread and process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

import xxhash

from zeroband.config.data import DataConfig
from zeroband.errors import ConfigError
from zeroband.observe.log import get_logger

CACHED = "blocks"
"""Subfolder of data.cache_dir."""
_DIGEST_BYTES = 8
_FOLDER_BITS = 12
_LOW_WATER = 0.98
"""Fraction of the capacity that eviction leaves filled, so that not every new block scans the cache."""
_SHRINK = 0.5
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_IN_USE = "in-use"
_PART = ".part"

_log = get_logger(__name__)


class BlockCache:
    """The cached blocks of one set.

    `capacity_bytes`: limit for this set plus sets that no process has open. `evicts`: whether this process enforces
    it; one of the node's `ranks`, which fill the cache at the same rate, is enough.
    Raises: ConfigError if the folder is not writable.
    """

    def __init__(self, root: Path, fingerprint: str, capacity_bytes: float, *, evicts: bool, ranks: int = 1) -> None:
        self._root = root
        self._folder = root / fingerprint
        self.capacity_bytes = capacity_bytes
        self._evicts, self._ranks = evicts, ranks
        self._lock = threading.Lock()
        self._added_bytes = float("inf")
        """Bytes added since the last scan; infinite before the first."""
        self._is_full = False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            in_use = os.open(self._folder / _IN_USE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"data.cache_dir={str(root.parent)!r}: cannot write fetched data: {error}") from error
        self.close = weakref.finalize(self, os.close, in_use)
        """Releases the set, so that other processes may evict its blocks."""
        _lock(in_use, fcntl.LOCK_SH, blocking=True)

    def read(self, block: int) -> bytes | None:
        """Return the bytes of a block; None if it is missing or damaged. Removes a damaged block."""
        path = self._path(block)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        content, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
        if digest != xxhash.xxh3_64_digest(content):
            _log.warning("damaged block in the cache; fetching it again", extra={"fields": {"file": path}})
            path.unlink(missing_ok=True)
            return None
        self.touch(block)
        return content

    def clear(self) -> None:
        """Remove all blocks."""
        for _, _, path in self._blocks(self._folder):
            Path(path).unlink(missing_ok=True)

    def touch(self, block: int) -> bool:
        """Mark a block as just used; return whether it is cached."""
        try:
            os.utime(self._path(block))
        except OSError:
            return False
        return True

    def fetch(self, block: int, read: Callable[[], bytes]) -> bytes | None:
        """Store and return what `read` returns; None if the block is cached or another thread or process fetches it.

        On a full disk the block is not stored; this is logged once.
        """
        part = self._path(block).with_suffix(_PART)
        with claimed(part) as descriptor:
            if descriptor is None or self.touch(block):
                return None
            content = read()
            self._put(block, part, descriptor, content)
        return content

    def _put(self, block: int, part: Path, descriptor: int, content: bytes) -> None:
        try:
            os.ftruncate(descriptor, 0)
            _write(descriptor, [content, xxhash.xxh3_64_digest(content)])
            part.rename(self._path(block))
        except FileNotFoundError:
            return  # on a file system without locks another process may have stored the same block
        except OSError as error:
            if error.errno not in _DISK_FULL:
                raise
            self._shrink(error)
            return
        with self._lock:
            self._added_bytes += len(content)

    def evict(self, pinned: Callable[[], Collection[int]]) -> None:
        """Remove the least recently used files until the cache fits, except pinned blocks.

        Returns at once unless enough was added since the last scan. `pinned`: numbers of the blocks to keep.
        """
        with self._lock:
            if not self._evicts or self._added_bytes < (1 - _LOW_WATER) * self.capacity_bytes / self._ranks:
                return
            self._added_bytes = 0
        limit_bytes = _LOW_WATER * self.capacity_bytes
        found = [*self._blocks(self._folder), *(file for other in self._unused_sets() for file in self._blocks(other))]
        total = sum(size for _, size, _ in found)
        if total <= limit_bytes:
            return
        kept = {str(self._path(block)) for block in pinned()}
        for _, size, path in sorted(found):
            if total <= limit_bytes:
                break
            if path not in kept:
                with contextlib.suppress(OSError):
                    Path(path).unlink()
                total -= size

    def _path(self, block: int) -> Path:
        return self._folder / f"{block >> _FOLDER_BITS:x}" / f"{block:x}"

    def _unused_sets(self) -> Iterable[Path]:
        """Yield the folders of sets that no process has open."""
        for folder in self._root.iterdir():
            if folder != self._folder and folder.is_dir():
                with contextlib.suppress(OSError), _try_exclusive(folder / _IN_USE) as is_locked:
                    if is_locked:
                        yield folder

    def _blocks(self, folder: Path) -> Iterable[tuple[float, int, str]]:
        """Yield last use, size and path of each block; remove partial files of dead processes."""
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
        """Reduce the capacity to half of what is used, because the disk is full."""
        with self._lock:
            used = sum(size for _, size, _ in self._blocks(self._folder))
            self.capacity_bytes = min(self.capacity_bytes, max(used, 1) * _SHRINK)
            self._added_bytes = float("inf")
            was_full, self._is_full = self._is_full, True
        if not was_full:
            fields = {"folder": self._folder, "free": shutil.disk_usage(self._folder).free, "why": error.strerror}
            _log.warning(
                "the cache's disk is full; using a smaller cache; lower data.cache_gb", extra={"fields": fields}
            )


def cache_dir_of(data: DataConfig) -> Path:
    """Return data.cache_dir; by default the `zeroband` folder in the user's cache directory."""
    return data.cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zeroband"


def cached_bytes(cache_dir: Path) -> int:
    """Return the size of everything fetched into a cache folder."""
    total = 0
    for folder, _, names in os.walk(cache_dir / CACHED):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(folder, name).stat().st_size
    return total


def _write(descriptor: int, parts: Iterable[bytes]) -> None:
    for part in parts:
        left = memoryview(part)
        while left:
            left = left[os.write(descriptor, left) :]


def _lock(descriptor: int, kind: int, *, blocking: bool = False) -> bool:
    """Return whether the lock was taken; without lock support always true, so that a block may be fetched twice."""
    try:
        fcntl.flock(descriptor, kind if blocking else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL):
            raise
    return True


@contextmanager
def _try_exclusive(path: Path) -> Generator[bool]:
    """Lock an existing file exclusively if it is free; yields whether it was."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield _lock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


@contextmanager
def claimed(part: Path) -> Generator[int | None]:
    """Create and lock a temporary file, removed at exit unless renamed; yields None if another process holds it."""
    while True:
        part.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            break
        except FileNotFoundError:  # the folder was removed concurrently
            continue
    is_locked = False
    try:
        is_locked = _lock(descriptor, fcntl.LOCK_EX) and _is_same(descriptor, part)
        yield descriptor if is_locked else None
    finally:
        if is_locked and _is_same(descriptor, part):
            part.unlink(missing_ok=True)
        os.close(descriptor)


def _is_same(descriptor: int, path: Path) -> bool:
    """Whether the open file still has this name; the previous lock holder may have renamed it."""
    try:
        return os.fstat(descriptor).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False
