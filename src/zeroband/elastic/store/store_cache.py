"""A node's cache of the store, so that a read transfers only changes.

Holds each raw record together with its parsed form, since a record is verified once. Makes no decisions or requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeAlias, TypeVar

from zeroband.elastic.membership.orders import Orders
from zeroband.elastic.membership.records import (
    LinkRates,
    Peer,
    Ready,
    RestartPoint,
    RoundPlan,
    StoreTerm,
    Verdict,
    View,
)
from zeroband.elastic.store.patches import tag_of
from zeroband.elastic.store.seals import id_of

RECORDS = ("plan", "committed", "failed", "run", "orders", "restart_point", "generation")
"""Records that exist once per run, in the order of a view's answer."""

_T = TypeVar("_T")

Reader: TypeAlias = Callable[[Mapping[str, bytes]], Mapping[str, _T]]
"""Parses raw records and returns the valid ones."""


class MemberValues(Generic[_T]):
    """One hash of the store, with a record of each member."""

    def __init__(self) -> None:
        self.revision = 0
        """Revision up to which this is complete."""
        self.count = 0
        """Number of records in the store, including those not transferred."""
        self.read: Mapping[str, _T] = {}
        """Valid records by member."""
        self.is_verified = True
        """Every signature in here was verified."""
        self._raw: dict[str, bytes] = {}

    @property
    def rejected(self) -> frozenset[str]:
        """Members whose record was transferred and is invalid."""
        return frozenset(self._raw.keys() - self.read.keys())

    @property
    def unseen(self) -> int:
        """Number of records that are missing here, or that were deleted from the store without a new revision."""
        return abs(self.count - len(self._raw))

    def tag(self, member: str) -> bytes:
        """Identify the cached record of a member, as the scripts do."""
        return tag_of(self._raw.get(member, b""))

    def verify(self, read: Reader[_T]) -> bool:
        """Read all again, with every signature verified. Return whether any was unverified."""
        was_verified, self.is_verified = self.is_verified, True
        if not was_verified:
            self.read = read(self._raw)
        return not was_verified

    def update_own(self, member: str, answer: bytes | int | None, read: Reader[_T]) -> bool:
        """Take over one member's record: 1 stands for the cached one, 0 for none. Return whether it changed."""
        if isinstance(answer, int) and (answer == 1 or member not in self._raw):
            return False
        new = {member: answer} if isinstance(answer, bytes) else {}
        self._raw = {**{m: raw for m, raw in self._raw.items() if m != member}, **new}
        self.read = {**{m: record for m, record in self.read.items() if m != member}, **read(new)}
        return True

    def update(self, answer: Sequence[Any], revision: int, read: Reader[_T]) -> bool:
        """Take over a script's answer: the count, whether all records follow, and the records.

        `read`: returns the valid ones of the new records. Returns whether anything changed.
        """
        before = self.unseen
        self.count = number(answer[0])
        if isinstance(answer[2], int):  # records were not requested
            return before != self.unseen
        sent = pairs(answer[2])
        new = {member: raw for member, raw in sent.items() if self._raw.get(member) != raw}
        gone = self._raw.keys() - sent.keys() if answer[1] == 1 else ()
        if new or gone:
            kept = {m: record for m, record in self.read.items() if m not in new and m not in gone}
            self.read = {**kept, **read(new)}
            self._raw = {**{m: raw for m, raw in self._raw.items() if m not in gone}, **new}
        self.revision = 0 if self.unseen else revision  # 0: request all of them next time
        return bool(new or gone) or before != self.unseen


