"""This node's membership: acquires and releases its lease, waits for other members, votes. Local rank 0 only."""

from __future__ import annotations

import contextlib
import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from zeroband.config.time_outs import TimeOuts
from zeroband.data.ledger import SHARED
from zeroband.elastic.guardian.link_report import BANNED_FILE, LinkReader, NamesFile
from zeroband.elastic.guardian.process import Guardian, GuardianOrder, ListenAddress
from zeroband.elastic.membership.ballots import vote_for
from zeroband.elastic.membership.blame import NO_VOTE, REFUSED, barring_blame, is_refusal
from zeroband.elastic.membership.departure import Departure
from zeroband.elastic.membership.orders import give_up_rollback, require_admitted
from zeroband.elastic.membership.plan_checks import (
    checkers,
    is_checked_by_all,
    plan_objection,
    refuse_excess,
)
from zeroband.elastic.membership.progress import choose_claim, ledgers_after
from zeroband.elastic.membership.proofs import misquote, omits_ready_member
from zeroband.elastic.membership.records import (
    BOOTSTRAP_ROUND,
    Blame,
    Claim,
    Evidence,
    LinkRates,
    Ready,
    RoundPlan,
    Verdict,
    View,
)
from zeroband.elastic.membership.round_rules import (
    ElapsedWaits,
    Rules,
    Wait,
    expected_members,
    knows_enough_to_open,
    may_open,
    must_leave,
    next_plan,
    next_verdict,
)
from zeroband.elastic.membership.topology import is_within_noise
from zeroband.elastic.rounds.fault_inquiry import FaultInquiry
from zeroband.elastic.rounds.waits import AloneTimer, PauseReporter, StragglerTimer, VoteTimer, outlast_duplicates
from zeroband.elastic.store.backup import LiveBackup
from zeroband.elastic.store.failover import StoreFailover
from zeroband.elastic.store.interface import Store
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.elastic.transport.handover import Inbox
from zeroband.errors import ConfigError, Fenced, Leaving, PeerLost, StoreLost, TransferStalled, ZerobandError
from zeroband.node.backoff import Backoff
from zeroband.node.shared_flags import SharedFlags
from zeroband.observe.events import noop
from zeroband.observe.log import get_logger

_POLL_MIN_S, _POLL_MAX_S = 0.002, 0.25
_LOOK_S = 1.0
"""Longest wait for a notification: an expiring lease sends none, and messages get lost."""
_STEP_IN_S, _STEP_IN_MEMBERS = 0.25, 64
"""Delay after which the next member proposes if the one before it has not; with more than _STEP_IN_MEMBERS members it
grows in proportion, since a proposal then takes longer to compute."""
_REMIND_S = 10.0
ENDED_BEFORE = "a member had ended this attempt before"
_REFUSED_S = 1.0
"""Time that a round waits for a member whose record was refused: another member may have written that record."""

_log = get_logger(__name__)

_T = TypeVar("_T")


@dataclass(frozen=True)
class NodeIdentity:
    """A node's identity for its whole life: its name, its processes, its shared memory."""

    node_id: str
    listen: ListenAddress
    rank_pids: tuple[int, ...]
    launcher_pid: int
    shm_dir: Path
    site: str | None = None
    """Name of its site; None: it names none."""
    store_port: int = 0
    """Port of the store that it holds; 0: it holds none."""
    corpus: str = SHARED
    """Corpus of the run that its samples come from; SHARED: the one of all nodes."""


class LeaseKeeper(Protocol):
    """Keeps a member's lease: in production the guardian, a separate process."""

    @property
    def pid(self) -> int: ...

    def is_running(self) -> bool: ...

    def close(self) -> None:
        """Release the lease and end."""
        ...


def new_member_id(node_id: str) -> str:
    """Return an id for one membership of a node: a returning node is a new member."""
    return f"{node_id}#{uuid.uuid4().hex[:8]}"


