"""The folder of a run's checkpoints: its suitability, its owner, and which checkpoints to keep.

Two runs with one path refuse each other. A removal first deletes the manifest, so that no reader sees half a
checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from zeroband.checkpoint.layout import MANIFEST, OWNER, TEMPORARY, folder_of, step_of
from zeroband.checkpoint.loading import open_checkpoint
from zeroband.checkpoint.storage import LocalStorage, Storage, open_storage, reason_of
from zeroband.errors import CheckpointDamaged, CheckpointFailed, ConfigError

_REMOVED = ".removed"


def require_place(path: str, run_id: str) -> None:
    """Raise ConfigError if checkpoints cannot be below this path: a file, a missing folder, no permission.

    Only the last level is created: more missing levels are most likely a typo or a missing mount. Other storages are
    checked when the run begins.
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


@dataclass(frozen=True)
class Owner:
    """Content of `owner.json`."""

    run_id: str
    session: str
    """Session of the run; each bootstrap creates another, also when a run is resumed."""
    layout: str
    """Digest of the parameters' names and shapes."""


def read_owner(storage: Storage) -> Owner | None:
    """Return the owner of a folder, if it has one. Raises ConfigError if it is unreadable."""
    try:
        data = storage.read(OWNER)
    except FileNotFoundError:
        return None
    try:
        return TypeAdapter(Owner).validate_json(data, strict=True)
    except ValueError as error:
        raise ConfigError(
            f"{storage.url}/{OWNER} has no valid owner ({error!r:.100}); "
            "remove it if they are this run's, or set another ckpt.path"
        ) from error


def claim(storage: Storage, owner: Owner, *, takes_over: bool, resumes: bool = False) -> None:
    """Make a folder this run's before training; all its nodes may repeat this.

    `takes_over`: the run continues from these checkpoints, so the folder becomes its own, and the former run is refused
    from now on. `resumes`: this node was asked to resume from it. Raises ConfigError if the folder is another run's or
    out of reach.
    """
    try:
        if storage.create(OWNER, _to_json(owner)):
            return
        found = read_owner(storage)
        if found is not None and found.session == owner.session:
            return
        if found is not None and found.layout != owner.layout:
            raise ConfigError(
                f"{storage.url} holds checkpoints of another model under the same run.id={owner.run_id!r}; "
                "set another run.id or another ckpt.path"
            )
        if found is not None and not takes_over and resumes:
            raise ConfigError(
                f"{storage.url} holds checkpoints of an earlier run with run.id={owner.run_id!r}, and another "
                "run was started without this node; to resume from them, stop that run and start all its nodes with "
                "--resume and elastic.start_nodes, including this one; otherwise set another ckpt.path here"
            )
        if found is not None and not takes_over:
            raise ConfigError(
                f"{storage.url} belongs to another run with run.id={owner.run_id!r}; resume from its checkpoints with "
                "--resume, or set another run.id or another ckpt.path"
            )
        storage.write(OWNER, (_to_json(owner),))
    except OSError as error:
        raise ConfigError(f"ckpt.path: cannot write to {storage.url}: {reason_of(error)}") from error


def reclaim(storage: Storage, owner: Owner) -> bool:
    """Check that the folder is still this session's, and claim it again if it was removed; returns whether it was.

    Raises CheckpointFailed if the folder is another run's, or its mount is gone: writing to the empty mount point would
    fill another disk. Passes storage errors on.
    """
    try:
        found = read_owner(storage)
    except ConfigError as error:
        raise CheckpointFailed(str(error)) from error
    if found is None:
        if not storage.is_in_place():
            raise CheckpointFailed(f"{storage.url} has vanished together with its mount; mount it again")
        return storage.create(OWNER, _to_json(owner))
    if found.session != owner.session:
        raise CheckpointFailed(f"{storage.url} was taken over by another run with run.id={found.run_id!r}")
    return False


def _to_json(owner: Owner) -> bytes:
    return json.dumps(asdict(owner), indent=1).encode()


def clean_up(
    storage: Storage, current: int, *, keep_last: int, keep_every: int | None, at: Callable[[str], None]
) -> list[int]:
    """Remove checkpoints beyond `keep_last`, except multiples of `keep_every`, and abandoned saves.

    Returns the steps of removed checkpoints. Raises OSError.
    """
    committed = [current]
    for name in storage.names():
        step = step_of(name.removesuffix(TEMPORARY).removesuffix(_REMOVED))
        if step is None or step >= current:  # newer ones were left by a rollback, and are replaced later
            continue
        if name.endswith(TEMPORARY) or MANIFEST not in storage.sizes(name):
            storage.remove(name)
        else:
            committed.append(step)
    surplus = sorted(committed)[:-keep_last]
    removed = [step for step in surplus if not _is_kept(storage, step, keep_every)]
    for step in removed:
        remove_checkpoint(storage, step, at)
    return removed


def _is_kept(storage: Storage, step: int, keep_every: int | None) -> bool:
    if keep_every is None:
        return False
    try:
        return open_checkpoint(storage, step).manifest.stamp.round % keep_every == 0
    except CheckpointDamaged:
        return False


def remove_checkpoint(storage: Storage, step: int, at: Callable[[str], None] = lambda point: None) -> None:
    """Remove a committed checkpoint so that it is either complete or uncommitted at every moment."""
    folder = folder_of(step)
    if storage.renames:
        dead = f"{folder}{_REMOVED}{TEMPORARY}"
        storage.remove(dead)
        storage.rename(folder, dead)
        folder = dead
    else:
        storage.remove(f"{folder}/{MANIFEST}")
    at("clean_up")
    storage.remove(folder)
