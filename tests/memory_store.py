"""A store in the memory of one process, whose clock its owner moves: for tests, and for runs in virtual time.

It keeps the contract of `Store` as `RedisStore` does, and shares no code with that. Nodes may be threads: a change
wakes who waits.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from zeroband.elastic.membership.orders import Orders
from zeroband.elastic.membership.records import (
    Attempt,
    Claim,
    Evidence,
    LinkRates,
    Peer,
    Ready,
    RestartPoint,
    RoundPlan,
    StoreTerm,
    Verdict,
    View,
)
from zeroband.elastic.membership.round_rules import Wait
from zeroband.elastic.membership.succession import HandoverState, MemberReport
from zeroband.elastic.store.backup import StoreBackup
from zeroband.elastic.store.interface import Store, record_of, require_equal

DEADLINE_S = 60.0

_T = TypeVar("_T")
_V = TypeVar("_V")


@dataclass(frozen=True)
class Said(Generic[_V]):
    """What somebody wrote, and the sessions of the run that it knew of then."""

    value: _V
    sessions: tuple[str, ...]


@dataclass
class MemoryRecord:
    """What all nodes of a run share."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    """Held while somebody reads or writes; notified of every change."""
    now_ms: int = 10**12
    pulse_ms: int | None = None
    """When a lease was renewed last; None: there is none."""
    settled_ms: int = 0
    """Until then members are given time to bring back what was lost."""
    leases: dict[str, int] = field(default_factory=dict[str, int])
    peers: dict[str, Peer] = field(default_factory=dict[str, Peer])
    links: dict[str, LinkRates] = field(default_factory=dict[str, LinkRates])
    claims: dict[str, Claim] = field(default_factory=dict[str, Claim])
    leaving: set[str] = field(default_factory=set[str])
    shared: Said[dict[str, str]] | None = None
    restart_point: RestartPoint | None = None
    orders: Said[Orders] | None = None
    plan: RoundPlan | None = None
    plans: list[RoundPlan] = field(default_factory=list[RoundPlan])
    """All that there have been, the oldest first."""
    committed: Verdict | None = None
    verdicts: list[Verdict] = field(default_factory=list[Verdict])
    ready: dict[int, dict[str, Said[Ready]]] = field(default_factory=lambda: defaultdict(dict))
    """By round and member."""
    votes: dict[RoundPlan, dict[str, Said[str]]] = field(default_factory=lambda: defaultdict(dict))
    """By plan and member."""
    evidence: dict[RoundPlan, dict[str, Evidence]] = field(default_factory=lambda: defaultdict(dict))
    """By plan and member."""
    failed: dict[RoundPlan, Said[str]] = field(default_factory=dict[RoundPlan, Said[str]])
    generation: StoreTerm | None = None
    member_reports: dict[str, MemberReport] = field(default_factory=dict[str, MemberReport])
    """What members told that want to go to this store."""

    def lose_everything(self) -> None:
        """Forget all of the run, as a Redis without a disk does when it starts again."""
        with self.changed:
            empty = MemoryRecord(self.changed, self.now_ms)
            vars(self).update(vars(empty))
            self.changed.notify_all()

    def let_pass(self, ms: int, *, is_silent: bool) -> None:
        """Move the clock on; `is_silent`: nobody renews meanwhile."""
        with self.changed:
            self.now_ms += ms
            if self.pulse_ms is not None and not is_silent:
                self.pulse_ms += ms
            self.changed.notify_all()

    def wait_for(self, decide: Callable[[], _T | Wait]) -> _T:
        """The first answer of `decide` that is no Wait; it is called with the record held."""
        with self.changed:
            answers: list[_T | Wait] = []

            def is_decided() -> bool:
                answers[:] = [decide()]
                return not isinstance(answers[0], Wait)

            assert self.changed.wait_for(is_decided, timeout=DEADLINE_S), answers
            answer = answers[0]
            assert not isinstance(answer, Wait)
            return answer


class MemoryStore(Store):
    """The record as one node reads and writes it."""

    def __init__(self, record: MemoryRecord, *, lease_s: float = 5.0) -> None:
        self.record = record
        self._session = ""
        self._ours: dict[str, str] | None = None
        """What all nodes share; None: this node has not compared it."""
        self._lineage: tuple[str, ...] = ()
        """Session of the newest verdict that was seen, and those before it."""
        self._lease_ms = int(1000 * lease_s)

    @property
    def session(self) -> str:
        return self._session

    @session.setter
    def session(self, session: str) -> None:
        self._session = session

    # -- what counts --------------------------------------------------------------------------------------------

    def _is_ours(self, sessions: tuple[str, ...]) -> bool:
        return not self._session or not sessions or self._session in sessions

    def _read(self, said: Said[_V] | None) -> _V | None:
        return said.value if said is not None and self._is_ours(said.sessions) else None

    def _read_all(self, said: Mapping[str, Said[_V]]) -> dict[str, _V]:
        return {member: word.value for member, word in said.items() if self._is_ours(word.sessions)}

    def _say(self, value: _V) -> Said[_V]:
        return Said(value, self._lineage)

    def _committed(self) -> Verdict | None:
        committed = self.record.committed
        if committed is None or not self._is_ours(committed.sessions):
            return None
        self._lineage = committed.sessions
        return committed

    def _plan(self) -> RoundPlan | None:
        plan, committed = self.record.plan, self._committed()
        if plan is None or plan == (committed and committed.plan):
            return plan
        if committed is None:
            return plan if not self._session or self._session in plan.sessions else None
        return plan if plan.sessions == committed.sessions else None

    def _orders(self) -> Orders:
        said = self.record.orders
        is_of_none = said is not None and not said.sessions and bool(self._session)
        return (None if is_of_none else self._read(said)) or Orders()

    def _shared(self) -> dict[str, str] | None:
        said = self.record.shared
        is_of_none = said is not None and not said.sessions and bool(self._session)
        return None if is_of_none else self._read(said)

    def _restart_point(self) -> RestartPoint | None:
        agreed, committed = self.record.restart_point, self._committed()
        line = set() if committed is None else {*committed.sessions}
        return agreed if agreed is not None and line >= {*agreed.sessions[:1]} else None

    # -- the run ------------------------------------------------------------------------------------------------

    def found_or_match(self, shared: Mapping[str, str]) -> dict[str, str]:
        ours = record_of(shared)
        with self.record.changed:
            if self._shared() is None and self._alive():
                self.record.changed.wait_for(lambda: self._shared() is not None, timeout=self._lease_ms / 1000)
            theirs = self._shared()
            if theirs is None:
                self.record.shared = self._say(ours)
                self.record.changed.notify_all()
            else:
                require_equal(theirs, ours)
        self._ours = ours
        return ours

    def forget_dead_run(self) -> bool:
        with self.record.changed:
            self._wake()
            self.record.pulse_ms = self.record.now_ms if self.record.leases else None
            if self._alive():
                return False
            self.record.shared = None
            self.record.changed.notify_all()
            return True

    def propose_restart_point(self, restart_point: RestartPoint, view: View) -> bool:
        with self.record.changed:
            now = (self._restart_point(), self._plan(), self._committed())
            if self._is_settling() or now != (view.restart_point, view.plan, view.committed):
                return False
            self.record.restart_point = restart_point
            self.record.changed.notify_all()
            return True

    def restore(self, known: StoreBackup) -> bool:
        record = self.record
        with record.changed:
            if known.generation is not None and known.generation != record.generation:
                return False
            has_lost = record.shared is None
            committed, plan = self._committed(), self._plan()
            if known.committed is not None and _age(committed) < _age(known.committed):
                record.committed, has_lost = known.committed, True
                record.verdicts.append(known.committed)
            if known.plan is not None and (plan is None or plan.version < known.plan.version):
                record.plan, has_lost = known.plan, True
                record.plans.append(known.plan)
            if self._orders().version < known.orders.version:
                record.orders, has_lost = self._say(known.orders), True
            if self._shared() is None:
                record.shared = self._say(dict(known.run))
            if known.ready is not None:
                self._say_again(record.ready[known.ready.round], known.member_id, known.ready)
            if known.vote is not None and known.vote[0] == record.plan:
                self._say_again(record.votes[known.vote[0]], known.member_id, known.vote[1])
            if has_lost:
                record.settled_ms = record.now_ms + self._lease_ms
            record.changed.notify_all()
            return has_lost

    def _say_again(self, told: dict[str, Said[_V]], member: str, word: _V) -> None:
        if self._read(told.get(member)) is None:
            told[member] = self._say(word)

    def history(self) -> list[Verdict]:
        with self.record.changed:
            ours = [verdict for verdict in self.record.verdicts if self._is_ours(verdict.sessions)]
            return list({(verdict.session, verdict.round): verdict for verdict in ours}.values())

    # -- leases -------------------------------------------------------------------------------------------------

    @property
    def _silence_ms(self) -> int:
        return self._lease_ms // 2

    def _time_ms(self) -> int:
        """The time by which leases count: it stands still while nobody renews."""
        now_ms, pulse_ms = self.record.now_ms, self.record.pulse_ms
        return now_ms if pulse_ms is None or 0 <= now_ms - pulse_ms <= self._silence_ms else pulse_ms

    def _wake(self) -> None:
        """After a silence: who held a lease when it began gets a fresh one."""
        record, at_ms = self.record, self._time_ms()
        if at_ms != record.now_ms:
            fresh_ms = record.now_ms + self._lease_ms
            record.leases = {m: fresh_ms if end_ms > at_ms else 0 for m, end_ms in record.leases.items()}

    def _alive(self) -> frozenset[str]:
        at_ms = self._time_ms()
        return frozenset(member for member, end_ms in self.record.leases.items() if end_ms > at_ms)

    def _is_settling(self) -> bool:
        return self.record.now_ms < self.record.settled_ms

    def renew_lease(
        self, member_id: str, peer: Peer, *, first: bool = False, listed_version: int = 0
    ) -> dict[str, Peer] | None:
        record = self.record
        with record.changed:
            self._wake()
            plan, holds = self._plan(), record.leases.get(member_id, 0) > record.now_ms
            is_newer = (
                plan is not None
                and plan.version > listed_version
                and member_id
                not in (
                    *plan.members,
                    *plan.late,
                )
            )
            if is_newer and not (first or holds):
                return None
            record.leases[member_id] = record.now_ms + self._lease_ms
            record.pulse_ms = record.now_ms
            record.peers[member_id] = peer
            record.changed.notify_all()
            return {member: record.peers[member] for member in self._alive() if member in record.peers}

    def release_lease(self, member_id: str) -> None:
        record = self.record
        with record.changed:
            record.leases.pop(member_id, None)
            record.peers.pop(member_id, None)
            if not record.leases:
                record.pulse_ms = None
            record.changed.notify_all()

    def expire_lease(self, member_id: str) -> None:
        with self.record.changed:
            if member_id in self.record.leases:
                self.record.leases[member_id] = 0
            self.record.changed.notify_all()

    def lease_ends_ms(self) -> dict[str, int]:
        with self.record.changed:
            return dict(self.record.leases)

    def is_renewed(self, before_ms: int, end_ms: int) -> bool:
        return 0 < end_ms - before_ms < self._silence_ms

    def announce_leaving(self, member_id: str) -> frozenset[str]:
        with self.record.changed:
            self.record.leaving.add(member_id)
            return self._alive() - self.record.leaving

    # -- rounds -------------------------------------------------------------------------------------------------

    def view(self, round: int) -> View:
        record = self.record
        with record.changed:
            committed, plan = self._committed(), self._plan()
            votes = self._read_all({} if plan is None else record.votes[plan])
            ready = self._read_all(record.ready[round])
            view = View(
                plan=plan,
                committed=committed,
                alive=self._alive(),
                ready=ready,
                votes=votes,
                failed=None if plan is None else self._read(record.failed.get(plan)),
                peers=dict(record.peers),
                is_known=self._shared() is not None,
                is_settling=self._is_settling(),
                orders=self._orders(),
                restart_point=self._restart_point(),
                generation=record.generation,
            )
            return view.counted()

    def await_change(
        self, round: int, seen: View | None, *, within_s: float, whole: bool = True, ends_with: RoundPlan | None = None
    ) -> View:
        with self.record.changed:
            self.record.changed.wait_for(lambda: self.view(round) != seen, timeout=within_s)
            return self.view(round)

    def claim_samples(self, member_id: str, choose: Callable[[Mapping[str, Claim]], Claim]) -> Claim:
        with self.record.changed:
            claim = choose(dict(self.record.claims))
            self.record.claims = {m: c for m, c in self.record.claims.items() if m in self.record.leases}
            self.record.claims[member_id] = claim
            return claim

    def claims(self) -> dict[str, Claim]:
        with self.record.changed:
            return dict(self.record.claims)

    def publish_links(self, member_id: str, links: LinkRates) -> None:
        with self.record.changed:
            self.record.links[member_id] = links

    def acquire_measuring(self, member_id: str) -> bool:
        return True

    def release_measuring(self, member_id: str) -> None: ...

    def links(self) -> dict[str, LinkRates]:
        with self.record.changed:
            return dict(self.record.links)

    def announce_ready(self, member_id: str, ready: Ready, *, enough: int | None = None) -> View:
        with self.record.changed:
            self.record.ready[ready.round].setdefault(member_id, self._say(ready))
            self.record.changed.notify_all()
            return self.view(ready.round)

    def begin(self, generation: StoreTerm, state: HandoverState) -> bool:
        record = self.record
        with record.changed:
            if record.generation is not None and record.generation >= generation:
                return False
            record.generation, record.committed, record.plan = generation, state.committed, state.plan
            record.verdicts.append(state.committed)
            record.shared, record.orders = self._say(dict(state.run)), self._say(state.orders)
            if state.plan is not None:
                record.plans.append(state.plan)
                record.votes.pop(state.plan, None)
                record.failed.pop(state.plan, None)
            record.leases = dict.fromkeys(state.members, record.now_ms + self._lease_ms)
            record.pulse_ms, record.settled_ms = record.now_ms, 0
            record.changed.notify_all()
            return True

    def signed(self, plan: RoundPlan, member_id: str) -> RoundPlan:
        return replace(plan, proposer=member_id)

    def propose_plan(
        self,
        plan: RoundPlan,
        *,
        current: RoundPlan | None,
        generation: StoreTerm | None = None,
        heard: Attempt | None = None,
    ) -> bool:
        record = self.record
        with record.changed:
            if record.generation != generation:
                return False
            committed = self._committed()
            is_committed = committed is not None and committed.round >= plan.round
            if self._plan() != current or is_committed or self._is_settling():
                return False
            if self._orders().version != plan.orders:
                return False
            if heard is not None and heard != self.attempt(heard.plan.id):
                return False
            record.plan = plan
            record.plans.append(plan)
            record.changed.notify_all()
            return True

    def testify(self, plan: RoundPlan, member_id: str, evidence: Evidence, *, again: bool = False) -> bool:
        record = self.record
        with record.changed:
            if record.plan == plan or (again and plan in record.plans):
                record.evidence[plan].setdefault(member_id, evidence)
                record.changed.notify_all()
            return member_id in record.evidence[plan]

    def attempt(self, plan_id: str) -> Attempt | None:
        record = self.record
        with record.changed:
            plan = next((o for o in reversed(record.plans) if o.id == plan_id), None)
            if plan is None:
                return None
            votes, failed = self._read_all(record.votes[plan]), self._read(record.failed.get(plan))
            return Attempt(plan, votes, dict(record.evidence[plan]), failed or "")

    def report_failure(self, plan: RoundPlan, reason: str) -> bool:
        with self.record.changed:
            committed = self._committed()
            if committed is not None and committed.plan.version >= plan.version:
                return False
            if self.record.plan == plan:
                self.record.failed.setdefault(plan, self._say(reason))
            self.record.changed.notify_all()
            return True

    def vote(self, plan: RoundPlan, member_id: str, digest: str, *, generation: StoreTerm | None = None) -> View:
        with self.record.changed:
            if self.record.generation == generation and self.record.plan == plan:
                self.record.votes[plan].setdefault(member_id, self._say(digest))
            self.record.changed.notify_all()
            return self.view(plan.round)

    def expect_verdict(self, verdict: Verdict) -> None:
        """A look at memory costs nothing."""

    def propose_verdict(self, verdict: Verdict, *, generation: StoreTerm | None = None) -> bool:
        record, plan = self.record, verdict.plan
        with record.changed:
            if record.generation != generation:
                return False
            committed, orders = self._committed(), self._orders()
            is_committed = committed is not None and committed.round >= verdict.round
            if record.plan != plan or is_committed or self._is_settling() or plan in record.failed:
                return False
            if plan.rollback is not None and orders.rollback == plan.rollback:
                record.orders = self._say(replace(orders, rollback=None, version=orders.version + 1))
            record.committed = verdict
            record.verdicts.append(verdict)
            if self._ours is not None and verdict.session != self._session:
                record.shared = Said(self._ours, verdict.sessions)
            gone = record.leases.keys() - self._alive() - {*plan.members, *plan.late}
            for member in gone:  # the dead that cannot return
                del record.leases[member]
                record.peers.pop(member, None)
            record.changed.notify_all()
            return True

    def give_orders(self, change: Callable[[Orders], Orders]) -> Orders:
        with self.record.changed:
            plan, orders = self._plan(), self._orders()
            newest = 0 if plan is None else plan.orders
            changed = change(replace(orders, version=max(orders.version, newest)))
            self.record.orders = self._say(changed)
            self.record.changed.notify_all()
            return changed


def _age(verdict: Verdict | None) -> tuple[int, int]:
    """What of two verdicts is higher: the round, and then the version of the plan."""
    return (-1, -1) if verdict is None else (verdict.round, verdict.plan.version)
