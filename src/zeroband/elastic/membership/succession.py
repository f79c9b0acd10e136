"""Failover between stores: when members may switch, and the state that the new store starts with. Pure rules.

A run with several stores uses one at a time; each switch begins a generation. As in Paxos, promises and intersecting
quorums keep a single history under any network partition:

1. A round is committed only by at least half of the electors: the staying members of the last committed round.
2. A generation begins only when more than half of the electors have promised it; after its promise an elector votes in
   no older generation.
3. It begins with what the promising electors know: the newest verdict, and a round that may have been committed in a
   store that they can no longer read. That is possible if all of them voted for it, or all of those that promised an
   earlier generation, which may have begun with it.

Any majority of the electors intersects any half of them, so some member reports every commit. A member that enters a
generation reads its first verdict before it reports that generation as its own.

A bootstrap has no electors. If a partitioned machine bootstraps the run again, there are two histories; once they see
each other, `SplitBrain` decides which one continues.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from zeroband.config.ranges import Id, Text
from zeroband.elastic.membership.ballots import digest_in, electors
from zeroband.elastic.membership.orders import Orders
from zeroband.elastic.membership.records import Peer, RoundPlan, StoreTerm, Verdict, VerdictRecord

MAX_STORES = 8
"""Members' stores to try after the configured ones when the active store is lost. Every member reports to each."""


@dataclass(frozen=True)
class MemberReport:
    """A member's report to a store that the run may switch to."""

    promises: tuple[StoreTerm, ...]
    """Its generation, then those that it promised since, oldest first; it votes only in the last."""
    generation: StoreTerm
    """Generation of the reported records."""
    committed: Verdict | None = None
    """Newest verdict that it has seen."""
    plan: RoundPlan | None = None
    """Newest plan that it has seen."""
    vote: Id | None = None
    """Its vote on that plan. None: it has not voted."""
    record: VerdictRecord | None = None
    """Its record for the verdict of that plan; None: it has not voted."""
    orders: Orders = field(default_factory=Orders)
    run: Mapping[Text, Text] = field(default_factory=dict[str, str])
    """Settings that all nodes must share."""

    @property
    def promised(self) -> StoreTerm:
        """Newest promised generation; the member votes in no older one."""
        return self.promises[-1] if self.promises else self.generation


@dataclass(frozen=True)
class Line:
    """A line of history: the rounds of one session, as known from its newest verdict."""

    session: str
    round: int
    tokens: int
    """Tokens in its committed rounds."""
    members: tuple[str, ...]

    @staticmethod
    def of(verdict: Verdict | None) -> Line | None:
        """Return the line of a verdict; None without a verdict or session."""
        if verdict is None or not verdict.session:
            return None
        tokens = int(verdict.record.get("progress", {}).get("tokens", 0))
        return Line(verdict.session, verdict.round, tokens, verdict.members)


@dataclass(frozen=True)
class SplitBrain:
    """Two histories of one run that saw each other. Written once, so that all members decide by the same record."""

    one: Line
    other: Line

    @property
    def winner(self) -> Line:
        """The line that continues: the one with more committed tokens, then more rounds, then the lower session."""
        return min(self.one, self.other, key=lambda line: (-line.tokens, -line.round, line.session))

    @property
    def loser(self) -> Line:
        return self.other if self.winner is self.one else self.one

    def involves(self, line: Line) -> bool:
        """Whether this is one of the two lines."""
        return line.session in (self.one.session, self.other.session)


def detect_split_brain(own: Line, others: Collection[Line]) -> SplitBrain | None:
    """Return the record that a member of this line writes on seeing others; None: no other line, or they write it."""
    first = min((line for line in others if line.session != own.session), key=lambda line: line.session, default=None)
    return SplitBrain(own, first) if first is not None and own.session < first.session else None


@dataclass(frozen=True)
class ForwardPointer:
    """Tells clients of an unused store where the run continues."""

    generation: StoreTerm
    """The run's current generation."""
    store: Id
    """Address of its store, without credentials."""
    line: Line | None = None
    """The line that continues there; None: it has no committed round yet."""


@dataclass(frozen=True)
class StoreProbe:
    """State of a store, as returned by one read."""

    store: str
    """Its id."""
    generation: StoreTerm | None
    """Last generation that began there; None: none, or the store lost it."""
    committed_round: int = -1
    """Round of its newest verdict; -1: none."""
    member_reports: Mapping[str, MemberReport] = field(default_factory=dict[str, MemberReport])
    """Recent reports of members."""
    forward_pointer: ForwardPointer | None = None
    """Recent notice of where the run continues."""
    line: Line | None = None
    """Line of its newest verdict."""
    split_brain: SplitBrain | None = None
    """Recorded split of the run."""


@dataclass(frozen=True)
class HandoverState:
    """State that a generation begins with."""

    committed: Verdict
    plan: RoundPlan | None
    orders: Orders
    run: Mapping[str, str]
    members: tuple[str, ...]
    """Members that count as alive when it begins."""


