"""The manifest of a checkpoint: its state, and the size and hash of every file. Written last; pure.

It contains its own hash, so that any changed bit of a checkpoint is found, and a MAC if the run has a token.
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
"""Version of the layout; readers refuse unknown ones."""


@dataclass(frozen=True)
class StoredFile:
    """Size in bytes and xxh3-128 of a file."""

    size: int
    hash: str
    sha256: str = ""
    """Set in runs with a token; otherwise empty and not written."""


FILES = TypeAdapter(dict[FileBelow, StoredFile])
"""Converts files by path to and from plain JSON values."""

_KEYS = {"record": "payload", "state_digest": "state"}
"""Keys of older checkpoints for renamed fields of a stamp."""


@dataclass(frozen=True)
class Stamp:
    """Description of a checkpoint's state, equal on all nodes that save it."""

    run_id: str
    session: str
    """Session of the saving run; each bootstrap creates another."""
    round: int
    inner_step: int
    record: Mapping[str, Any]
    """The verdict's record, with the run's progress: data ledger, assignments, tokens."""
    state_digest: str
    """Digest of the outer state after the round."""
    sections: tuple[str, ...]
    """Sections of the outer state in digest order, the parameters first."""
    members: tuple[str, ...]
    """Node ids of the round's members, sorted."""
    layout: str
    """Digest of the parameters' names and shapes."""
    model: Mapping[str, Any]
    """The [model] section, and `vocab_size`."""
    tokenizer: str
    data: Mapping[str, Any]
    """Record of `data.tokens.Corpus`, for export and evaluation."""

    @property
    def attempt(self) -> str:
        """Identifier of this save, which distinguishes its files from leftovers of earlier ones."""
        said = json.dumps([self.session, self.round, self.state_digest, self.members, self.record], sort_keys=True)
        return xxhash.xxh3_64_hexdigest(said.encode())


@dataclass(frozen=True)
class Manifest:
    """A complete checkpoint."""

    stamp: Stamp
    files: Mapping[FileBelow, StoredFile]
    """Files by relative path, without the manifest."""

    missing: Mapping[str, str] = field(default_factory=dict[str, str])
    """Members without their own state here, and why."""
    mac: str = ""
    """MAC of the content by a key derived from the run's token; empty without a token."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes with their own state here."""
        return tuple(sorted({path.split("/")[1] for path in self.files if path.startswith("nodes/")}))

    def content(self) -> bytes:
        """Return everything except hash and MAC, as canonical text."""
        return _compact(self._record())

    def _record(self) -> dict[str, Any]:
        rest = _MANIFEST.dump_python(self, exclude_defaults=True)
        stamp = {_KEYS.get(name, name): value for name, value in rest.pop("stamp").items()}
        rest.pop("mac", None)
        return json.loads(json.dumps({"format": FORMAT, **stamp, **rest}))  # turn keys into strings before sorting

    def to_json(self) -> bytes:
        content = self._record()
        content["hash"] = _hash(content)
        return json.dumps({**content, **({"mac": self.mac} if self.mac else {})}, indent=1, sort_keys=True).encode()


_MANIFEST = TypeAdapter(Manifest)


def parse_manifest(data: bytes) -> Manifest:
    """Parse a manifest. Raises CheckpointDamaged if it is damaged or of an unknown version."""
    try:
        content = cast("dict[str, Any]", json.loads(data))
        said, mac = content.pop("hash"), content.pop("mac", "")
        if _hash(content) != said:
            raise CheckpointDamaged("its content does not match its hash")
        if content["format"] != FORMAT:
            raise CheckpointDamaged(f"it has format {content['format']}, this version reads {FORMAT}")
        rest = {"files": content.pop("files"), "missing": content.pop("missing", {}), "mac": mac}
        stamp = content | {name: content.pop(key) for name, key in _KEYS.items()}
        manifest = _MANIFEST.validate_python({"stamp": stamp, **rest})
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(f"it cannot be read: {error!r:.200}") from error
    if manifest.to_json() != data:
        raise CheckpointDamaged("it was changed after it was written")
    return manifest


def _hash(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(_compact(content))


def _compact(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
