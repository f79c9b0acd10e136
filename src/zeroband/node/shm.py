"""The node's folder in shared memory: claimed by one trainer, removed at exit, swept after crashes.

After a crash it stays for the trainer that the launcher starts next, and is not swept while that launcher lives. Any
user may write to /dev/shm, so a folder with our name is checked before use: it must be this user's, with mode 0700, and
not a link. After that, no other user can replace it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Callable, Collection
from pathlib import Path

from zeroband.errors import ConfigError
from zeroband.observe.process_stat import identity_of

_PREFIX = "zeroband-"
_LOCK = "lock"
"""Lock file of the owner; contains the launcher that would restart it."""

_YOUNG_S = 60.0
_CLAIMS = 10
_LONGEST_NAME = 64


class NodeFolder:
    """`<shm_dir>/zeroband-<run>@<node>`, held by a file lock that the kernel releases when its owner dies.

    Local rank 0 claims it; the other ranks only need `path_of`. `keeps`: returns which files of an earlier trainer in
    the claimed folder to keep. `launcher`: as `restarting_launcher` returns it.
    """

    def __init__(
        self,
        shm_dir: Path,
        run_id: str,
        node_id: str,
        keeps: Callable[[Path], Collection[str]] = lambda folder: (),
        *,
        launcher: str = "",
    ) -> None:
        if not shm_dir.is_dir():
            raise ConfigError(f"node.shm_dir={str(shm_dir)!r} is no folder; name one on a memory file system")
        if (shm_dir.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX)) == stat.S_IWOTH:
            raise ConfigError(
                f"node.shm_dir={str(shm_dir)!r} lets every user replace other users' folders (mode "
                f"{stat.S_IMODE(shm_dir.stat().st_mode):04o}); chmod +t it, or name one that only you may write to"
            )
        self.path = self.path_of(shm_dir, run_id, node_id)
        sweep(shm_dir, spare=self.path)
        try:
            self._lock = _claim(self.path)
        except BlockingIOError:
            raise ConfigError(
                f"node.id={node_id!r} of run.id={run_id!r} is already running on this machine ({self.path} is held); "
                "give a second node of this run another node.id, and another run another run.id"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, launcher.encode("ascii"), 0)
        kept = {_LOCK, *keeps(self.path)}
        for left_over in self.path.iterdir():
            if left_over.name not in kept:
                left_over.unlink(missing_ok=True)  # a sweeper that started earlier may still remove them

    @staticmethod
    def path_of(shm_dir: Path, run_id: str, node_id: str) -> Path:
        return shm_dir / f"{_PREFIX}{run_id}@{node_id}"  # no id has an @: two nodes never share a folder

    def close(self, *, is_left: bool = False) -> None:
        """Release the folder. `is_left`: keep its files for the next trainer."""
        if not is_left:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def why_unsafe(folder: Path) -> str:
    """Return why a folder is not safe for private files; empty if it is, or does not exist. Follows no link."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return ""
    if not stat.S_ISDIR(found.st_mode):
        return "it is a link" if stat.S_ISLNK(found.st_mode) else "it is no folder"
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}, and this is user {os.geteuid()}"
    if found.st_mode & 0o077:
        return f"other users may use it (mode {stat.S_IMODE(found.st_mode):04o}, not 0700)"
    return ""


def is_ours(folder: Path) -> bool:
    """Whether this is a folder of this user, and not a link, so that it may be removed."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def remove(folder: Path) -> None:
    """Remove a folder and its content if it is this user's; follows no link."""
    if is_ours(folder):
        shutil.rmtree(folder, ignore_errors=True)


def _claim(folder: Path) -> int:
    """Create and lock a folder; returns the descriptor of its lock.

    Raises ConfigError if another user prepared it, BlockingIOError while another process holds it.
    """
    for _ in range(_CLAIMS):  # a sweeper may remove the folder between the steps
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if why := why_unsafe(folder):
            raise ConfigError(
                f"{folder} is not safe for this node: {why}; somebody else created it. Remove it, or set node.shm_dir "
                "to a folder that only you may write to"
            )
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            descriptor = _lock(folder, create=True)
            if descriptor is not None:
                return descriptor
    raise BlockingIOError(f"{folder} was removed {_CLAIMS} times")


def _lock(folder: Path, *, create: bool) -> int | None:
    """Lock a folder of this user without waiting; returns None if it was replaced meanwhile. Raises BlockingIOError."""
    inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(inside).st_uid != os.geteuid():
            return None
        descriptor = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0), 0o600, dir_fd=inside)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_there = os.path.samestat(os.fstat(descriptor), (folder / _LOCK).lstat())
        except OSError:
            os.close(descriptor)
            raise
    finally:
        os.close(inside)
    if is_there:
        return descriptor
    os.close(descriptor)
    return None


def sweep(shm_dir: Path, *, spare: Path | None = None) -> list[Path]:
    """Remove and return this user's folders whose owners are dead and have no successor, except `spare`."""
    folders = [folder for folder in sorted(shm_dir.glob(f"{_PREFIX}*")) if is_ours(folder) and folder != spare]
    return [folder for folder in folders if remove_abandoned(folder)]


def remove_abandoned(folder: Path) -> bool:
    """Remove a folder that no process holds, under its lock.

    Spares one that waits for a trainer which a living launcher is about to start, and a young one, which its owner may
    be about to lock.
    """
    try:
        descriptor = _lock(folder, create=False)
    except FileNotFoundError:  # without a lock file: just created, or half removed
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > _YOUNG_S:
                shutil.rmtree(folder, ignore_errors=True)
                return True
        return False
    except OSError:  # held, or another user's
        return False
    if descriptor is None:
        return False
    launcher = os.pread(descriptor, _LONGEST_NAME, 0).decode("ascii", errors="replace")
    is_awaited = launcher != "" and identity_of(launcher.partition(":")[0]) == launcher
    if not is_awaited:
        shutil.rmtree(folder, ignore_errors=True)
    os.close(descriptor)
    return not is_awaited
