"""Who made a checkpoint: the hashes of its files, and the MAC by which a run's token vouches for its manifest.

The fast hash of every file finds damage. In a run with a token files have a SHA-256 as well, which no other
bytes can meet, and what lists them has an HMAC under a key derived from the token: who can write to the folder, but
does not know the token, cannot make a checkpoint. Knows no storage.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, replace

import xxhash
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from zeroband.checkpoint.manifest import Manifest, StoredFile
from zeroband.checkpoint.storage import Data
from zeroband.elastic.membership.keys import RunKey
from zeroband.errors import CheckpointDamaged

_INFO = b"zeroband checkpoints 1"
_KEY_BYTES = 32


class FileHash:
    """The hashes of one file while it passes. `is_sealed`: with the one that a MAC can rely on."""

    def __init__(self, *, is_sealed: bool) -> None:
        self._fast = xxhash.xxh3_128()
        self._strong = hashlib.sha256() if is_sealed else None

    @staticmethod
    def like(file: StoredFile) -> FileHash:
        """The hashes that were taken of a file."""
        return FileHash(is_sealed=bool(file.sha256))

    def update(self, piece: Data | bytearray) -> None:
        self._fast.update(piece)
        if self._strong is not None:
            self._strong.update(piece)

    def of(self, size: int) -> StoredFile:
        """What to note of a file of this size that has passed."""
        return StoredFile(size, self._fast.hexdigest(), "" if self._strong is None else self._strong.hexdigest())

    def require(self, file: StoredFile) -> None:
        """Raise CheckpointDamaged unless what passed is this file."""
        seen = self.of(file.size)
        if seen.hash != file.hash:
            raise CheckpointDamaged(f"it has hash {seen.hash}, the manifest says {file.hash}")
        if seen.sha256 != file.sha256:
            raise CheckpointDamaged(f"it has SHA-256 {seen.sha256}, the manifest says {file.sha256}")


@dataclass(frozen=True)
class CheckpointKey:
    """What the nodes of one run vouch with for their checkpoints."""

    secret: bytes

    @staticmethod
    def of(token: str, run_id: str) -> CheckpointKey:
        """The key of a run; slow, since tokens may be guessable."""
        derive = HKDF(hashes.SHA256(), length=_KEY_BYTES, salt=None, info=_INFO)
        return CheckpointKey(derive.derive(RunKey.of(token, run_id).secret))

    def mac(self, kind: str, content: bytes) -> str:
        """`kind`: of what it stands on, so that one record is never taken for another."""
        return hmac.digest(self.secret, kind.encode() + b"\0" + content, "sha256").hex()

    def is_mac(self, kind: str, content: bytes, said: str) -> bool:
        """Whether this MAC stands under this content."""
        return hmac.compare_digest(self.mac(kind, content).encode(), said.encode())

    def sign(self, manifest: Manifest) -> Manifest:
        """The manifest with its MAC."""
        return replace(manifest, mac=self.mac("manifest", manifest.content()))


class Trust:
    """Whose checkpoints a reader takes.

    `token`: of the reader's run; None: it has none, and every checkpoint whose hashes fit is taken. `accepts_any`: so
    is it here, although there is a token.
    """

    def __init__(self, token: str | None = None, *, accepts_any: bool = False) -> None:
        self._token = token
        self._accepts_any = accepts_any
        self._keys: dict[str, CheckpointKey] = {}

    def objection(self, manifest: Manifest) -> str | None:
        """Why the token does not vouch for a checkpoint; None: it does, or there is no token."""
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
        """Raise CheckpointDamaged where a checkpoint is not to be taken."""
        objection = self.objection(manifest)
        if objection is not None and not self._accepts_any:
            raise CheckpointDamaged(
                f"{objection}; if you know where it comes from, let a run take it with --resume.trust, and `zeroband "
                "export`, `eval` and `sample` without ZERO_BAND_RUN__TOKEN"
            )

    def remark(self, manifest: Manifest) -> str | None:
        """What to say of a checkpoint that is taken although nothing vouches for it; None: nothing."""
        if self._token is None:
            return "its MAC is not checked: there is no run.token here" if manifest.mac else None
        return self.objection(manifest)


ANYBODY = Trust()
"""Takes every checkpoint whose hashes fit."""
