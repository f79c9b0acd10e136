"""Which of several stores a run uses: when its members may switch, and the state the new store starts with. Pure rules.

A run with several stores uses one of them at a time. Each switch begins a generation. Three rules keep a single history
under any network partition:

1. A round is committed only by at least half of the electors: the members of the last committed round that stay.
2. A generation begins only when more than half of the electors have promised it; after its promise an elector votes in
   no older generation.
3. It begins with what the promising electors know: the newest verdict, and a round that may have been committed in a
   store they can no longer read, because all of them voted for it, or all of those among them that promised an earlier
   generation, which may have begun with it.

More than half of the electors share a member with any half of them, and that member reports what was committed. A
member that enters a generation reads its first verdict before it reports that it is in it.

A founding has no electors. If a machine that was cut off founds the run again, there are two histories; when one sees
the other, `Meeting` decides which continues.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from zeroband.config.ranges import Id, Text
from zeroband.elastic.membership.ballots import digest_in, electors
from zeroband.elastic.membership.orders import Orders
from zeroband.elastic.membership.records import Peer, RoundPlan, StoreTerm, Verdict, VerdictRecord

MOST_STORES = 8
"""Number of members' stores that are asked, after the configured ones, when the store in use is lost: each member
reports to each of them."""


@dataclass(frozen=True)
class MemberReport:
    """What a member tells a store that the run may go to."""

    promises: tuple[StoreTerm, ...]
    """The generation that it is in, then those that it has promised since, oldest first; it votes only in the last."""
    generation: StoreTerm
    """The one that what it tells is from."""
    committed: Verdict | None = None
    """The newest verdict that it has seen."""
    plan: RoundPlan | None = None
    """The newest plan that it has seen."""
    vote: Id | None = None
    """What it voted after that plan. None: it has not."""
    record: VerdictRecord | None = None
    """What it would write into the verdict of that plan; None: it has not voted."""
    orders: Orders = field(default_factory=Orders)
    run: Mapping[Text, Text] = field(default_factory=dict[str, str])
    """What all nodes must share."""

    @property
    def promised(self) -> StoreTerm:
        """The newest generation that it has promised; it votes in no older one."""
        return self.promises[-1] if self.promises else self.generation


@dataclass(frozen=True)
class Line:
    """A line of history: the rounds of one session of the run, as the newest verdict of it tells that somebody saw."""

    session: str
    round: int
    tokens: int
    """Tokens in its committed rounds."""
    members: tuple[str, ...]

    @staticmethod
    def of(verdict: Verdict | None) -> Line | None:
        """Return the line of a verdict; None where there is none, or it names no session."""
        if verdict is None or not verdict.session:
            return None
        tokens = int(verdict.record.get("progress", {}).get("tokens", 0))
        return Line(verdict.session, verdict.round, tokens, verdict.members)


@dataclass(frozen=True)
class Meeting:
    """Two lines of history of one run have seen each other. Written once, so that all members decide by one record."""

    one: Line
    other: Line

    @property
    def goes_on(self) -> Line:
        """The line with more tokens in its committed rounds, then with more rounds, then whose session sorts first."""
        return min(self.one, self.other, key=lambda line: (-line.tokens, -line.round, line.session))

    @property
    def ends(self) -> Line:
        return self.other if self.goes_on is self.one else self.one

    def concerns(self, line: Line) -> bool:
        """Whether this line is one of the two."""
        return line.session in (self.one.session, self.other.session)


def meeting_of(own: Line, others: Collection[Line]) -> Meeting | None:
    """What a member of a line writes down that sees others; None: there is no other, or it is for those to write."""
    first = min((line for line in others if line.session != own.session), key=lambda line: line.session, default=None)
    return Meeting(own, first) if first is not None and own.session < first.session else None


@dataclass(frozen=True)
class ForwardPointer:
    """What a store is told that the run does not use."""

    generation: StoreTerm
    """The one that the run is in."""
    store: Id
    """Address of its store, without a login."""
    line: Line | None = None
    """The line of history that goes on there; None: no round of it is committed yet."""


@dataclass(frozen=True)
class StoreProbe:
    """A store as one look at it showed it."""

    store: str
    """Its id."""
    generation: StoreTerm | None
    """The one that began there last; None: none did, or the store has lost it."""
    committed_round: int = -1
    """That of its newest verdict; -1: it has none."""
    member_reports: Mapping[str, MemberReport] = field(default_factory=dict[str, MemberReport])
    """What members told it within the last moments, by member."""
    forward_pointer: ForwardPointer | None = None
    """What members told it within the last moments of where the run goes on."""
    line: Line | None = None
    """The line of history of its newest verdict."""
    split_brain: Meeting | None = None
    """What was written down there of two lines that met."""


@dataclass(frozen=True)
class HandoverState:
    """What a generation begins with."""

    committed: Verdict
    plan: RoundPlan | None
    orders: Orders
    run: Mapping[str, str]
    members: tuple[str, ...]
    """Those who count as alive when it begins."""


def in_use(candidates: Sequence[StoreProbe]) -> StoreProbe | None:
    """The store that the run uses, of those that were looked at; None: it is in use nowhere there.

    Of two in which somebody began a run at the same time it is the one that has gone on.
    """
    begun = [c for c in candidates if c.generation is not None and c.generation.store == c.store]

    def rank(candidate: StoreProbe) -> tuple[int, int, str]:
        return _generation_of(candidate).number, candidate.committed_round, candidate.store

    return max(begun, key=rank, default=None)


def is_nowhere_else(candidates: Sequence[StoreProbe], generation: StoreTerm | None) -> bool:
    """Whether nothing at the stores of a run tells of a life of it in another generation, or without a store."""
    told = [c.forward_pointer.generation for c in candidates if c.forward_pointer is not None]
    begun = in_use(candidates)
    newest = max([*told, *([] if begun is None else [_generation_of(begun)])], default=None)
    is_own = newest is None or newest == generation
    return is_own and not any(candidate.member_reports for candidate in candidates)


def are_different(candidates: Sequence[StoreProbe], least: int) -> bool:
    """Whether these are at least `least` different stores: a list may name one store twice.

    A node that sees no store but its own cannot tell whether it is the first of the run, or cut off from all others.
    """
    return len({candidate.store for candidate in candidates}) >= least


def places_of_stores(peers: Mapping[str, Peer]) -> tuple[tuple[str, int], ...]:
    """Host and port of the stores that members hold, of the first few: one that more than half reach is enough."""
    holders = [peers[member] for member in sorted(peers) if peers[member].store_port]
    return tuple(dict.fromkeys((peer.host, peer.store_port) for peer in holders))[:MOST_STORES]


def may_commit(members: Collection[str], verdict: Verdict) -> bool:
    """Whether these members may commit the round after this verdict: at least half of its electors are among them."""
    return 2 * len({*electors(verdict)} & {*members}) >= len(electors(verdict))


def may_move(members: Collection[str], verdict: Verdict) -> bool:
    """Whether these members may begin a generation after this verdict: more than half of its electors are there."""
    return 2 * len({*electors(verdict)} & {*members}) > len(electors(verdict))


def newest_verdict(member_reports: Mapping[str, MemberReport]) -> Verdict | None:
    """The newest verdict that anybody tells of."""
    told = [member_report.committed for member_report in member_reports.values() if member_report.committed is not None]
    return max(told, key=lambda verdict: verdict.round, default=None)


def legacy_of(member_reports: Mapping[str, MemberReport]) -> HandoverState | None:
    """What a generation begins with that these members have promised; None: they are too few, or know too little."""
    committed = newest_verdict(member_reports)
    if committed is None or not may_move(member_reports, committed):
        return None
    newest = max(member_reports.values(), key=_age)
    plan = newest.plan
    if plan is not None and plan.round == committed.round + 1:
        here = [member_report for member, member_report in member_reports.items() if member in plan.members]
        if vote := _may_be_committed(plan, newest.generation, here):
            told = (member_report.record for member_report in here if member_report.vote == vote)
            record = next((record for record in told if record is not None), None)
            if record is None:
                return None
            committed = Verdict(plan, digest_in(vote), dict(record))
            if not may_move(member_reports, committed):
                return None
    staying = (*committed.members, *committed.plan.late, *(() if plan is None else plan.members))
    return HandoverState(
        committed,
        plan,
        max((member_report.orders for member_report in member_reports.values()), key=lambda orders: orders.version),
        newest.run,
        tuple(dict.fromkeys([*member_reports, *staying])),
    )


def _may_be_committed(plan: RoundPlan, generation: StoreTerm, members: Sequence[MemberReport]) -> str:
    """The vote for the round of a plan of this generation, if it may be committed out of sight; else "".

    A later generation may have begun with it if all who promised that one, of these members, have voted for it.
    """
    for later in {promise for member in members for promise in member.promises if promise > generation}:
        bound = [member for member in members if later in member.promises]
        votes = {member.vote if member.plan == plan else None for member in bound}
        if len(votes) == 1 and (vote := votes.pop()) is not None:
            return vote
    return ""


def _age(member_report: MemberReport) -> tuple[StoreTerm, int]:
    return member_report.generation, -1 if member_report.plan is None else member_report.plan.version


# -- what one member does ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Enter:
    """Go to the store of a generation that has begun, or back to that of one's own."""

    candidate: StoreProbe
    generation: StoreTerm


