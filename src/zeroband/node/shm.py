"""The node's folder in shared memory: claimed by one trainer, cleaned up at exit, swept after crashes.

A trainer that crashed leaves it to the one that its launcher starts in its place: it is not swept while that lives.
Everybody on the machine may write to /dev/shm, so what stands there under our name is looked at before it is used: only
a folder that is this user's, with mode 0700, and no link. Once it is that, no other user can put one in its place.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from zeroband.errors import ConfigError

_PREFIX = "zeroband-"
_LOCK = "lock"
"""Held by the owner; names the launcher that would start another one in its place."""

_YOUNG_S = 60.0
_CLAIMS = 10
_LONGEST_NAME = 64


class NodeFolder:
    """`<shm_dir>/zeroband-<run>-<node>`, held through a file lock that the kernel frees when its owner dies.

    Local rank 0 claims it; the other ranks only need `path_of`. `keeps`: asked with the claimed folder which of the
    files in it, that an earlier trainer left, are not to be removed. `launcher`: as `restarting_launcher` tells it.
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
                f"node.shm_dir={str(shm_dir)!r} lets every user replace the folders of the others (mode "
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
                left_over.unlink(missing_ok=True)  # a sweeper that began before may still remove them

    @staticmethod
    def path_of(shm_dir: Path, run_id: str, node_id: str) -> Path:
        return shm_dir / f"{_PREFIX}{run_id}@{node_id}"  # no id has an @: two nodes never share a folder

    def close(self, *, is_left: bool = False) -> None:
        """Give it back. `is_left`: to the trainer that comes after this one, with all that is in it."""
        if not is_left:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def objection_to(folder: Path) -> str:
    """Why a folder must not hold what is this user's alone; empty where it may, or is not there. Follows no link."""
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
    """Whether this is a folder, not a link to one, that belongs to this user; so that it may be removed."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def remove(folder: Path) -> None:
    """Remove a folder with all that is in it if it is this user's; follows no link."""
    if is_ours(folder):
        shutil.rmtree(folder, ignore_errors=True)


def _claim(folder: Path) -> int:
    """Make and lock a folder; the descriptor of its lock.

    Raises ConfigError where somebody prepared it, and BlockingIOError while another process holds it.
    """
    for _ in range(_CLAIMS):  # a sweeper may remove the folder between the steps
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if why := objection_to(folder):
            raise ConfigError(
                f"{folder} is not for this node to use: {why}; somebody else made it. Remove it, or set node.shm_dir "
                "to a folder that only you may write to"
            )
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            descriptor = _lock(folder, create=True)
            if descriptor is not None:
                return descriptor
    raise BlockingIOError(f"{folder} is removed again and again")


def _lock(folder: Path, *, create: bool) -> int | None:
    """Lock a folder of this user's without waiting; None if it is not the one at this path any more.

    Raises BlockingIOError.
    """
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
    """Remove this user's folders whose owners are dead and have no successor, all but `spare`.

    Returns what was removed.
    """
    folders = [folder for folder in sorted(shm_dir.glob(f"{_PREFIX}*")) if is_ours(folder) and folder != spare]
    return [folder for folder in folders if remove_abandoned(folder)]


def remove_abandoned(folder: Path) -> bool:
    """Remove a folder that no process holds; its lock is held meanwhile.

    Not one that is left to a trainer which a living launcher is about to start, nor one that is young
    and may be held in a moment.
    """
    try:
        descriptor = _lock(folder, create=False)
    except FileNotFoundError:  # being made at this moment, or half removed
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
    is_awaited = launcher != "" and _told_apart(launcher.partition(":")[0]) == launcher
    if not is_awaited:
        shutil.rmtree(folder, ignore_errors=True)
    os.close(descriptor)
    return not is_awaited


def restarting_launcher(environ: Mapping[str, str], *, left: bool = False) -> str:
    """This process's launcher, told from every other one; empty where it restarts no trainer. `left`: any more."""
    most, done = int(environ.get("TORCHELASTIC_MAX_RESTARTS", "0")), int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return "" if most == 0 or (left and done >= most) else _told_apart(os.getppid())


def launch_of(environ: Mapping[str, str]) -> str:
    """Names what a launcher that restarts its trainers started, on any machine at any time; empty without one."""
    launcher = restarting_launcher(environ)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip() if launcher else ""
    return f"{boot}:{launcher}" if launcher else ""


def is_restart(environ: Mapping[str, str]) -> bool:
    """Whether this process's launcher started it in the place of one that crashed."""
    return int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def _told_apart(pid: int | str) -> str:
    """A process, told from every other one that has its number earlier or later; empty where it does not live."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    state, *numbers = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else f"{pid}:{numbers[18]}"  # when it began, in clock ticks