def active_store(candidates: Sequence[StoreProbe]) -> StoreProbe | None:
    """Return the store that the run uses, of those probed; None: none of them.

    If the run was started in two stores at once, this is the one that progressed further.
    """
    begun = [c for c in candidates if c.generation is not None and c.generation.store == c.store]

    def rank(candidate: StoreProbe) -> tuple[int, int, str]:
        return _generation_of(candidate).number, candidate.committed_round, candidate.store

    return max(begun, key=rank, default=None)


def goes_on_elsewhere(candidates: Sequence[StoreProbe], generation: StoreTerm, own: Line) -> bool:
    """Whether a later generation of a member's line than its own has begun, or is promised where a majority reports."""
    newest = active_store([c for c in candidates if c.line is not None and c.line.session == own.session])
    if newest is not None and _generation_of(newest).number > generation.number:
        return True
    promised = [c for c, term in _electable(candidates) if term is not None and term > generation]
    verdicts = [newest_verdict(candidate.member_reports) for candidate in promised]
    return any(verdict is not None and verdict.session == own.session for verdict in verdicts)


def is_unused_elsewhere(candidates: Sequence[StoreProbe], generation: StoreTerm | None) -> bool:
    """Whether no store shows another generation of the run, or members looking for a store."""
    noticed = [c.forward_pointer.generation for c in candidates if c.forward_pointer is not None]
    begun = active_store(candidates)
    newest = max([*noticed, *([] if begun is None else [_generation_of(begun)])], default=None)
    is_own = newest is None or newest == generation
    return is_own and not any(candidate.member_reports for candidate in candidates)


def are_distinct(candidates: Sequence[StoreProbe], least: int) -> bool:
    """Whether these are at least `least` distinct stores; a list may name one store twice.

    A node that sees only its own store cannot tell whether it is the run's first node or partitioned.
    """
    return len({candidate.store for candidate in candidates}) >= least


def store_addresses(peers: Mapping[str, Peer]) -> tuple[tuple[str, int], ...]:
    """Return host and port of the first few members' stores: a single one that a majority reaches suffices."""
    holders = [peers[member] for member in sorted(peers) if peers[member].store_port]
    return tuple(dict.fromkeys((peer.host, peer.store_port) for peer in holders))[:MAX_STORES]


def may_commit(members: Collection[str], verdict: Verdict) -> bool:
    """Whether these members may commit the next round: they include at least half of this verdict's electors."""
    return 2 * len({*electors(verdict)} & {*members}) >= len(electors(verdict))


def may_move(members: Collection[str], verdict: Verdict) -> bool:
    """Whether these members may begin a generation: they include more than half of this verdict's electors."""
    return 2 * len({*electors(verdict)} & {*members}) > len(electors(verdict))


def newest_verdict(member_reports: Mapping[str, MemberReport]) -> Verdict | None:
    """Return the newest reported verdict."""
    verdicts = [report.committed for report in member_reports.values() if report.committed is not None]
    return max(verdicts, key=lambda verdict: verdict.round, default=None)


def handover_state(member_reports: Mapping[str, MemberReport]) -> HandoverState | None:
    """Return the initial state of a generation promised by these members; None: too few, or they know too little."""
    committed = newest_verdict(member_reports)
    if committed is None or not may_move(member_reports, committed):
        return None
    newest = max(member_reports.values(), key=_recency)
    plan = newest.plan
    if plan is not None and plan.round == committed.round + 1:
        here = [report for member, report in member_reports.items() if member in plan.members]
        if vote := _may_be_committed(plan, newest.generation, here):
            record = next((r.record for r in here if r.vote == vote and r.record is not None), None)
            if record is None:
                return None
            committed = Verdict(plan, digest_in(vote), dict(record))
            if not may_move(member_reports, committed):
                return None
    staying = (*committed.plan.listed, *(() if plan is None else plan.members))
    return HandoverState(
        committed,
        plan,
        max((report.orders for report in member_reports.values()), key=lambda orders: orders.version),
        newest.run,
        tuple(dict.fromkeys([*member_reports, *staying])),
    )


def _may_be_committed(plan: RoundPlan, generation: StoreTerm, members: Sequence[MemberReport]) -> str:
    """Return the vote with which this plan may have been committed in an unreachable store; "": it was not.

    A later generation may have begun with that round if all reporting members that promised the generation voted alike.
    """
    for later in {promise for member in members for promise in member.promises if promise > generation}:
        bound = [member for member in members if later in member.promises]
        votes = {member.vote if member.plan == plan else None for member in bound}
        if len(votes) == 1 and (vote := votes.pop()) is not None:
            return vote
    return ""


def _recency(member_report: MemberReport) -> tuple[StoreTerm, int]:
    return member_report.generation, -1 if member_report.plan is None else member_report.plan.version


# -- what one member does ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Enter:
    """Switch to the store of a begun generation, or back to that of the own one."""

    candidate: StoreProbe
    generation: StoreTerm