@dataclass(frozen=True)
class RunAccess:
    """Everything that a member needs to reach a run."""

    store: Store
    store_url: str
    run_id: str
    shared: Mapping[str, str]
    """Settings that all nodes must share, as recorded in the store."""
    on_stall: Callable[[str, View], object] = noop
    """Called in its own thread with the reason why a round failed and the store's view at that time."""
    inbox: Inbox | None = None
    """Receives connections from other nodes that the trainer answers."""
    on_event: Callable[..., object] = noop
    """Called for each event, with its kind and fields."""
    start_guardian: Callable[[GuardianOrder, Inbox | None], LeaseKeeper] = Guardian
    """Returns once the lease is held."""
    stores: RedisStore | None = None
    """The store again, if the run has several and goes on with another one when this one is lost; else None."""
    name_member: Callable[[str], str] = new_member_id
    """Makes the member id from a node id."""
    clock: Callable[[], float] = time.monotonic
    """Clock of the member's waits."""


@dataclass(frozen=True)
class Rule(Generic[_T]):
    """How a member waits for a plan or a verdict, and proposes it."""

    decide: Callable[[View], _T | Wait]
    """Decides on each view; proposes if a proposal is due and the view shows every record that it needs."""
    is_due: Callable[[View], bool]
    """Whether a proposal may be due, judged from a view that may be partial."""
    proposers: Callable[[View], Sequence[str]]
    """Members that may propose: the first at once, each next one after a delay while the proposal stays due."""
    left_s: Callable[[], float] = lambda: math.inf
    """Seconds until this member's own wait ends."""
    takes_all: Callable[[View], bool] = lambda view: False
    """Whether checking a proposal takes every record, so that each view should be complete."""


