"""The manifest of a checkpoint: which state it is, and the size and hash of every file. Written last; pure.

Its own hash is in it, so a changed bit anywhere in a checkpoint is found; in a run with a token its MAC as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import xxhash
from pydantic import TypeAdapter

from zeroband.config.section import FileBelow
from zeroband.errors import CheckpointDamaged

FORMAT = 1
"""Number of the layout; a reader refuses those it does not know."""


@dataclass(frozen=True)
class StoredFile:
    """Size in bytes and xxh3-128 of a file."""

    size: int
    hash: str
    sha256: str = ""
    """Hash of files of runs with a token; empty in others, and not written there."""


FILES = TypeAdapter(dict[FileBelow, StoredFile])
"""To and from plain JSON values, by path."""

_KEYS = {"record": "payload", "state_digest": "state"}
"""Names in the file for fields of a stamp that it calls otherwise; kept so that older checkpoints can be read."""


@dataclass(frozen=True)
class Stamp:
    """Which state a checkpoint holds. Equal on all nodes that save it."""

    run_id: str
    session: str
    """Session of the run that saved it: each founding makes another one."""
    round: int
    inner_step: int
    record: Mapping[str, Any]
    """The verdict's record, with the run's progress: data ledger, assignments, tokens."""
    state_digest: str
    """Digest of the outer state after the round."""
    sections: tuple[str, ...]
    """Sections of the outer state, the parameters first, in the order of the digest."""
    members: tuple[str, ...]
    """Node ids of those that were in the round, sorted."""
    layout: str
    """Digest of the parameters' names and shapes."""
    model: Mapping[str, Any]
    """The [model] section, and `vocab_size`."""
    tokenizer: str
    data: Mapping[str, Any]
    """The record of `data.corpus.Corpus`: what exporting and evaluating the model takes."""

    @property
    def attempt(self) -> str:
        """One value for this save, so that what an earlier one left behind is not taken for a part of it."""
        said = json.dumps([self.session, self.round, self.state_digest, self.members, self.record], sort_keys=True)
        return xxhash.xxh3_64_hexdigest(said.encode())


@dataclass(frozen=True)
class Manifest:
    """A whole checkpoint."""

    stamp: Stamp
    files: Mapping[FileBelow, StoredFile]
    """Files by path relative to the checkpoint's folder; the manifest itself is not among them."""

    missing: Mapping[str, str] = field(default_factory=dict[str, str])
    """Members whose own state is not here, and why."""
    mac: str = ""
    """MAC of the content, under a key of the run's token; empty: the run had none."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes whose own state is here."""
        return tuple(sorted({path.split("/")[1] for path in self.files if path.startswith("nodes/")}))

    def content(self) -> bytes:
        """Return everything but hash and MAC, which stand under it; one text for equal manifests."""
        return _compact(self._record())

    def _record(self) -> dict[str, Any]:
        rest = _MANIFEST.dump_python(self, exclude_defaults=True)
        stamp = {_KEYS.get(name, name): value for name, value in rest.pop("stamp").items()}
        rest.pop("mac", None)
        return json.loads(json.dumps({"format": FORMAT, **stamp, **rest}))  # keys become strings before they are sorted

    def to_json(self) -> bytes:
        content = self._record()
        content["hash"] = _hash(content)
        return json.dumps({**content, **({"mac": self.mac} if self.mac else {})}, indent=1, sort_keys=True).encode()


_MANIFEST = TypeAdapter(Manifest)


def parse_manifest(data: bytes) -> Manifest:
    """Read a manifest. Raises CheckpointDamaged unless it is whole and of a format that this version knows."""
    try:
        content = cast("dict[str, Any]", json.loads(data))
        said, mac = content.pop("hash"), content.pop("mac", "")
        if _hash(content) != said:
            raise CheckpointDamaged("its content does not have the hash that it says")
        if content["format"] != FORMAT:
            raise CheckpointDamaged(f"it has format {content['format']}, this version reads {FORMAT}")
        rest = {"files": content.pop("files"), "missing": content.pop("missing", {}), "mac": mac}
        stamp = content | {name: content.pop(key) for name, key in _KEYS.items()}
        manifest = _MANIFEST.validate_python({"stamp": stamp, **rest})
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(f"it cannot be read: {error!r:.200}") from error
    if manifest.to_json() != data:
        raise CheckpointDamaged("it is not as it was written")
    return manifest


def _hash(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(_compact(content))


def _compact(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