@dataclass(frozen=True)
class Pledge:
    """Promise to vote in no generation before this one."""

    generation: StoreTerm


@dataclass(frozen=True)
class Begin:
    """Begin the promised generation."""

    candidate: StoreProbe
    generation: StoreTerm
    state: HandoverState


@dataclass(frozen=True)
class Rejoin:
    """Rejoin as a new member: the run continues in a generation in which this member may not vote."""

    candidate: StoreProbe
    generation: StoreTerm


@dataclass(frozen=True)
class KeepWaiting:
    """Wait."""

    reason: str


Step = Enter | Pledge | Begin | Rejoin | KeepWaiting


def next_step(
    candidates: Sequence[StoreProbe],
    own: MemberReport,
    *,
    has_store: bool,
    has_waited: bool,
) -> Step:
    """Return the next action of a member that lost its store, or whose store has too few electors.

    `candidates`: reachable stores in the run's order of preference; each has the member's report. `own`: that report.
    `has_store`: its store is reachable and has its data, but too few members are there. `has_waited`: all members that
    lost the store had time to report. Before that, a fresh promise is given to the first store only: members that
    promise different stores may not vote in each other's.

    A store that answers again is not entered again once a member has promised another one where a majority reports:
    that member cannot come back, so all move.
    """
    newest = active_store([c for c in candidates if own.committed is None or c.committed_round >= own.committed.round])
    is_open = newest is not None and _generation_of(newest) >= own.promised
    electable = _electable(candidates)
    all_move = any(generation > own.generation for _, generation in electable if generation is not None)
    if newest is not None and is_open and (_generation_of(newest) > own.generation or not (has_store or all_move)):
        return Enter(newest, _generation_of(newest))
    has_gone_on = newest is not None and own.committed is not None and newest.committed_round > own.committed.round
    if newest is not None and has_gone_on and own.promised > own.generation:
        # Its later promise forbids voting there. If no round was committed without it, its vote may be needed for a
        # quorum: then all must move to a later generation instead.
        return Rejoin(newest, _generation_of(newest))
    pending = [_pledged_term(candidate) for candidate in candidates]
    if has_store and not any(generation > own.generation for generation in pending if generation is not None):
        return KeepWaiting("too few members of the last round are here, and none has promised another store")
    if not electable:
        return KeepWaiting(_waiting_reason(candidates))
    candidate, promised = max(electable, key=lambda one: _order(one[1]))
    if promised is None and candidate is not candidates[0] and not has_waited:
        return KeepWaiting("waiting for other members to report to the first store that they lost theirs")
    newest_promise = max(report.promised for report in candidate.member_reports.values())
    if promised is not None and own.promised == promised == newest_promise:
        bound = {member: report for member, report in candidate.member_reports.items() if report.promised == promised}
        state = handover_state(bound)
        if state is None:
            return KeepWaiting("waiting for more electors to promise the generation")
        return Begin(candidate, promised, state)
    return Pledge(_next_generation(candidate, promised, own))


def _electable(candidates: Sequence[StoreProbe]) -> list[tuple[StoreProbe, StoreTerm | None]]:
    """The stores where enough members report to begin a generation, each with the newest promised there."""
    return [
        (candidate, _pledged_term(candidate))
        for candidate in candidates
        if (verdict := newest_verdict(candidate.member_reports)) is not None
        and may_move(candidate.member_reports, verdict)
    ]


def _generation_of(candidate: StoreProbe) -> StoreTerm:
    assert candidate.generation is not None
    return candidate.generation


def _pledged_term(candidate: StoreProbe) -> StoreTerm | None:
    """Newest promised generation at a store that has not begun."""
    promised = [a.promised for a in candidate.member_reports.values() if a.promised.store == candidate.store]
    return max((one for one in promised if candidate.generation is None or one > candidate.generation), default=None)


def _order(generation: StoreTerm | None) -> tuple[int, str]:
    return (-1, "") if generation is None else (generation.number, generation.store)


def _next_generation(candidate: StoreProbe, pending: StoreTerm | None, own: MemberReport) -> StoreTerm:
    """Generation to promise at a store: the one others promised there if newer than the own promise, else a new one."""
    if pending is not None and pending > own.promised:
        return pending
    known = [report.promised.number for report in candidate.member_reports.values()]
    last = 0 if candidate.generation is None else candidate.generation.number
    return StoreTerm(max([*known, last, own.promised.number]) + 1, candidate.store)


def _waiting_reason(candidates: Sequence[StoreProbe]) -> str:
    if not candidates:
        return "no store of the run answers"
    reports = max((candidate.member_reports for candidate in candidates), key=len)
    verdict = newest_verdict(reports)
    if verdict is None:
        return "no round of the run is committed yet: only the store that it was begun in can continue it"
    here, total = len({*electors(verdict)} & {*reports}), len(electors(verdict))
    return f"{here} of {total} members of round {verdict.round} report a lost store here; more than half are needed"
