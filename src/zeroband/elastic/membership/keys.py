"""A node's own key pair, and the names that carry its public half.

The run's token admits a node; this key tells it from the others. Every name by which a node speaks for itself ends in
its public key: a member is `NODE#START.KEY`, the node as a whole `NODE#KEY`. So nothing has to be looked up or
remembered to check a name: what is said in it counts if KEY verifies the signature. Ed25519 (RFC 8032).
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
"""Signatures that are not verified again, which takes 0.1 ms: what members say of one round is read by two threads."""


@dataclass(frozen=True)
class NodeKey:
    """The key pair of one node, for its life."""

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
        """The public key, as names carry it."""
        return base64.urlsafe_b64encode(self._private.public_key().public_bytes_raw()).decode().rstrip("=")

    def name(self, node_id: str) -> str:
        """The name of the node, which is the same after a restart."""
        return f"{node_id}#{self.public}"

    def new_member_id(self, node_id: str) -> str:
        """Make an id for one membership of the node: a node that comes back is another member."""
        return f"{node_id}#{os.urandom(_START_BYTES).hex()}.{self.public}"

    def sign(self, said: bytes) -> bytes:
        return self._private.sign(said)


@lru_cache(maxsize=_KNOWN)
def is_signed(name: str, said: bytes, signature: bytes) -> bool:
    """Whether the node that a name is of signed this. False for a name that carries no key."""
    key = public_key_in(name)
    if key is None:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, said)
    except (InvalidSignature, ValueError):
        return False
    return True


def is_of_key(name: str, other: str) -> bool:
    """Whether two names carry the same key; names without one are the same node where they are equal."""
    key = public_key_in(name)
    return name == other if key is None else key == public_key_in(other)


def node_name(member_id: str) -> str:
    """The name of the node behind a membership, as its `NodeKey.name` has it; the id itself where it has no key."""
    if public_key_in(member_id) is None:
        return member_id
    digits = member_id.rpartition("#")[2].rpartition(".")[2]
    return f"{node_id_of_member(member_id)}#{digits}"


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