class Member:
    """One membership of a node, from taking the lease to leaving.

    Owns the guardian process and the watcher thread; `close()` ends both. Methods that wait raise Fenced if the run
    went on without this member, Leaving if it was asked to leave and its time is over, and StoreLost if Redis stays
    silent.
    """

    def __init__(
        self, run: RunAccess, identity: NodeIdentity, flags: SharedFlags, time_outs: TimeOuts, departure: Departure
    ) -> None:
        self.member_id = run.name_member(identity.node_id)
        self.identity = identity
        self.store = run.store
        self._flags = flags
        self._departure = departure
        self._time_outs = time_outs
        self._on_stall = run.on_stall
        self._on_event = run.on_event
        self._clock = run.clock
        self._recording = threading.Lock()
        self._memory = LiveBackup(self.member_id, run.shared)
        self._alive, self._round = frozenset[str](), 0
        """As of the last look."""
        self._told_links = LinkRates()
        self._told_refused: tuple[int, set[str]] = 0, set()  # the round, and the members whose refusal was said in it
        self._inquiry = FaultInquiry(run.store, self.member_id, run.clock, time_outs.detect_s)
        self._told_blames = set[Blame]()
        """Findings already reported as events."""
        self._claim: tuple[int, Claim] | None = None
        """The newest round at the time of its claim, and the claimed samples, which no round has dealt it yet."""
        self._followed = ""  # id of the newest plan that was checked against its members' records
        self._judged: tuple[str, str | None] = "", None
        """Id of the newest plan that was checked against earlier attempts, and the objection to it."""
        self._settled_at_s: float | None = None
        """When it saw the newest verdict."""
        self._first_look: tuple[int, View] | None = None
        """A round, and the store's answer to this member's last record for it; the next wait starts from this view."""
        flags.set_fenced(False)
        flags.set_session(self.store.session)
        flags.set_listed_version(0)
        self._failover = self._start_failover(run)
        self._links = LinkReader(identity.shm_dir, self.member_id)
        self._tell_banned = NamesFile(identity.shm_dir, BANNED_FILE).write
        with contextlib.ExitStack() as stack:
            stack.callback(self._leave_store)
            self._guardian = _KeptGuardian(self._guardian_order(run), run)
            stack.pop_all()
        self._watcher = _Watcher(self, flags, departure, time_outs, run.clock)

    def _start_failover(self, run: RunAccess) -> StoreFailover | None:
        if run.stores is None:
            return None
        survey_s = self._time_outs.lease_s / 2
        return StoreFailover(run.stores, self.member_id, self._memory, self._flags, run.on_event, survey_s=survey_s)

    def _guardian_order(self, run: RunAccess) -> GuardianOrder:
        identity, time_outs = self.identity, self._time_outs
        return GuardianOrder(
            store_url=run.store_url,
            run_id=run.run_id,
            member_id=self.member_id,
            node_id=identity.node_id,
            listen=identity.listen,
            flags=str(self._flags.path),
            shm_dir=str(identity.shm_dir),
            rank_pids=identity.rank_pids,
            launcher_pid=identity.launcher_pid,
            lease_s=time_outs.lease_s,
            renew_s=time_outs.renew_s,
            hung_s=time_outs.hung_s,
            is_first=True,
            store_s=time_outs.store_s,
            store_port=identity.store_port,
        )

    def outlast_duplicates(self) -> None:
        """Wait until this node's other lease has expired. Raises ConfigError if another machine uses its name."""
        outlast_duplicates(self.store, self.member_id, self.identity.node_id, look_s=self._time_outs.renew_s / 2)

    # -- rounds -------------------------------------------------------------------------------------------------

    def newest_round(self, round: int) -> int:
        """Return the newest committed round; `round`: that of this member's state. Raises Fenced."""
        committed = self._look_while_alive(round).committed
        return round if committed is None else committed.round

    @property
    def known_round(self) -> int | None:
        """Newest committed round that this member has seen: at the latest `renew_s` after its commit. Any thread."""
        return self._memory.newest_round

    def is_newest(self, round: int) -> bool:
        """Whether this is the newest committed round and one of its members lives. Raises Fenced."""
        view = self._look_while_alive(round)
        committed = view.committed
        return committed is not None and committed.round == round and bool(view.alive.intersection(committed.members))

    def is_boundary_reached(self) -> bool:
        """Whether a member stands at the boundary of the next round. Any thread."""
        round = self._round
        view = self.look(round)
        if view.committed is None:
            return False
        newest = view.committed.round
        return (view if round == newest + 1 else self.look(newest + 1)).arrived > 0

    def _look_while_alive(self, round: int) -> View:
        if self._flags.is_fenced:
            raise Fenced(f"the lease of {self.member_id} ran out and the run went on")
        self._flags.advance()
        return self.look(round + 1)

    def claim_samples(self, samples: int) -> Claim:
        """Claim samples to train on before a round has dealt this member any."""
        committed = self.look(self._round).committed
        round, ledgers = BOOTSTRAP_ROUND if committed is None else committed.round, ledgers_after(committed)

        def choose(others: Mapping[str, Claim]) -> Claim:
            return choose_claim(ledgers, self.identity.corpus, samples, others)

        claim = self.store.claim_samples(self.member_id, choose)
        self._claim = round, claim
        return claim

    def _claim_unless_dealt(self, view: View) -> Claim | None:
        """Return the claim of this member until a later round has listed it; None after that."""
        if self._claim is None or (committed := view.committed) is None:
            return None
        is_listed = self.member_id in committed.plan.listed
        if is_listed and committed.round > self._claim[0]:
            self._claim = None
        return None if self._claim is None else self._claim[1]

    def announce_ready(self, ready: Ready, links: Mapping[str, int] | None = None, *, start_nodes: int = 1) -> None:
        """Announce that this member stands at the boundary of a round; `await_turn` starts from the store's answer.

        `links`: Mbit/s to other members, as measured by transfers. `start_nodes`: number of nodes that found a run.
        """
        ready = replace(ready, site=self.identity.site, corpus=self.identity.corpus)
        self._tell_links(links or {})
        committed = self._memory.known.committed
        enough = start_nodes if committed is None else sum(m in self._alive for m in committed.members)
        with self._memory.writing():
            self._memory.announced(ready)
            view = self.store.announce_ready(self.member_id, ready, enough=enough)
        self._first_look = ready.round, self._checked(view, ready.round, whole=False)

    def _tell_links(self, seen: Mapping[str, int]) -> None:
        """Report link rates to the store if they changed. The higher of two measurements counts.

        The lower one was measured while the link was shared.
        """
        probed, told = self._links.rates, self._told_links
        mbit = {m: max(probed.mbit.get(m, 0), seen.get(m, 0)) for m in {*probed.mbit, *seen} if m in self._alive}
        is_news = mbit.keys() != told.mbit.keys() or not all(is_within_noise(mbit[m], told.mbit[m]) for m in mbit)
        if is_news or not is_within_noise(probed.rtt_ms, told.rtt_ms):
            self._told_links = LinkRates(mbit, probed.rtt_ms)
            self.store.publish_links(self.member_id, self._told_links)

    def await_turn(self, round: int, rules: Rules, *, is_member: bool, start_deadline_s: float) -> RoundPlan | Verdict:
        """Wait until `round` is open to this member (a plan) or was committed without it (a verdict: catch up, retry).

        `is_member`: it was in the last round, so a round without it means that it was excluded, unless it was only
        late. `start_deadline_s`: monotonic time after which founders wait for no further node.
        """
        return self._poll(round, self.turn_rule(round, rules, is_member=is_member, start_deadline_s=start_deadline_s))

    def turn_rule(
        self, round: int, rules: Rules, *, is_member: bool, start_deadline_s: float
    ) -> Rule[RoundPlan | Verdict]:
        """The rule of `await_turn`, which also proposes the plan when one is due. Raises Fenced."""
        stragglers = StragglerTimer(rules if is_member else Rules(), self._settled_at_s)
        alone = AloneTimer(self._clock, self._time_outs.lease_s, rules.quorum)
        pause, refused_since_s = PauseReporter(round, self._on_event), dict[str, float]()

        def waits_at(view: View) -> ElapsedWaits:
            now_s = self._clock()
            are_late = stragglers.are_late(view, now_s)
            given_up = {m for m in view.refused if now_s - refused_since_s.setdefault(m, now_s) >= _REFUSED_S}
            return ElapsedWaits(now_s > start_deadline_s, are_late, frozenset(given_up), stragglers.phase_s)

        def decide(seen: View) -> RoundPlan | Verdict | Wait:
            view = self._within_limits(seen, round, rules)
            pause.look(view.orders, self._clock())
            believed = view if self._why_unfounded(view) is None else replace(view, plan=None)
            self._require_not_barred(believed)
            if view.plan is not None and view.plan.round == round and view.failed is not None:
                self._inquiry.begin(view.plan)
            claim = self._claim_unless_dealt(view)
            reason = must_leave(believed, self.member_id, round, claim) if is_member else None
            if reason is not None:
                raise Fenced(reason)
            if view.committed is not None and view.committed.round >= round:
                self._settled_at_s = self._clock()
                return view.committed
            return self._decide_plan(view, round, rules, waits_at(view), alone)

        def is_due(seen: View) -> bool:
            view = self._within_limits(seen, round, rules)
            return may_open(view, round, rules, waits_at(view))

        def proposers(view: View) -> Sequence[str]:
            """A member proposes at once if its own wait is over: it has waited longest."""
            return (self.member_id,) if stragglers.are_late(view, self._clock()) else expected_members(view)

        return Rule(decide, is_due, proposers, lambda: stragglers.left_s(self._clock()), is_checked_by_all)

    def _within_limits(self, view: View, round: int, rules: Rules) -> View:
        """Drop records beyond their limits from the view; report each refusal once."""
        limited = refuse_excess(view, round, rules)
        if limited.refused and not view.is_proven:
            limited = refuse_excess(self.look(round), round, rules)
        view = limited
        if self._told_refused[0] != round:
            self._told_refused = round, set()
        for member in view.refused.keys() - self._told_refused[1]:
            self._told_refused[1].add(member)
            self._on_event("record_refused", round=round, member_id=member, reason=view.refused[member])
        return view

    def _why_unfounded(self, view: View) -> str | None:
        """Why the current plan's claims about earlier attempts do not follow from them; None: they do.

        Members ignore a plan whose claims do not follow, above all one that it excludes.
        """
        plan, committed = view.plan, view.committed
        if plan is None or (committed is not None and committed.round >= plan.round):
            return None
        if self._judged[0] != plan.id:
            why = self._inquiry.objection(plan, committed)
            if why is not None and view.is_settling:
                return "the store lost its record; members are given time to bring it back"
            self._judged = plan.id, why
            if why is None:
                self._tell_blames(plan)
        return self._judged[1]

    def _why_refused(self, plan: RoundPlan, view: View, rules: Rules) -> str | None:
        """Why this member refuses a plan; None: it takes part. Only `checkers` check all members' records."""
        if plan.id == self._followed:
            return None
        why = self._why_unfounded(view)
        if self.member_id not in plan.members:
            return why
        said = view.ready.get(self.member_id)
        why = why if said is None else why or misquote(plan, self.member_id, said)
        if why is None and view.unseen_ready:
            if self.member_id not in checkers(plan):
                return None
            whole = self._await_change(plan.round, None, within_s=0.0, whole=True)
            view = self._within_limits(whole, plan.round, rules)
        if view.plan != plan:
            return "another plan is there by now"
        if view.is_settling and (self._judged[0] != plan.id or not all(m in view.ready for m in plan.members)):
            return "the store lost its record; members are given time to bring it back"
        why = why or plan_objection(plan, view, rules)
        if why is None:
            self._followed = plan.id
            return None
        if not view.is_proven:
            return self._why_refused(plan, self._proven(plan.round, rules), rules)
        reason = f"{REFUSED}: {why}"
        self._on_event("plan_refused", round=plan.round, reason=reason)
        self.report_failure(plan, reason)
        return reason

    def _proven(self, round: int, rules: Rules) -> View:
        return self._within_limits(self.look(round), round, rules)

    def _require_not_barred(self, view: View) -> None:
        """Raise ConfigError if this node was excluded for good."""
        found = None if view.plan is None else barring_blame(view.plan.blames, self.member_id)
        if found is not None:
            raise ConfigError(
                f"{self.identity.node_id} was put out of the run in round {found.round}: {found.reason}; check its "
                "memory, disks and installation, and let it in again with another node.id"
            )

    def _decide_plan(
        self, view: View, round: int, rules: Rules, waits: ElapsedWaits, alone: AloneTimer
    ) -> RoundPlan | Wait:
        """The round's plan if this member takes part, proposed by it if that is its turn; else a wait."""
        current, inquiry = view.plan, self._inquiry
        if current is not None and current.round == round and view.can_finish(current):
            why = self._why_refused(current, view, rules)
            return self._turn_in(current, view, alone) if why is None else Wait(why)
        if not knows_enough_to_open(view, round):
            return Wait(f"{view.arrived} of {len(expected_members(view))} members have reached round {round}")
        if current is not None and current.round == round and not view.is_proven:
            return self._decide_plan(self._proven(round, rules), round, rules, waits, alone)
        decision = next_plan(view, round, rules, waits, self.store.links, inquiry, self.store.claims)
        if isinstance(decision, RoundPlan) and not view.is_proven and omits_ready_member(decision, view):
            return self._decide_plan(self._proven(round, rules), round, rules, waits, alone)
        if isinstance(decision, Wait):
            return decision
        if (wait := alone.check(decision, view)) is not None:
            return wait
        before = "" if current is None else current.id
        decision = self.store.signed(replace(decision, before=before), self.member_id)
        heard = inquiry.attempt if view.failed is not None and inquiry.is_of(current) else None
        if not self.store.propose_plan(decision, current=current, generation=view.generation, heard=heard):
            return Wait("another member's proposal was first")
        return self._turn_in(decision, view, alone)

    def _turn_in(self, plan: RoundPlan, view: View, alone: AloneTimer) -> RoundPlan | Wait:
        """The plan if this member is in it and may go on with it; else a wait."""
        if self.member_id not in plan.members:
            return Wait(f"round {plan.round} is open to {len(plan.members)} others")
        wait = alone.check(plan, view)
        if wait is not None and wait.waiting_for:
            self._memory.refuse(plan)
        return wait or plan

    def vote(self, plan: RoundPlan, digest: str, record: Mapping[str, Any]) -> None:
        """Vote for the result that this member holds; `await_verdict` starts from the store's answer.

        `record`: the record that it would write into the verdict. From now on it accepts no other verdict on this plan.
        """
        vote = digest if is_refusal(digest) else vote_for(digest, record)
        self.store.expect_verdict(Verdict(plan, digest, dict(record)))
        with self._memory.writing():
            generation = self._memory.voted(plan, vote, record)
            view = self.store.vote(plan, self.member_id, vote, generation=generation)
        self._first_look = plan.round, self._checked(view, plan.round, whole=False)

    def testify(self, plan: RoundPlan, evidence: Evidence) -> None:
        """Report this member's evidence on a failed plan, which it never runs again.

        A damaged store may show the plan again. Members that have not seen it fail would then receive this member's
        messages twice, which counts as a lie.
        """
        self._memory.failed(plan, ENDED_BEFORE)
        self._inquiry.testify(plan, evidence)

    def await_verdict(self, plan: RoundPlan, record: Mapping[str, Any]) -> Verdict:
        """Wait until the round is committed; `record`: as in `vote`.

        Raises PeerLost if the plan cannot be finished; the caller then takes part in the round's next plan.
        """
        return self._poll(plan.round, self.verdict_rule(plan, record))

    def verdict_rule(self, plan: RoundPlan, record: Mapping[str, Any]) -> Rule[Verdict]:
        """The rule of `await_verdict`, which also proposes the verdict when it is due. Raises the same errors."""
        votes = VoteTimer(plan, self._clock, self._time_outs.hung_s / 2)

        def decide(view: View) -> Verdict | Wait:
            if view.committed is not None and view.committed.round >= plan.round:
                if view.committed.plan == plan:
                    self._settled_at_s = self._clock()
                    return view.committed
                raise Fenced(f"round {plan.round} was committed without {self.member_id}")
            self._check_plan(view, plan, votes)
            if view.unseen_votes:
                return Wait(f"{view.voted} of {len(plan.members)} members have voted on round {plan.round}")
            decision = next_verdict(view, plan, record)
            if decision is None and not view.is_proven:
                return decide(self.look(plan.round))
            if decision is None:
                self.store.report_failure(plan, "the members hold different results")
                return Wait("results differ")
            if isinstance(decision, Verdict):
                if not self.store.propose_verdict(decision, generation=view.generation):
                    return Wait("the round was settled by another member")
                self._memory.committed(decision)
                self._settled_at_s = self._clock()
            return decision

        def is_due(view: View) -> bool:
            return view.voted >= len(plan.members) or bool(view.lost(plan))

        return Rule(decide, is_due, lambda view: [m for m in plan.members if m in view.alive])

    def _check_plan(self, view: View, plan: RoundPlan, votes: VoteTimer) -> None:
        """Raise PeerLost if a plan is superseded or can no longer be finished."""
        if view.plan != plan:
            raise PeerLost(f"round {plan.round} was opened again without some of its members")
        if view.failed is not None:
            raise PeerLost(f"round {plan.round} cannot be finished: {view.failed}")
        lost = () if view.unseen_votes else view.lost(plan)
        if lost:
            reason = f"{', '.join(lost)} lost during round {plan.round}"
            if self.store.report_failure(plan, reason):  # else a lost one came back and voted after all
                raise PeerLost(reason, lost)
        if votes.stand_still(view):
            reason = f"{len(plan.members) - view.voted} {NO_VOTE}"
            if self.store.report_failure(plan, reason):
                raise PeerLost(f"round {plan.round} cannot be finished: {reason}")

    def _poll(self, round: int, rule: Rule[_T]) -> _T:
        pauses, reminded_at_s, said, due_at_s = Backoff(_POLL_MIN_S, _POLL_MAX_S, factor=1.5), self._clock(), "", None
        view = self._take_first_look(round) or self.look(round)
        while True:
            require_admitted(view.orders, self.member_id)
            if self._flags.is_fenced:
                raise Fenced(f"the lease of {self.member_id} ran out and the run went on")
            if self._failover is not None:
                self._failover.require_line()
            now_s = self._clock()
            if self._departure.is_overdue(now_s):
                raise Leaving(f"asked to leave; the others did not reach round {round} within fault.grace_s")
            self._flags.advance()
            decision = rule.decide(view)
            if not isinstance(decision, Wait):
                return decision
            if self._failover is not None and decision.lacks_electors:
                self._failover.check_other_stores()
            if decision.reason != said and now_s - reminded_at_s > _REMIND_S:
                said, reminded_at_s = decision.reason, now_s
                _log.info(
                    "waiting for the next plan or verdict",
                    extra={"fields": {"round": round, "why": decision.reason, "waits_for": decision.waiting_for}},
                )
            due_at_s = None if not rule.is_due(view) else now_s if due_at_s is None else due_at_s
            step_s = _STEP_IN_S * max(1.0, len(view.alive) / _STEP_IN_MEMBERS)
            left_s = _LOOK_S if due_at_s is None else due_at_s + self._place(rule, view) * step_s - now_s
            if left_s > 0:  # it is for others to propose
                within_s = min(left_s, _LOOK_S, max(rule.left_s(), _POLL_MIN_S))
                view = self._await_change(round, view, within_s=within_s, whole=rule.takes_all(view))
            else:
                view = self._await_change(round, view, within_s=pauses.pause_s(), whole=True)

    def _place(self, rule: Rule[Any], view: View) -> int:
        """Number of members that propose before this one."""
        proposers = sorted(rule.proposers(view))
        return proposers.index(self.member_id) if self.member_id in proposers else len(proposers)

    def _await_change(self, round: int, view: View | None, *, within_s: float, whole: bool) -> View:
        seen = self.store.await_change(round, view, within_s=within_s, whole=whole)
        return self._checked(seen, round, whole=whole)

    def _take_first_look(self, round: int) -> View | None:
        seen, self._first_look = self._first_look, None
        return seen[1] if seen is not None and seen[0] == round else None

    def look(self, round: int) -> View:
        """The view for `round`, after restoring any records that the store has lost. Any thread.

        Raises ConfigError if this node's key is banned.
        """
        view = self._checked(self.store.view(round), round)
        require_admitted(view.orders, self.member_id)
        return view

    def _with_store(self, view: View, round: int) -> View:
        """The view of the store in use, after switching to another store if needed."""
        until_s = self._clock() + self._time_outs.store_s
        while self._failover is not None and view.generation != self._memory.generation:
            if self._departure.is_overdue(self._clock()):
                raise Leaving("asked to leave while the run was without a store")
            if self._clock() > until_s:
                raise StoreLost("the store lost the run's record, and too few members went on with another one")
            self._failover.recover()
            view = self.store.view(round)
        return view

    def _checked(self, view: View, round: int, *, whole: bool = True) -> View:
        view = self._with_store(view, round)
        self._tell_banned(view.orders.banned)
        if view.orders.bans(self.member_id):
            return view  # a banned member's records do not count, so it restores none
        if self._memory.is_ahead_of(view, round):  # the main thread may have seen or said more meanwhile
            view = self.store.await_change(round, None, within_s=0.0, whole=whole)
        if self._memory.is_ahead_of(view, round):
            if self.store.restore(self._memory.to_restore):
                self._told_links = LinkRates()
                _log.warning("the store had lost its record; brought it back", extra={"fields": {"round": round}})
            view = self.store.view(round)
        if (failure := self._memory.failure_unknown_to(view)) is not None:
            self.store.report_failure(*failure)
            view = self.store.view(round)
        self._memory.learn(view)
        self._alive, self._round = view.alive, round
        self._enter_session(view)
        if view.committed is not None:
            self._tell_blames(view.committed.plan)
        if view.plan is not None and self.member_id in view.plan.listed:
            self._flags.set_listed_version(view.plan.version)
        if self.member_id in view.orders.leaving:
            self._departure.drain()
        return view

    def _tell_blames(self, plan: RoundPlan) -> None:
        """Report each finding of fault once."""
        new = [blame for blame in plan.blames if blame not in self._told_blames]
        self._told_blames.update(new)
        for blame in new:
            self._on_event(
                "blamed",
                round=blame.round,
                member_ids=list(blame.members),
                reason=blame.reason,
                is_lie=blame.is_lie,
                consequence=blame.consequence,
            )

    def _enter_session(self, view: View) -> None:
        """Enter the run's session at the first verdict that lists this member; other sessions are strangers."""
        committed = view.committed
        if committed is not None and self.member_id in committed.members and committed.session != self.store.session:
            self.store.session = committed.session
            self._flags.set_session(committed.session)

    # -- transfers ----------------------------------------------------------------------------------------------

    def watch(self, plan: RoundPlan | None) -> None:
        """During a transfer, mark it aborted on the flags as soon as the plan cannot be finished. None: stop."""
        self._watcher.watch(plan)

    def look_after_record(self) -> None:
        """Restore records that the store has lost. The watcher's thread."""
        self._await_change(self._round, None, within_s=0.0, whole=False)

    def await_news(self, plan: RoundPlan, seen: View | None) -> View:
        """Wait a moment for news of a plan; returns all records that tell whether it ended. The watcher's thread."""
        view = self.store.await_change(plan.round, seen, within_s=_LOOK_S, whole=False, ends_with=plan)
        view = self._checked(view, plan.round, whole=False)
        return self.look(plan.round) if view.unseen_votes and view.lost(plan) else view

    def report_failure(self, plan: RoundPlan, reason: str) -> None:
        self._memory.failed(plan, reason)
        self.store.report_failure(plan, f"{self.member_id}: {reason}")

    def refuse_rollback(self, plan: RoundPlan, reason: str) -> None:
        """Cancel the rollback order for all members, and have the round opened again without it."""
        step = plan.rollback
        assert step is not None
        self.store.give_orders(lambda given: give_up_rollback(given, step))
        self._on_event("rollback_refused", round=plan.round, step=step, reason=reason)
        self.report_failure(plan, reason)

    def tell_stall(self, plan: RoundPlan, stall: TransferStalled) -> None:
        """Report which members this node waited for, since when, and at which byte."""
        self._on_event(
            "transfer_stalled",
            round=plan.round,
            waiting_for=list(stall.member_ids),
            since_s=stall.since_s,
            at_byte=stall.at_byte,
            of_bytes=stall.of_bytes,
            reason=str(stall),
        )

    def record_stall(self, round: int, reason: str) -> None:
        """Save the circumstances of a failed transfer for operators, in a thread that no member waits for."""

        def record() -> None:
            with self._recording, contextlib.suppress(ZerobandError):
                self._on_stall(reason, self.store.view(round))

        threading.Thread(target=record, name="stall", daemon=True).start()

    def keep_guardian(self) -> None:
        """Start another guardian if this one ended. The watcher's thread."""
        self._guardian.keep()

    def tell_links(self) -> None:
        """Report the state of the links to other members if it changed. The watcher's thread."""
        if (links := self._links.read_changes()) is not None:
            self._on_event("links", links=links)

    def close(self) -> None:
        """Stop watching and release the lease."""
        self._watcher.close()
        self._guardian.close()
        self._leave_store()

    def _leave_store(self) -> None:
        if self._failover is not None:
            self._failover.close()


