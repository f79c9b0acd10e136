"""The key that all nodes of a run share, made of its token. Pure."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

_KEY_BYTES = 32


@dataclass(frozen=True)
class RunKey:
    """What all nodes of a run share: made of the token once, with a slow hash, since tokens may be guessable."""

    secret: bytes

    @staticmethod
    def of(token: str | None, run_id: str) -> RunKey:
        """Without a token anybody may be a node of this run; what is sent is sealed all the same."""
        salt = hashlib.sha256(f"zeroband data plane {run_id}".encode()).digest()
        return RunKey(Scrypt(salt=salt, length=_KEY_BYTES, n=2**14, r=8, p=1).derive((token or "").encode()))

    @property
    def store_password(self) -> str:
        """Lets the nodes of the run, and nobody else, into the stores that they hold."""
        return hmac.new(self.secret, b"zeroband store", hashlib.sha256).hexdigest()