@dataclass(frozen=True)
class Pledge:
    """Vote in no generation before this one."""

    generation: StoreTerm


@dataclass(frozen=True)
class Begin:
    """Have the promised generation begin."""

    candidate: StoreProbe
    generation: StoreTerm
    legacy: HandoverState


@dataclass(frozen=True)
class Rejoin:
    """Become another member: the run goes on in a generation in which this one may not vote."""

    candidate: StoreProbe
    generation: StoreTerm


@dataclass(frozen=True)
class KeepWaiting:
    """Wait: nothing can be done now."""

    reason: str


Step = Enter | Pledge | Begin | Rejoin | KeepWaiting


def next_step(
    candidates: Sequence[StoreProbe],
    own: MemberReport,
    *,
    has_store: bool,
    has_waited: bool,
) -> Step:
    """What a member does whose store is gone, or too few go on there.

    `candidates`: the stores that it reaches, in the order in which the run is to use them; it has told each of them its
    report. `own`: that report. `has_store`: its store is there, with its record, but too few members are.
    `has_waited`: so long that all who lost the store could tell the others; before, only the first store is promised
    where nothing is, since members that promise different ones may not vote in one another's.
    """
    newest = in_use([c for c in candidates if own.committed is None or c.committed_round >= own.committed.round])
    is_open = newest is not None and _generation_of(newest) >= own.promised
    if newest is not None and is_open and (_generation_of(newest) > own.generation or not has_store):
        return Enter(newest, _generation_of(newest))
    has_gone_on = newest is not None and own.committed is not None and newest.committed_round > own.committed.round
    if newest is not None and has_gone_on and own.promised > own.generation:
        # it may not vote there; where no round was committed without it, it may be missed, and all go to a later one
        return Rejoin(newest, _generation_of(newest))
    pending = [_pending(candidate) for candidate in candidates]
    if has_store and not any(generation > own.generation for generation in pending if generation is not None):
        return KeepWaiting("too few members of the last round are here, and no other store is being gone to")
    electable = [
        (candidate, generation)
        for candidate, generation in zip(candidates, pending, strict=True)
        if (verdict := newest_verdict(candidate.member_reports)) is not None
        and may_move(candidate.member_reports, verdict)
    ]
    if not electable:
        return KeepWaiting(_too_few(candidates))
    candidate, promised = max(electable, key=lambda one: _rank(one[1]))
    if promised is None and candidate is not candidates[0] and not has_waited:
        return KeepWaiting("others have to tell the first store of the run that they lost theirs")
    newest_promise = max(member_report.promised for member_report in candidate.member_reports.values())
    if promised is not None and own.promised == promised == newest_promise:
        bound = {
            member: member_report
            for member, member_report in candidate.member_reports.items()
            if member_report.promised == promised
        }
        legacy = legacy_of(bound)
        return KeepWaiting("others have to promise it yet") if legacy is None else Begin(candidate, promised, legacy)
    return Pledge(_next_generation(candidate, promised, own))


