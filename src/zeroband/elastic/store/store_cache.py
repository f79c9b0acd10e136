"""A node's cache of the store, so that a look transfers only changes.

Holds each raw record together with its parsed form, since a record is verified once. Makes no decisions or requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
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
"""Records that exist once per run, in the order of a look's answer."""

_T = TypeVar("_T")

Reader: TypeAlias = Callable[[Mapping[str, bytes]], Mapping[str, _T]]
"""Parses raw records and returns the valid ones."""


class MemberValues(Generic[_T]):
    """One hash of the store, with a record of each member."""

    def __init__(self) -> None:
        self.change = 0
        """Number of the newest change that is in here."""
        self.count = 0
        """Number of records in the store, including those not transferred."""
        self.read: Mapping[str, _T] = {}
        """Valid records by member."""
        self.is_proven = True
        """Every signature in here was verified."""
        self._raw: dict[str, bytes] = {}

    @property
    def rejected(self) -> frozenset[str]:
        """Members whose record was transferred and is invalid."""
        return frozenset(self._raw.keys() - self.read.keys())

    def fork(self) -> MemberValues[_T]:
        """Return an independent copy."""
        return _twin(self)

    @property
    def unseen(self) -> int:
        """How many were not told; also where somebody took out some that were."""
        return abs(self.count - len(self._raw))

    def tag(self, member: str) -> bytes:
        """What tells the known word of a member from another one; as the script computes it."""
        return tag_of(self._raw.get(member, b""))

    def prove(self, read: Reader[_T]) -> bool:
        """Keep what counts though nothing is taken for signed. Whether there was anything to verify."""
        was_proven, self.is_proven = self.is_proven, True
        if not was_proven:
            self.read = read(self._raw)
        return not was_proven

    def learn_own(self, member: str, said: bytes | int | None, read: Reader[_T]) -> bool:
        """Take over what there is of one member: its word, 1 for the known one, 0 for none. Whether that is new."""
        if isinstance(said, int) and (said == 1 or member not in self._raw):
            return False
        new = {member: said} if isinstance(said, bytes) else {}
        self._raw = {**{m: raw for m, raw in self._raw.items() if m != member}, **new}
        self.read = {**{m: word for m, word in self.read.items() if m != member}, **read(new)}
        return True

    def learn(self, answer: Sequence[Any], change: int, read: Reader[_T]) -> bool:
        """Take over a script's answer: how many there are, whether these are all, and those that are new.

        `read`: gives those of the new ones that count. Returns whether anything is another than before.
        """
        before = self.unseen
        self.count = number(answer[0])
        if isinstance(answer[2], int):  # they were not asked for
            return before != self.unseen
        told = pairs(answer[2])
        new = {member: raw for member, raw in told.items() if self._raw.get(member) != raw}
        gone = self._raw.keys() - told.keys() if answer[1] == 1 else ()
        if new or gone:
            kept = {m: word for m, word in self.read.items() if m not in new and m not in gone}
            self.read = {**kept, **read(new)}
            self._raw = {**{m: raw for m, raw in self._raw.items() if m not in gone}, **new}
        self.change = 0 if self.unseen else change  # all of it the next time
        return bool(new or gone) or before != self.unseen


