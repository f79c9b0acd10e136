"""Handshake of two nodes: both prove knowledge of the run's token and their identities, and agree on keys. Pure.

X25519 for forward secrecy, HKDF-SHA256 over the whole transcript with the token's key mixed in, HMAC-SHA256 as proof:
the pattern of Noise's NNpsk0. Each end also signs the transcript with the Ed25519 key in its name: the token admits,
the signature identifies. Messages have a fixed size, which limits what a stranger can make a node read.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from zeroband.elastic.membership.keys import SIGNATURE_BYTES, RunKey
from zeroband.errors import HandshakeFailed, PosesAsAnother

DATA_CALL = b"zbd2"
"""First bytes of a connection to a member."""

STORE_CALL = b"zbs1"
"""First bytes of a connection to a node's store, which runs before the node is a member."""

STORE = "store"
"""Name of a node's store in a handshake: it runs before the node has a member id."""

HELLO_BYTES = 512
"""The caller's first message: `DATA_CALL` or `STORE_CALL`, its public key, the introduction, and a proof of the token,
without which it gets no answer."""

_KEY_BYTES = 32
MAC_BYTES = 32
PROOF_BYTES = MAC_BYTES + SIGNATURE_BYTES
"""The caller's second message: its proof of the keys, and its signature."""
ANSWER_BYTES = _KEY_BYTES + PROOF_BYTES
"""The callee's message: its ephemeral public key, proof and signature."""
_BODY_BYTES = HELLO_BYTES - MAC_BYTES


class Purpose(enum.StrEnum):
    """Purpose of a connection."""

    DATA = "data"
    """A stream of the data plane."""
    STATE = "state"
    """Requests for the callee's state and journal."""
    RATE = "rate"
    """A burst that measures the link's rate."""
    PROBE = "probe"
    """A guardian's periodic probes."""
    RELAY = "relay"
    """A call to be relayed to the member in `session`; the end-to-end handshake follows on the same connection."""
    ANSWER = "answer"
    """A member picks up the relayed call whose number is in `session`."""
    STORE = "store"
    """Commands for the callee's store."""

    @property
    def call(self) -> bytes:
        """First bytes of a connection with this purpose."""
        return STORE_CALL if self is Purpose.STORE else DATA_CALL


@dataclass(frozen=True)
class Introduction:
    """The caller's introduction: who calls whom, and for what."""

    caller: str
    callee: str
    session: str
    """Session of the link: streams with equal sessions belong together, a new session replaces them. To a relay: the
    called member, or the number of the call that is picked up."""
    is_sealed: bool
    purpose: Purpose = Purpose.DATA

    def to_record(self) -> Mapping[str, Any]:
        names = {"caller": self.caller, "callee": self.callee, "session": self.session}
        return {**names, "sealed": self.is_sealed, "purpose": self.purpose}


@dataclass(frozen=True)
class StreamKeys:
    """Encryption keys of one connection, 32 bytes each; None if unencrypted."""

    seal: bytes | None
    open: bytes | None


NO_KEYS = StreamKeys(None, None)
"""Keys of an unencrypted connection."""


class Caller:
    """The calling end: send `hello`, read ANSWER_BYTES, send the proof that `take` returns."""

    def __init__(self, key: RunKey, introduction: Introduction) -> None:
        self._key = key
        self._private = X25519PrivateKey.generate()
        record = json.dumps(introduction.to_record(), separators=(",", ":")).encode()
        public = self._private.public_key().public_bytes_raw()
        body = introduction.purpose.call + public + len(record).to_bytes(2, "big") + record
        if len(body) > _BODY_BYTES:
            raise HandshakeFailed(f"the names of {introduction.caller} and {introduction.callee} are too long")
        body = body.ljust(_BODY_BYTES, b"\0")
        self.hello = body + hmac.digest(key.secret, body, "sha256")
        self._introduction = introduction

    def take(self, answer: bytes) -> tuple[bytes, StreamKeys]:
        """Return this end's proof and keys.

        Raises HandshakeFailed if the other end does not know the token, and PosesAsAnother if it is not the called
        member.
        """
        public, proof, signature = answer[:32], answer[32:64], answer[64:]
        transcript = self.hello + public
        secrets = _secrets(self._key, _agree(self._private, public), transcript)
        if not hmac.compare_digest(proof, _proof(secrets, b"callee", transcript)):
            raise HandshakeFailed("the other end does not know the run's token, or is not of this run")
        _require_identity(self._key, self._introduction.callee, b"callee", transcript, signature)
        keys = StreamKeys(secrets.from_caller, secrets.from_callee) if self._introduction.is_sealed else NO_KEYS
        return _proof(secrets, b"caller", transcript) + _signature(self._key, b"caller", transcript), keys


