"""Keys of a run: each node's own key pair, and the secret that all nodes derive from the token.

The token admits a node; its own Ed25519 key (RFC 8032) identifies it. Names contain the public key: a member is
`NODE#START.KEY`, a node `NODE#KEY`. So a record is authentic if KEY verifies its signature, without any key directory.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from collections import deque
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from zeroband.observe.view import node_id_of_member, public_key_in

SECRET_BYTES = 32
SIGNATURE_BYTES = 64
_START_BYTES = 4
_KNOWN = 4096
"""Cached verifications, 0.1 ms each: two threads read the records of a round."""


@dataclass(frozen=True)
class NodeKey:
    """The permanent key pair of one node."""

    secret: bytes = field(repr=False)
    """SECRET_BYTES long."""

    @staticmethod
    def new() -> NodeKey:
        return NodeKey(os.urandom(SECRET_BYTES))

    @cached_property
    def _private(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.secret)

    @cached_property
    def public(self) -> str:
        """The public key, encoded as in names."""
        return base64.urlsafe_b64encode(self._private.public_key().public_bytes_raw()).decode().rstrip("=")

    def name(self, node_id: str) -> str:
        """Return the node's name, which survives restarts."""
        return f"{node_id}#{self.public}"

    def new_member_id(self, node_id: str) -> str:
        """Make an id for one membership: a returning node is a new member."""
        return f"{node_id}#{os.urandom(_START_BYTES).hex()}.{self.public}"

    def sign(self, message: bytes) -> bytes:
        return self._private.sign(message)


@lru_cache(maxsize=_KNOWN)
def is_signed(name: str, message: bytes, signature: bytes) -> bool:
    """Whether the node with this name signed the message. False for a name without a key."""
    key = public_key_in(name)
    if key is None:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def is_of_key(name: str, other: str) -> bool:
    """Whether two names have the same key; names without one are compared as a whole."""
    key = public_key_in(name)
    return name == other if key is None else key == public_key_in(other)


def node_name(member_id: str) -> str:
    """Return the node's name (`NodeKey.name`) of a member id; the id itself if it has no key."""
    if public_key_in(member_id) is None:
        return member_id
    digits = member_id.rpartition("#")[2].rpartition(".")[2]
    return f"{node_id_of_member(member_id)}#{digits}"


_KEY_BYTES = 32
_REMEMBERED = 8
"""Own signatures that need no verification when read back: those of a round or two."""


@dataclass(frozen=True)
class RunKey:
    """The secret shared by a run's nodes, derived from the token with a slow hash, since tokens may be guessable."""

    secret: bytes
    node: NodeKey | None = None
    """This node's own key; None for a tool, which only reads."""
    _signed: deque[tuple[bytes, bytes]] = field(
        default_factory=lambda: deque(maxlen=_REMEMBERED), init=False, repr=False, compare=False
    )
    """Messages that this node signed last, with their signatures."""

    @staticmethod
    def of(token: str | None, run_id: str, *, node: NodeKey | None = None) -> RunKey:
        """Derive the secret. Without a token anyone may join the run; connections are encrypted all the same."""
        salt = hashlib.sha256(f"zeroband data plane {run_id}".encode()).digest()
        return RunKey(Scrypt(salt=salt, length=_KEY_BYTES, n=2**14, r=8, p=1).derive((token or "").encode()), node)

    def sign(self, message: bytes) -> bytes:
        """Sign with this node's key; zeros without one."""
        if self.node is None:
            return bytes(SIGNATURE_BYTES)
        signature = self.node.sign(message)
        self._signed.append((message, signature))
        return signature

    def accepts(self, name: str, message: bytes, signature: bytes) -> bool:
        """Whether the node with this name signed the message.

        A name without a key proves nothing: nodes refuse it; a tool, which only reads, shows it.
        """
        if public_key_in(name) is None:
            return self.node is None and not any(signature)
        is_own = self.node is not None and is_of_key(name, self.node.public)
        return (is_own and (message, signature) in tuple(self._signed)) or is_signed(name, message, signature)

    @property
    def store_password(self) -> str:
        """Password of the nodes' own stores, which only nodes of the run can derive."""
        return hmac.new(self.secret, b"zeroband store", hashlib.sha256).hexdigest()
