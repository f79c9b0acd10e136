"""The manifest of a checkpoint: which state it is, and the size and hash of every file. Written last; pure.

Its own hash is in it, so a changed bit anywhere in a checkpoint is found.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import xxhash

from zeroband.errors import CheckpointDamaged

FORMAT = 1
"""Of the layout; a reader refuses those it does not know."""


@dataclass(frozen=True)
class StoredFile:
    """Size in bytes and xxh3-128 of a file."""

    size: int
    hash: str


@dataclass(frozen=True)
class Stamp:
    """Which state a checkpoint holds. Equal on all nodes that save it."""

    run_id: str
    session: str
    """Of the run that saved it: another one for each founding."""
    round: int
    inner_step: int
    payload: Mapping[str, Any]
    """The verdict's payload, with the run's progress: data ledger, assignments, tokens."""
    state: str
    """Digest of the outer state after the round."""
    sections: tuple[str, ...]
    """Of the outer state, the parameters first, in the order of the digest."""
    members: tuple[str, ...]
    """Node ids of those that were in the round, sorted."""
    layout: str
    """Digest of the parameters' names and shapes."""
    model: Mapping[str, Any]
    """The [model] section, and `vocab_size`."""
    tokenizer: str

    @property
    def attempt(self) -> str:
        """One value for this save, so that what an earlier one left behind is not taken for a part of it."""
        said = json.dumps([self.session, self.round, self.state, self.members, self.payload], sort_keys=True)
        return xxhash.xxh3_64_hexdigest(said.encode())


@dataclass(frozen=True)
class Manifest:
    """A whole checkpoint."""

    stamp: Stamp
    files: Mapping[str, StoredFile]
    """By path relative to the checkpoint's folder; the manifest itself is not among them."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes whose own state is here."""
        return tuple(sorted({path.split("/")[1] for path in self.files if path.startswith("nodes/")}))

    def to_json(self) -> bytes:
        content = {
            "format": FORMAT,
            **asdict(self.stamp),
            "files": {path: asdict(file) for path, file in sorted(self.files.items())},
        }
        content = json.loads(json.dumps(content))  # keys become strings before they are sorted
        return json.dumps({**content, "hash": _hash(content)}, indent=1, sort_keys=True).encode()


def parse_manifest(data: bytes) -> Manifest:
    """Read a manifest. Raises CheckpointDamaged unless it is whole and of a format that this version knows."""
    try:
        content = cast("dict[str, Any]", json.loads(data))
        said = content.pop("hash")
        if _hash(content) != said:
            raise CheckpointDamaged("its content does not have the hash that it says")
        if content["format"] != FORMAT:
            raise CheckpointDamaged(f"it has format {content['format']}, this version reads {FORMAT}")
        del content["format"]
        files = {path: StoredFile(file["size"], file["hash"]) for path, file in content.pop("files").items()}
        sections, members = tuple(content.pop("sections")), tuple(content.pop("members"))
        manifest = Manifest(Stamp(**content, sections=sections, members=members), files)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(f"it cannot be read: {error!r:.200}") from error
    if manifest.to_json() != data:
        raise CheckpointDamaged("it is not as it was written")
    return manifest


def _hash(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
