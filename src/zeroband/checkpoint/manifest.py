"""The manifest of a checkpoint: its state, the hash of every file, and whose it is. Written last.

It contains its own hash, so that any changed bit of a checkpoint is found. In a run with a token, files also have a
SHA-256, and the manifest a MAC under a key derived from the token: write access to the folder does not suffice to forge
a checkpoint.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, cast

import xxhash
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import TypeAdapter

from zeroband.checkpoint.storage import Data, read_exactly
from zeroband.config.section import FileBelow
from zeroband.elastic.membership.keys import RunKey
from zeroband.errors import CheckpointDamaged

FORMAT = 1
"""Version of the layout; readers refuse unknown ones."""

PIECE_BYTES = 16 << 20
"""Bytes that are read, hashed and written at once."""

_INFO = b"zeroband checkpoints 1"
_KEY_BYTES = 32


@dataclass(frozen=True)
class StoredFile:
    """Size in bytes and xxh3-128 of a file."""

    size: int
    hash: str
    sha256: str = ""
    """Set in runs with a token; otherwise empty and not written."""


class FileHash:
    """The hashes of a file while it is read or written. `is_sealed`: including the cryptographic one."""

    def __init__(self, *, is_sealed: bool) -> None:
        self._fast = xxhash.xxh3_128()
        self._strong = hashlib.sha256() if is_sealed else None

    @staticmethod
    def like(file: StoredFile) -> FileHash:
        """Create the kind of hashes that a file was stored with."""
        return FileHash(is_sealed=bool(file.sha256))

    def update(self, piece: Data | bytearray) -> None:
        self._fast.update(piece)
        if self._strong is not None:
            self._strong.update(piece)

    def read(self, file: BinaryIO, target: memoryview, on_piece: Callable[[], object]) -> None:
        """Fill a buffer from a file and hash it, in pieces. Raises EOFError if the file is too short."""
        for start in range(0, len(target), PIECE_BYTES):
            piece = target[start : start + PIECE_BYTES]
            read_exactly(file, piece)
            self.update(piece)
            on_piece()

    def of(self, size: int) -> StoredFile:
        """Return the record of a file of this size."""
        return StoredFile(size, self._fast.hexdigest(), "" if self._strong is None else self._strong.hexdigest())

    def require(self, file: StoredFile) -> None:
        """Raise CheckpointDamaged if the hashed bytes are not this file's."""
        seen = self.of(file.size)
        if seen.hash != file.hash:
            raise CheckpointDamaged(f"it has hash {seen.hash}, the manifest says {file.hash}")
        if seen.sha256 != file.sha256:
            raise CheckpointDamaged(f"it has SHA-256 {seen.sha256}, the manifest says {file.sha256}")


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


# -- whose it is -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointKey:
    """The key that authenticates a run's checkpoints."""

    secret: bytes

    @staticmethod
    def of(token: str, run_id: str) -> CheckpointKey:
        """Derive the key of a run; slow on purpose, since tokens may be guessable."""
        derive = HKDF(hashes.SHA256(), length=_KEY_BYTES, salt=None, info=_INFO)
        return CheckpointKey(derive.derive(RunKey.of(token, run_id).secret))

    def mac(self, kind: str, content: bytes) -> str:
        """Compute a MAC. `kind`: of the record, so that one kind cannot replace another."""
        return hmac.digest(self.secret, kind.encode() + b"\0" + content, "sha256").hex()

    def is_mac(self, kind: str, content: bytes, said: str) -> bool:
        """Whether this is the MAC of this content."""
        return hmac.compare_digest(self.mac(kind, content).encode(), said.encode())

    def sign(self, manifest: Manifest) -> Manifest:
        """Return the manifest with its MAC."""
        return replace(manifest, mac=self.mac("manifest", manifest.content()))


class Trust:
    """A reader's rule for accepting checkpoints.

    `token`: of the reader's run; None: accept every checkpoint with valid hashes. `accepts_any`: do so despite a token.
    """

    def __init__(self, token: str | None = None, *, accepts_any: bool = False) -> None:
        self._token = token
        self._accepts_any = accepts_any
        self._keys: dict[str, CheckpointKey] = {}

    def objection(self, manifest: Manifest) -> str | None:
        """Return why a checkpoint is not authenticated by the token; None if it is, or without a token."""
        if self._token is None:
            return None
        if not manifest.mac:
            return "it carries no MAC: it was saved without run.token, or was changed since"
        run_id = manifest.stamp.run_id
        if run_id not in self._keys:
            self._keys[run_id] = CheckpointKey.of(self._token, run_id)
        if not self._keys[run_id].is_mac("manifest", manifest.content(), manifest.mac):
            return (
                f"its MAC is not that of this run.token: run {run_id!r} saved it with another token, or it was changed"
            )
        return None

    def require(self, manifest: Manifest) -> None:
        """Raise CheckpointDamaged for an unacceptable checkpoint."""
        objection = self.objection(manifest)
        if objection is not None and not self._accepts_any:
            raise CheckpointDamaged(
                f"{objection}; if you know where it comes from, let a run take it with --resume.trust, and `zeroband "
                "export`, `eval` and `sample` without ZERO_BAND_RUN__TOKEN"
            )

    def remark(self, manifest: Manifest) -> str | None:
        """Return a warning about an accepted checkpoint without authentication, if it is one."""
        if self._token is None:
            return "its MAC is not checked: there is no run.token here" if manifest.mac else None
        return self.objection(manifest)


ANYBODY = Trust()
"""Accepts every checkpoint with valid hashes."""
