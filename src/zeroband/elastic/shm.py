"""The node's folder in shared memory: claimed by one trainer, cleaned up at exit, swept after crashes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from pathlib import Path

from zeroband.errors import ConfigError

_PREFIX = "zeroband-"
_LOCK = "lock"
_YOUNG_S = 60.0


class NodeFolder:
    """`<shm_dir>/zeroband-<run>-<node>`, held through a file lock that the kernel frees when its owner dies.

    Local rank 0 claims it; the other ranks only need `path_of`.
    """

    def __init__(self, shm_dir: Path, run_id: str, node_id: str) -> None:
        if not shm_dir.is_dir():
            raise ConfigError(f"node.shm_dir={str(shm_dir)!r} is no folder; name one on a memory file system")
        sweep(shm_dir)
        self.path = self.path_of(shm_dir, run_id, node_id)
        self.path.mkdir(mode=0o700, exist_ok=True)
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ConfigError(
                f"node.id={node_id!r} of run.id={run_id!r} is already running on this machine ({self.path} is held); "
                "give the second node another node.id"
            ) from None
        for left_over in self.path.iterdir():
            if left_over.name != _LOCK:
                left_over.unlink()

    @staticmethod
    def path_of(shm_dir: Path, run_id: str, node_id: str) -> Path:
        return shm_dir / f"{_PREFIX}{run_id}-{node_id}"

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep(shm_dir: Path) -> list[Path]:
    """Remove the folders whose owners are dead. Returns what was removed."""
    removed: list[Path] = []
    for folder in shm_dir.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    return removed


def _is_abandoned(folder: Path) -> bool:
    lock = folder / _LOCK
    if not lock.exists():  # being made at this moment, or half removed
        return time.time() - folder.stat().st_mtime > _YOUNG_S
    descriptor = os.open(lock, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