def _generation_of(candidate: StoreProbe) -> StoreTerm:
    assert candidate.generation is not None
    return candidate.generation


def _pending(candidate: StoreProbe) -> StoreTerm | None:
    """The newest generation that somebody has promised to begin at a store."""
    promised = [a.promised for a in candidate.member_reports.values() if a.promised.store == candidate.store]
    return max((one for one in promised if candidate.generation is None or one > candidate.generation), default=None)


def _rank(generation: StoreTerm | None) -> tuple[int, str]:
    return (-1, "") if generation is None else (generation.number, generation.store)


def _next_generation(candidate: StoreProbe, pending: StoreTerm | None, own: MemberReport) -> StoreTerm:
    """The one to promise at a store: what others have promised there, where that is newer than one's own promise."""
    if pending is not None and pending > own.promised:
        return pending
    known = [member_report.promised.number for member_report in candidate.member_reports.values()]
    last = 0 if candidate.generation is None else candidate.generation.number
    return StoreTerm(max([*known, last, own.promised.number]) + 1, candidate.store)


def _too_few(candidates: Sequence[StoreProbe]) -> str:
    if not candidates:
        return "no store of the run answers"
    told = max((candidate.member_reports for candidate in candidates), key=len)
    verdict = newest_verdict(told)
    if verdict is None:
        return "no round of the run is committed yet: only the store that it was begun in can go on with it"
    here, all_of_them = len({*electors(verdict)} & {*told}), len(electors(verdict))
    return (
        f"{here} of {all_of_them} members of round {verdict.round} are without their store here; more than half of "
        "them may go on with another one"
    )
