"""Authenticates checkpoints: hashes of their files, and the MAC of the manifest by the run's token.

A fast hash of every file detects damage. In a run with a token, files also have a SHA-256, and their lists an HMAC
under a key derived from the token: write access to the folder does not suffice to forge a checkpoint. Knows no storage.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import BinaryIO

import xxhash
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from zeroband.checkpoint.manifest import Manifest, StoredFile
from zeroband.checkpoint.storage import Data, read_exactly
from zeroband.elastic.membership.keys import RunKey
from zeroband.errors import CheckpointDamaged

_INFO = b"zeroband checkpoints 1"
_KEY_BYTES = 32
PIECE_BYTES = 16 << 20
"""Bytes that are read, hashed and written at once."""


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
