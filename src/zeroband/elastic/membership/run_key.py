"""The keys with which a node takes part in a run: the one that all share, made of the token, and its own. Pure."""

from __future__ import annotations

import hashlib
import hmac
from collections import deque
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from zeroband.elastic.membership.node_key import SIGNATURE_BYTES, NodeKey, is_of_key, is_signed
from zeroband.observe.view import public_key_in

_KEY_BYTES = 32
_REMEMBERED = 8
"""Signatures of this node's own that are not verified when they come back: those of a round or two."""


@dataclass(frozen=True)
class RunKey:
    """What all nodes of a run share: made of the token once, with a slow hash, since tokens may be guessable."""

    secret: bytes
    node: NodeKey | None = None
    """This node's own key. None: no node but a tool, which reads what nodes say and says nothing in their names."""
    _signed: deque[tuple[bytes, bytes]] = field(
        default_factory=lambda: deque(maxlen=_REMEMBERED), init=False, repr=False, compare=False
    )
    """What this node signed last, with its signatures."""

    @staticmethod
    def of(token: str | None, run_id: str, *, node: NodeKey | None = None) -> RunKey:
        """Without a token anybody may be a node of this run; what is sent is sealed all the same."""
        salt = hashlib.sha256(f"zeroband data plane {run_id}".encode()).digest()
        return RunKey(Scrypt(salt=salt, length=_KEY_BYTES, n=2**14, r=8, p=1).derive((token or "").encode()), node)

    def sign(self, said: bytes) -> bytes:
        """Sign with this node's own key; zeros where there is none."""
        if self.node is None:
            return bytes(SIGNATURE_BYTES)
        signature = self.node.sign(said)
        self._signed.append((said, signature))
        return signature

    def accepts(self, name: str, said: bytes, signature: bytes) -> bool:
        """Whether the node that a name is of said this.

        A name without a key proves nothing: a node refuses it, and a tool, which only reads, shows it.
        """
        if public_key_in(name) is None:
            return self.node is None and not any(signature)
        is_own = self.node is not None and is_of_key(name, self.node.public)
        return (is_own and (said, signature) in tuple(self._signed)) or is_signed(name, said, signature)

    @property
    def store_password(self) -> str:
        """Password of the stores that the nodes hold: only nodes of the run can derive it."""
        return hmac.new(self.secret, b"zeroband store", hashlib.sha256).hexdigest()