@dataclass
class StoreCache:
    """The store at one instant. An empty cache makes the next read transfer everything.

    A read updates a fork of the newest one, since other threads read at the same time.
    """

    era: int = 0
    """Number of the session and store that it was read in."""
    began_at_s: float = 0.0
    counter_id: bytes = b""
    """Identifies the store's revision counter; a counter that was lost starts again under another id."""
    revision: int = 0
    """Revision of the last read."""
    is_set_back: bool = False
    """The counter went back under the same id: the store returned with older data."""
    links_revision: int = 0
    """Revision of the newest change of links."""
    records: dict[str, bytes | None] = field(default_factory=dict[str, "bytes | None"])
    """Raw, by name."""
    alive: frozenset[str] = frozenset()
    alive_tag: str = ""
    round: int | None = None
    """Round of `ready`."""
    ready: MemberValues[Ready] = field(default_factory=MemberValues[Ready])
    plan_id: str = ""
    """Plan of `votes`."""
    votes: MemberValues[str] = field(default_factory=MemberValues[str])
    peers: MemberValues[Peer] = field(default_factory=MemberValues[Peer])
    links: MemberValues[LinkRates] = field(default_factory=MemberValues[LinkRates])

    # Parsed from the records that are valid.
    plan: RoundPlan | None = None
    is_plan_trusted: bool = False
    """The signature of `plan` was not verified."""
    committed: Verdict | None = None
    is_doubted: bool = False
    """There is a newer plan or verdict that is not accepted yet, for want of evidence."""
    failed: str | None = None
    is_known: bool = False
    orders: Orders = field(default_factory=Orders)
    restart_point: RestartPoint | None = None
    generation: StoreTerm | None = None
    view: View | None = None
    """View of the last read; None if something changed since."""

    @property
    def is_verified(self) -> bool:
        """Whether every signature of the round was verified."""
        return self.ready.is_verified and self.votes.is_verified and not self.is_plan_trusted

    def fork(self) -> StoreCache:
        """Return an independent copy. Shared values are safe: they are replaced, never changed."""
        fork = copy(self)
        fork.ready, fork.votes = copy(self.ready), copy(self.votes)
        fork.peers, fork.links = copy(self.peers), copy(self.links)
        return fork

    def in_another_session(self, era: int) -> StoreCache:
        """Return it for another session: raw records are kept and verified again, the rest is fetched."""
        empty = {"ready": MemberValues[Ready](), "votes": MemberValues[str](), "links": MemberValues[LinkRates]()}
        return replace(self.fork(), era=era, view=None, links_revision=0, **empty)

    def select_round(self, round: int) -> None:
        """Empty `ready` if it is of another round."""
        if self.round != round:
            self.round, self.ready, self.view = round, MemberValues[Ready](), None

    def update_revision(self, counter_id: bytes | None, revision: bytes | None, links: bytes | None = None) -> None:
        """Take over the store's counter. Another one, or one that went back, invalidates what was complete."""
        self.is_set_back = (counter_id or b"") == self.counter_id and number(revision) < self.revision
        if self.is_set_back or (counter_id or b"") != self.counter_id:
            self.counter_id = counter_id or b""
            for values in (self.ready, self.votes, self.peers, self.links):
                values.revision = 0
        self.revision, self.links_revision = number(revision), number(links)

    def update_alive(self, answer: Sequence[bytes] | int) -> bool:
        """Take over the living members. Return whether they changed."""
        if isinstance(answer, int):
            return False
        self.alive = frozenset(map(text_of, answer))
        self.alive_tag = hashlib.sha1(b" ".join(answer), usedforsecurity=False).hexdigest()
        return True

    def update_records(self, answer: Sequence[bytes | int | None]) -> bool:
        """Take over the records, of which unchanged ones are a number. Return whether any changed."""
        new = {name: raw for name, raw in zip(RECORDS, answer, strict=True) if not isinstance(raw, int)}
        id = id_of(new.get("plan", self.records.get("plan")) or b"")
        if id != self.plan_id:
            self.plan_id = id
            self.forget_votes()
            new = {"failed": None, **new}
        has_changed = any(self.records.get(name) != raw for name, raw in new.items())
        self.records = {**self.records, **new}
        return has_changed

    def forget_votes(self) -> None:
        self.votes = MemberValues[str]()

    @property
    def position(self) -> bytes:
        """Counter and revision, as the scripts take them."""
        return self.counter_id + b":" + str(self.revision).encode()

    def tag(self, name: str) -> bytes:
        """Identify the cached record of this name, as the scripts do."""
        return tag_of(self.records.get(name) or b"")


def number(raw: bytes | None) -> int:
    """Parse a counter of the store; 0 if it is damaged."""
    return int(raw) if raw is not None and raw.isdigit() else 0


def text_of(value: bytes | str) -> str:
    """Decode a name in the store, which may be damaged."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def pairs(flat: Sequence[bytes]) -> dict[str, bytes]:
    """Fields and values of an HGETALL reply."""
    return {text_of(k): v for k, v in zip(flat[::2], flat[1::2], strict=True)}
