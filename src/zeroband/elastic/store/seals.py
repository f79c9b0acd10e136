"""Seals: every record of a run in the store carries a MAC. Pure; any thread.

The store is neither trusted nor expected to be durable. A record is valid only if it is sealed with the run's key for
the use it is read for: its kind, its round, its member, the plan that it votes for. Without `run.token` anyone can
derive the key; the code is the same.

All nodes share that key, so a node's own records also carry its signature, by the key in its name.
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
_SIGNATURE_CONTEXT = "zeroband record 1"


@dataclass(frozen=True)
class Label:
    """A record's header. The scripts read nothing else, since they cannot verify the MAC."""

    round: int = 0
    version: int = 0
    id: str = _NONE
    sessions: tuple[str, ...] = ()
    """The session of the record and its predecessors, newest first; none before a founding."""


@dataclass(frozen=True)
class Record:
    """A record with a MAC that verified."""

    label: Label
    text: str
    is_signed: bool = True
    """Whether the node that it was opened for signed it. Otherwise `text` is forged."""


class Seals:
    """Seals and verifies the records of one run.

    A sealed record is `MAC ROUND VERSION ID SESSIONS TEXT`; with a signature the text is `SIGNATURE TEXT`. The MAC
    covers `scope`, the use of the record, so it does not verify for another use.
    """

    def __init__(self, key: RunKey | None, run_id: str, prefix: str) -> None:
        self._keys = key or _open_key(run_id)
        derive = HKDF(hashes.SHA256(), _KEY_BYTES, salt=None, info=b"zeroband store records").derive
        self._key = derive(self._keys.secret)
        self._prefix = prefix
        self.token_check = self._mac("token")
        """A hash of the token: equal for equal tokens."""

    @property
    def can_sign(self) -> bool:
        return self._keys.node is not None

    def _mac(self, *parts: str) -> str:
        return hmac.digest(self._key, "\0".join((self._prefix, *parts)).encode(), "sha256").hex()[:_MAC_DIGITS]

    def _signed(self, by: str, head: str, text: str, *scope: str) -> bytes:
        return "\0".join((_SIGNATURE_CONTEXT, self._prefix, by, *scope, head, text)).encode()

    def sign(self, text: str, *scope: str, by: str) -> str:
        """Sign as this node, which is `by`; empty if that name carries no key."""
        if public_key_in(by) is None:
            return ""
        return base64.b64encode(self._keys.sign(self._signed(by, "", text, *scope))).decode()

    def is_signed(self, text: str, signature: str, *scope: str, by: str) -> bool:
        """Whether the node `by` signed this."""
        try:
            decoded = base64.b64decode(signature, validate=True)
        except ValueError:
            return False
        return self._keys.accepts(by, self._signed(by, "", text, *scope), decoded)

    def seal(self, text: str, *scope: str, label: Label | None = None, by: str = "") -> str:
        """Seal a record. Equal arguments give equal bytes, so that the store can compare records.

        `by`: this node, which signs it; empty: it needs no signature.
        """
        label = label or Label()
        sessions = ",".join(label.sessions) or _NONE
        head = f"{label.round} {label.version} {label.id} {sessions}"
        if by and public_key_in(by) is not None:
            signature = self._keys.sign(self._signed(by, head, text, *scope))
            text = f"{base64.b64encode(signature).decode()} {text}"
        rest = f"{head} {text}"
        return f"{self._mac(*scope, rest)} {rest}"

    def open(self, raw: bytes, *scope: str, by: str = "", is_trusted: bool = False) -> Record | None:
        """Open a record; None if no node of this run sealed it for this scope.

        `is_trusted`: assume that the signature is valid. The header is parsed defensively: anyone with the run's key
        can seal anything, and without a token everybody has it.
        """
        try:
            mac, _, rest = raw.decode().partition(" ")
            if not mac.isascii() or not hmac.compare_digest(mac, self._mac(*scope, rest)):
                return None
            *head, text = rest.split(" ", _PARTS - 2)
            round, version, id, sessions = head
            named = () if sessions == _NONE else tuple(sessions.split(","))
            record = Record(Label(int(round), int(version), id, named), text)
            return self._opened(record, by, " ".join(head), *scope, is_trusted=is_trusted) if by else record
        except ValueError:
            return None

    def _opened(self, record: Record, by: str, head: str, *scope: str, is_trusted: bool) -> Record:
        """Split off and verify the signature. Raises ValueError."""
        signature, text = b"", record.text
        if public_key_in(by) is not None:
            digits, _, text = record.text.partition(" ")
            signature = base64.b64decode(digits, validate=True)
        is_signed = is_trusted or self._keys.accepts(by, self._signed(by, head, text, *scope), signature)
        return Record(record.label, text, is_signed)


@functools.lru_cache(maxsize=16)
def _open_key(run_id: str) -> RunKey:
    """The key of a run without a token: no secret, but slow to derive."""
    return RunKey.of(None, run_id)


def id_of(raw: bytes) -> str:
    """The id in a record's header, which is not verified; empty if there is none."""
    parts = raw.split(b" ", _PARTS - 1)
    return parts[3].decode(errors="replace") if len(parts) == _PARTS else ""
