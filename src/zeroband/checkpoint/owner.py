"""Which run a checkpoint folder belongs to. Two runs that were pointed at one path refuse each other."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter

from zeroband.checkpoint.layout import OWNER
from zeroband.checkpoint.storage import Storage, reason_of
from zeroband.errors import CheckpointFailed, ConfigError


@dataclass(frozen=True)
class Owner:
    """What `owner.json` says."""

    run_id: str
    session: str
    """Session of the run: each founding makes another one, also that of a run that was resumed."""
    layout: str
    """Digest of the parameters' names and shapes."""


def read_owner(storage: Storage) -> Owner | None:
    """The owner of a folder; None where it has none. Raises ConfigError where it cannot be understood."""
    try:
        data = storage.read(OWNER)
    except FileNotFoundError:
        return None
    try:
        return TypeAdapter(Owner).validate_json(data, strict=True)
    except ValueError as error:
        raise ConfigError(
            f"{storage.url}/{OWNER} does not say whose checkpoints these are ({error!r:.100}); "
            "remove it if they are this run's, or set another ckpt.path"
        ) from error


def claim(storage: Storage, owner: Owner, *, takes_over: bool, resumes: bool = False) -> None:
    """Make a folder this run's before it trains; again and by all its nodes, as often as they like.

    `takes_over`: the run goes on from what is there, so the folder becomes its own, and whoever saved there before is
    refused from now on. `resumes`: this node was asked to go on from it. Raises ConfigError where the folder is another
    run's or out of reach.
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
                f"{storage.url} holds checkpoints of an earlier run with run.id={owner.run_id!r}, and the run that is "
                "going on began anew without this node; to go on from them, end that run and start its nodes again "
                "with --resume and elastic.start_nodes, this one among them; else set another ckpt.path here"
            )
        if found is not None and not takes_over:
            raise ConfigError(
                f"{storage.url} belongs to another run with run.id={owner.run_id!r}; go on from its checkpoints with "
                "--resume, or set another run.id or another ckpt.path"
            )
        storage.write(OWNER, (_to_json(owner),))
    except OSError as error:
        raise ConfigError(f"ckpt.path: cannot write to {storage.url}: {reason_of(error)}") from error


def reclaim(storage: Storage, owner: Owner) -> bool:
    """Make sure that the folder is still this session's, and claim it again where somebody removed it.

    Returns whether it did that. Raises CheckpointFailed where the folder is another run's, or its mount is gone: what
    is written to the empty place of a mount fills another disk. Storage errors pass.
    """
    try:
        found = read_owner(storage)
    except ConfigError as error:
        raise CheckpointFailed(str(error)) from error
    if found is None:
        if not storage.is_in_place():
            raise CheckpointFailed(f"{storage.url} is gone, and with it its mount; mount it again")
        return storage.create(OWNER, _to_json(owner))
    if found.session != owner.session:
        raise CheckpointFailed(f"{storage.url} was taken over by another run with run.id={found.run_id!r}")
    return False


def _to_json(owner: Owner) -> bytes:
    return json.dumps(asdict(owner), indent=1).encode()