class _KeptGuardian:
    """The guardian, restarted if it ends unexpectedly."""

    def __init__(self, order: GuardianOrder, run: RunAccess) -> None:
        self._order = order
        self._run = run
        self._lock = threading.Lock()
        self._is_closed = False
        self._guardian = run.start_guardian(order, run.inbox)

    def keep(self) -> None:
        with self._lock:
            if not self._is_closed and not self._guardian.is_running():
                _log.warning("the guardian ended; starting another", extra={"fields": {"pid": self._guardian.pid}})
                order = replace(self._order, is_first=False, store_s=0.0)
                self._guardian = self._run.start_guardian(order, self._run.inbox)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._guardian.close()


class _Watcher:
    """One daemon thread that watches the members during a transfer, and at all times the guardian and the record.

    Its activity never counts as the trainer's progress: a trainer that hangs in a transfer must lose its lease.
    """

    def __init__(
        self,
        member: Member,
        flags: SharedFlags,
        departure: Departure,
        time_outs: TimeOuts,
        clock: Callable[[], float],
    ) -> None:
        self._member = member
        self._flags = flags
        self._departure = departure
        self._time_outs = time_outs
        self._plan: RoundPlan | None = None
        self._watched_from_s = 0.0
        self._seen: View | None = None
        self._clock = clock
        self._looked_at_s = clock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="membership-watcher", daemon=True)
        self._thread.start()

    def watch(self, plan: RoundPlan | None) -> None:
        if plan is not self._plan:
            self._plan, self._watched_from_s = plan, self._clock()

    def _run(self) -> None:
        while not self._stop.wait(self._time_outs.watch_s):
            for watch in (self._member.keep_guardian, self._look, self._member.tell_links):
                try:
                    watch()
                except Exception as error:  # noqa: BLE001 - this thread must survive: no other one does this work
                    _log.warning("cannot look after the membership", extra={"fields": {"error": repr(error)}})

    def _look(self) -> None:
        plan, now_s = self._plan, self._clock()
        if plan is not None and now_s - self._watched_from_s < self._time_outs.watch_s:
            return  # most transfers of small states are over by then, and ask the store nothing more
        if plan is not None:
            self._seen = self._member.await_news(plan, self._seen)
            if not self._seen.can_finish(plan) or self._departure.is_overdue(now_s):
                self._flags.abort(plan.version)
        elif now_s - self._looked_at_s > self._time_outs.renew_s:
            self._member.look_after_record()
            self._looked_at_s = now_s

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