@dataclass
class StoreCache:
    """The store as it was at one instant. A new one knows nothing, and so is told everything.

    A look learns in a fork of the newest one, since others may look meanwhile.
    """

    era: int = 0
    """Number of the session that it was read in."""
    began_at_s: float = 0.0
    born: bytes = b""
    """Tells the count of changes from that of a store that lost its own."""
    change: int = 0
    """Number of the newest change at the last look."""
    is_set_back: bool = False
    """The store had counted further at the look before: it came back with an earlier file."""
    links_change: int = 0
    """Number of the newest change of links."""
    records: dict[str, bytes | None] = field(default_factory=dict[str, "bytes | None"])
    """Raw, by name."""
    alive: frozenset[str] = frozenset()
    alive_tag: str = ""
    round: int | None = None
    """The round that `ready` is of."""
    ready: MemberValues[Ready] = field(default_factory=MemberValues[Ready])
    plan_id: str = ""
    """Names the plan that `votes` are after."""
    votes: MemberValues[str] = field(default_factory=MemberValues[str])
    peers: MemberValues[Peer] = field(default_factory=MemberValues[Peer])
    links: MemberValues[LinkRates] = field(default_factory=MemberValues[LinkRates])

    plan: RoundPlan | None = None
    is_taken: bool = False
    """The signature of `plan` was not verified."""
    committed: Verdict | None = None
    is_doubted: bool = False
    """There is a newer verdict than `committed`, for which members were not seen to have voted."""
    failed: str | None = None
    is_known: bool = False
    orders: Orders = field(default_factory=Orders)
    restart_point: RestartPoint | None = None
    generation: StoreTerm | None = None
    """What was read of the records that count."""
    view: View | None = None
    """What the last look gave; None where something is another by now."""

    @property
    def is_proven(self) -> bool:
        """Whether every signature of a round in here was verified."""
        return self.ready.is_proven and self.votes.is_proven and not self.is_taken

    def fork(self) -> StoreCache:
        """Give another one of the same content, to learn by itself."""
        twin = _twin(self)
        twin.ready, twin.votes = self.ready.fork(), self.votes.fork()
        twin.peers, twin.links = self.peers.fork(), self.links.fork()
        return twin

    def in_another_session(self, era: int) -> StoreCache:
        """Give what is known, for another session: raw records are kept and verified anew, the rest is fetched."""
        words = {"ready": MemberValues[Ready](), "votes": MemberValues[str](), "links": MemberValues[LinkRates]()}
        return replace(self.fork(), era=era, view=None, links_change=0, **words)

    def ask_for_round(self, round: int) -> None:
        """Have `ready` be of this round."""
        if self.round != round:
            self.round, self.ready, self.view = round, MemberValues[Ready](), None

    def learn_times(self, born: bytes | None, change: bytes | None, links_change: bytes | None = None) -> None:
        """Take over which changes the store counts, and the newest one. May start anew."""
        self.is_set_back = (born or b"") == self.born and number(change) < self.change
        if self.is_set_back or (born or b"") != self.born:
            self.born = born or b""
            for words in (self.ready, self.votes, self.peers, self.links):
                words.change = 0
        self.change, self.links_change = number(change), number(links_change)

    def learn_alive(self, said: Sequence[bytes] | int) -> bool:
        """Take over who is alive; whether that is another than before."""
        if isinstance(said, int):
            return False
        self.alive = frozenset(map(text_of, said))
        self.alive_tag = hashlib.sha1(b" ".join(said), usedforsecurity=False).hexdigest()
        return True

    def learn_records(self, said: Sequence[bytes | int | None]) -> bool:
        """Take over the records, each of which is told where it is another one; whether any is."""
        new = {name: raw for name, raw in zip(RECORDS, said, strict=True) if not isinstance(raw, int)}
        id = id_of(new.get("plan", self.records.get("plan")) or b"")
        if id != self.plan_id:
            self.plan_id = id
            self.forget_votes()
            new = {"failed": None, **new}
        is_new = any(self.records.get(name) != raw for name, raw in new.items())
        self.records = {**self.records, **new}
        return is_new

    def forget_votes(self) -> None:
        self.votes = MemberValues[str]()

    @property
    def changes(self) -> bytes:
        """Which changes are in here; as the scripts take it."""
        return self.born + b":" + str(self.change).encode()

    def tag(self, name: str) -> bytes:
        """What tells the known record of this name from another one; as the script computes it."""
        return tag_of(self.records.get(name) or b"")


def _twin(of: _T) -> _T:
    """A shallow copy, for a small part of what `copy` takes: what it refers to is replaced, never changed."""
    twin = object.__new__(type(of))
    vars(twin).update(vars(of))
    return twin


def number(said: bytes | None) -> int:
    """A count of the store; 0 where somebody wrote something else there."""
    return int(said) if said is not None and said.isdigit() else 0


def text_of(value: bytes | str) -> str:
    """A name that somebody wrote into the store."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def pairs(flat: Sequence[bytes]) -> dict[str, bytes]:
    """The fields of a hash with their values."""
    return {text_of(k): v for k, v in zip(flat[::2], flat[1::2], strict=True)}
