"""Whether ckpt.path can be what the user meant, before anything is trained."""

from __future__ import annotations

import os
from pathlib import Path

from zeroband.checkpoint.storage import LocalStorage, open_storage
from zeroband.errors import ConfigError


def require_place(path: str, run_id: str) -> None:
    """Raise ConfigError where checkpoints cannot be below this path: a file, a folder that nobody made, no permission.

    A folder is made where its parent exists: one more level that is missing is most likely a slip, or a mount that is
    not there. Other storages are asked when the run begins.
    """
    if "://" in path.removeprefix("file://"):
        return
    storage = open_storage(path, run_id)
    assert isinstance(storage, LocalStorage)
    folder = Path(storage.url).parent
    if not folder.exists() and not folder.parent.is_dir():
        raise ConfigError(
            f"ckpt.path={path!r}: there is no folder {folder.parent}; make it, mount it, or correct the path"
        )
    nearest = folder if folder.exists() else folder.parent
    if not nearest.is_dir():
        raise ConfigError(f"ckpt.path={path!r} is a file; name a folder, below which <run.id>/ is made")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(
            f"ckpt.path={path!r}: this user may not write to {nearest}; choose another or change its mode"
        )
