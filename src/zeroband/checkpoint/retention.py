"""Which checkpoints are kept, and the removal of the others: uncommitted first, so that no reader sees half of one."""

from __future__ import annotations

from collections.abc import Callable

from zeroband.checkpoint.layout import MANIFEST, TEMPORARY, folder_of, step_of
from zeroband.checkpoint.loading import open_checkpoint
from zeroband.checkpoint.storage import Storage
from zeroband.errors import CheckpointDamaged

REMOVED = ".removed"


def surplus(steps: list[int], current: int, keep_last: int) -> list[int]:
    """Steps beyond the newest `keep_last` up to the current one, which was committed a moment ago and stays.

    Newer ones are what a rollback left behind; they are replaced when the run comes to them again.
    """
    past = sorted(step for step in steps if step <= current)
    return past[: -max(keep_last, 1)]


def clean_up(
    storage: Storage, current: int, *, keep_last: int, keep_every: int | None, at: Callable[[str], None]
) -> list[int]:
    """Remove what is beyond `keep_last`, but for rounds that are multiples of `keep_every`, and dead saves.

    Returns the steps of removed checkpoints. Raises OSError.
    """
    committed = [current]
    for name in storage.names():
        step = step_of(name.removesuffix(TEMPORARY).removesuffix(REMOVED))
        if step is None or step >= current:
            continue
        if name.endswith(TEMPORARY) or MANIFEST not in storage.sizes(name):
            storage.remove(name)
        else:
            committed.append(step)
    removed = [step for step in surplus(committed, current, keep_last) if not _is_kept(storage, step, keep_every)]
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
    """Remove a committed checkpoint so that it is whole or none at every moment."""
    folder = folder_of(step)
    if storage.renames:
        dead = f"{folder}{REMOVED}{TEMPORARY}"
        storage.remove(dead)
        storage.rename(folder, dead)
        folder = dead
    else:
        storage.remove(f"{folder}/{MANIFEST}")
    at("clean_up")
    storage.remove(folder)
