"""Seals: what a run writes into its store carries a MAC, so that nobody else's words count. Pure; any thread.

The store is neither trusted nor expected to remember. A record counts only if it was sealed with the run's key, as
what it is read as: its kind, its round, its member, the opening that it votes for. Everything else is as if it were not
there. Without `run.token` everybody can make the key; the code is the same.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
from dataclasses import dataclass

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from zeroband.elastic.membership.run_key import RunKey

_KEY_BYTES = 32
_MAC_DIGITS = 32
_PARTS = 6
_NONE = "-"


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
    """A record that verified."""

    label: Label
    text: str


class Seals:
    """Seals and verifies the records of one run.

    A sealed record is `MAC ROUND VERSION ID SESSIONS TEXT`. `scope` names what a record is: a record of one scope is
    none of another.
    """

    def __init__(self, key: RunKey | None, run_id: str, prefix: str) -> None:
        secret = (key or _open_key(run_id)).secret
        self._key = HKDF(hashes.SHA256(), _KEY_BYTES, salt=None, info=b"zeroband store records").derive(secret)
        self._prefix = prefix
        self.token_check = self._mac("token")
        """Equal for two nodes with one token; does not tell it."""

    def _mac(self, *parts: str) -> str:
        said = "\0".join((self._prefix, *parts)).encode()
        return hmac.new(self._key, said, hashlib.sha256).hexdigest()[:_MAC_DIGITS]

    def seal(self, text: str, *scope: str, label: Label | None = None) -> str:
        """A record for the store; always the same for equal arguments, so that the store can compare records."""
        label = label or Label()
        sessions = ",".join(label.sessions) or _NONE
        rest = f"{label.round} {label.version} {label.id} {sessions} {text}"
        return f"{self._mac(*scope, rest)} {rest}"

    def open(self, raw: bytes, *scope: str) -> Record | None:
        """What was sealed; None where it was not sealed so, by a node of this run.

        Who has the key, which in a run without a token anybody has, may have sealed anything: a label that is none
        makes no record.
        """
        try:
            mac, _, rest = raw.decode().partition(" ")
            if not mac.isascii() or not hmac.compare_digest(mac, self._mac(*scope, rest)):
                return None
            round, version, id, sessions, text = rest.split(" ", _PARTS - 2)
            named = () if sessions == _NONE else tuple(sessions.split(","))
            return Record(Label(int(round), int(version), id, named), text)
        except ValueError:
            return None


@functools.lru_cache(maxsize=16)
def _open_key(run_id: str) -> RunKey:
    """The key of a run without a token: no secret, only slow to make."""
    return RunKey.of(None, run_id)


def id_of(raw: bytes) -> str:
    """The id that a record names, whether or not it verifies; empty where it names none."""
    parts = raw.split(b" ", _PARTS - 1)
    return parts[3].decode(errors="replace") if len(parts) == _PARTS else ""
