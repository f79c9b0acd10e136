"""Seals: each record of a run in the store carries a MAC, so that other records do not count. Pure; any thread.

The store is neither trusted nor expected to remember. A record counts only if it is sealed with the run's key for the
use it is read for: its kind, its round, its member, the plan that it votes for. Other records are ignored. Without
`run.token` anyone can derive the key; the code is the same.

All nodes share that key. So a node's own statements also carry its signature, by the key in its name.
"""

from __future__ import annotations

import base64
import functools
import hmac
from dataclasses import dataclass

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from zeroband.elastic.membership.keys import RunKey
from zeroband.observe.view import public_key_in

_KEY_BYTES = 32
_MAC_DIGITS = 32
_PARTS = 6
_NONE = "-"
_SIGNED_AS = "zeroband record 1"


@dataclass(frozen=True)
class Label:
    """What of a record the store's scripts read: they cannot check a MAC, and read nothing else."""

    round: int = 0
    version: int = 0
    id: str = _NONE
    sessions: tuple[str, ...] = ()
    """The run's session that the record belongs to, and those before it, the newest first; none before a founding."""


@dataclass(frozen=True)
class Record:
    """A record with a MAC that verified."""

    label: Label
    text: str
    is_signed: bool = True
    """Whether it is what the node said that it was asked for. Only then `text` counts."""


class Seals:
    """Seals and verifies the records of one run.

    A sealed record is `MAC ROUND VERSION ID SESSIONS TEXT`; with a signature the text is `SIGNATURE TEXT`. `scope`
    names what a record is: a record of one scope is none of another.
    """

    def __init__(self, key: RunKey | None, run_id: str, prefix: str) -> None:
        self._keys = key or _open_key(run_id)
        derive = HKDF(hashes.SHA256(), _KEY_BYTES, salt=None, info=b"zeroband store records").derive
        self._key = derive(self._keys.secret)
        self._prefix = prefix
        self.token_check = self._mac("token")
        """Equal for two nodes with one token; does not tell it."""

    @property
    def has_own_key(self) -> bool:
        """Whether a node seals here, which can sign for itself."""
        return self._keys.node is not None

    def _mac(self, *parts: str) -> str:
        said = "\0".join((self._prefix, *parts)).encode()
        return hmac.digest(self._key, said, "sha256").hex()[:_MAC_DIGITS]

    def _signed(self, by: str, head: str, text: str, *scope: str) -> bytes:
        return "\0".join((_SIGNED_AS, self._prefix, by, *scope, head, text)).encode()

    def sign(self, text: str, *scope: str, by: str) -> str:
        """The signature of this node, which is `by`; empty where that name carries no key."""
        if public_key_in(by) is None:
            return ""
        return base64.b64encode(self._keys.sign(self._signed(by, "", text, *scope))).decode()

    def is_signed(self, text: str, signature: str, *scope: str, by: str) -> bool:
        """Whether the node that `by` names signed this."""
        try:
            decoded = base64.b64decode(signature, validate=True)
        except ValueError:
            return False
        return self._keys.accepts(by, self._signed(by, "", text, *scope), decoded)

    def seal(self, text: str, *scope: str, label: Label | None = None, by: str = "") -> str:
        """A record for the store; always the same for equal arguments, so that the store can compare records.

        `by`: the node that says it for itself, which must be this one; empty: the run as a whole does.
        """
        label = label or Label()
        sessions = ",".join(label.sessions) or _NONE
        head = f"{label.round} {label.version} {label.id} {sessions}"
        if by and public_key_in(by) is not None:
            signature = self._keys.sign(self._signed(by, head, text, *scope))
            text = f"{base64.b64encode(signature).decode()} {text}"
        rest = f"{head} {text}"
        return f"{self._mac(*scope, rest)} {rest}"

    def open(self, raw: bytes, *scope: str, by: str = "", is_taken: bool = False) -> Record | None:
        """What was sealed; None where it was not sealed so, by a node of this run.

        `is_taken`: the signature is not verified, but taken for the node's. Who has the key, which in a run without a
        token anybody has, may have sealed anything: a label that is none makes no record.
        """
        try:
            mac, _, rest = raw.decode().partition(" ")
            if not mac.isascii() or not hmac.compare_digest(mac, self._mac(*scope, rest)):
                return None
            *head, text = rest.split(" ", _PARTS - 2)
            round, version, id, sessions = head
            named = () if sessions == _NONE else tuple(sessions.split(","))
            record = Record(Label(int(round), int(version), id, named), text)
            return self._opened(record, by, " ".join(head), *scope, is_taken=is_taken) if by else record
        except ValueError:
            return None

    def _opened(self, record: Record, by: str, head: str, *scope: str, is_taken: bool) -> Record:
        """Take the signature off a record. Raises ValueError."""
        signature, text = b"", record.text
        if public_key_in(by) is not None:
            digits, _, text = record.text.partition(" ")
            signature = base64.b64decode(digits, validate=True)
        is_signed = is_taken or self._keys.accepts(by, self._signed(by, head, text, *scope), signature)
        return Record(record.label, text, is_signed)


@functools.lru_cache(maxsize=16)
def _open_key(run_id: str) -> RunKey:
    """The key of a run without a token: no secret, only slow to make."""
    return RunKey.of(None, run_id)


def id_of(raw: bytes) -> str:
    """The id that a record names, whether or not it verifies; empty where it names none."""
    parts = raw.split(b" ", _PARTS - 1)
    return parts[3].decode(errors="replace") if len(parts) == _PARTS else ""