class Callee:
    """The called end: read HELLO_BYTES, send `answer`, read PROOF_BYTES, pass them to `take`."""

    def __init__(self, key: RunKey, hello: bytes) -> None:
        if len(hello) != HELLO_BYTES or not hello.startswith((DATA_CALL, STORE_CALL)):
            raise HandshakeFailed("not a call to the data plane")
        body, proof = hello[:_BODY_BYTES], hello[_BODY_BYTES:]
        self._key = key
        if not hmac.compare_digest(proof, hmac.digest(key.secret, body, "sha256")):
            raise HandshakeFailed("the caller does not know the run's token, or is not of this run")
        private = X25519PrivateKey.generate()
        public = private.public_key().public_bytes_raw()
        self._transcript = hello + public
        self.introduction = _introduction(hello)
        if not hello.startswith(self.introduction.purpose.call):
            raise HandshakeFailed("the call is for something else than it began with")
        self._secrets = _secrets(key, _agree(private, hello[4:36]), self._transcript)
        proof = _proof(self._secrets, b"callee", self._transcript)
        self.answer = public + proof + _signature(key, b"callee", self._transcript)

    def take(self, proof: bytes) -> StreamKeys:
        """Return this end's keys.

        Raises HandshakeFailed for a replayed call, and PosesAsAnother if the caller is not the member in its
        introduction.
        """
        if not hmac.compare_digest(proof[:MAC_BYTES], _proof(self._secrets, b"caller", self._transcript)):
            raise HandshakeFailed("a call was repeated by somebody who did not make it")
        _require_identity(self._key, self.introduction.caller, b"caller", self._transcript, proof[MAC_BYTES:])
        if not self.introduction.is_sealed:
            return NO_KEYS
        return StreamKeys(self._secrets.from_callee, self._secrets.from_caller)


def new_session() -> str:
    """Return a new random session name."""
    return os.urandom(8).hex()


@dataclass(frozen=True)
class _Secrets:
    proof: bytes
    from_caller: bytes
    from_callee: bytes


def _secrets(key: RunKey, agreed: bytes, transcript: bytes) -> _Secrets:
    salt = hashlib.sha256(transcript).digest()
    derive = HKDF(hashes.SHA256(), length=3 * _KEY_BYTES, salt=salt, info=b"zeroband data plane 2")
    derived = derive.derive(agreed + key.secret)
    return _Secrets(*(derived[i * _KEY_BYTES : (i + 1) * _KEY_BYTES] for i in range(3)))


def _agree(private: X25519PrivateKey, public: bytes) -> bytes:
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise HandshakeFailed("not a public key") from error


def _proof(secrets: _Secrets, who: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secrets.proof, who + transcript, "sha256")


def _signed(who: bytes, transcript: bytes) -> bytes:
    return b"zeroband handshake 2 " + who + hashlib.sha256(transcript).digest()


def _signature(key: RunKey, who: bytes, transcript: bytes) -> bytes:
    return key.sign(_signed(who, transcript))


def _require_identity(key: RunKey, name: str, who: bytes, transcript: bytes, signature: bytes) -> None:
    if len(signature) != SIGNATURE_BYTES:
        raise HandshakeFailed("a proof of another size")
    if not key.accepts(name, _signed(who, transcript), signature):
        raise PosesAsAnother(name)


def _introduction(hello: bytes) -> Introduction:
    size = int.from_bytes(hello[36:38], "big")
    try:
        record = json.loads(hello[38 : 38 + size])
        names = str(record["caller"]), str(record["callee"]), str(record["session"])
        return Introduction(*names, record["sealed"] is True, Purpose(record["purpose"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise HandshakeFailed("no introduction in the call") from error
