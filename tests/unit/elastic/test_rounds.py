"""Several members through many rounds, in any order of events: the production rules on a real Redis, no clock.

`Member` decides here as it does in a run; only its waiting is taken out, so that hypothesis chooses who looks at the
store when, and how old the look is on which somebody acts.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from zeroband.config.schema import ElasticConfig
from zeroband.elastic.epoch import FOUNDING_ROUND, Opening, Ready, Verdict, View, Wait
from zeroband.elastic.member import Member, new_member_id
from zeroband.elastic.progress import Progress, RunShape
from zeroband.elastic.store import Store
from zeroband.errors import Fenced, PeerLost

LONG_S = 1000.0
SHAPE = RunShape(total_steps=10_000, steps_per_round=2, batch_size=3)
TOKENS = 10
NODES, FOUNDERS = 4, 3
SLOT = st.integers(0, NODES - 1)
ORDER = st.lists(SLOT, min_size=4, max_size=24)

pytestmark = pytest.mark.slow


def hashed(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]


class RecordingStore(Store):
    """Keeps what was proposed, so that it can be proposed again, and delays it while it is told to."""

    def __init__(self, url: str, run_id: str) -> None:
        super().__init__(url, run_id, patience_s=5.0)
        self.proposed: list[Opening | Verdict] = []
        self.on_the_way: list[Opening | Verdict] = []
        self.is_slow = False

    def propose_opening(self, opening: Opening) -> bool:
        if self.is_slow:
            self.on_the_way.append(opening)
            return False
        self.proposed.append(opening)
        return super().propose_opening(opening)

    def propose_verdict(self, verdict: Verdict) -> bool:
        if self.is_slow:
            self.on_the_way.append(verdict)
            return False
        self.proposed.append(verdict)
        return super().propose_verdict(verdict)

    def deliver(self) -> None:
        for proposal in self.on_the_way:
            if isinstance(proposal, Opening):
                self.propose_opening(proposal)
            else:
                self.propose_verdict(proposal)
        self.on_the_way = []


class StepMember(Member):
    """A membership that hands out its decisions instead of waiting: no guardian, no watcher."""

    def __init__(self, store: Store, node_id: str) -> None:
        self.member_id = new_member_id(node_id)
        self.store = store

    def _poll(self, round: int, decide: Callable[[View], Any]) -> Any:
        return decide

    def check(self, view: View, opening: Opening) -> None:
        self._check_opening(view, opening)


@dataclass
class Node:
    """A node between its calls. `phase` names what it waits for."""

    member: StepMember
    phase: str = "founding"
    round: int = -1
    state: str = "initial"
    progress: Progress = field(default_factory=Progress.at_start)
    opening: Opening | None = None
    group_epoch: int | None = None
    """The epoch for which it has groups between nodes."""
    is_joiner: bool = False
    is_fenced: bool = False
    seen: View | None = None
    """An older look at the store, on which it acts next."""
    payload: Mapping[str, Any] = field(default_factory=dict)

    @property
    def next_round(self) -> int:
        return self.round + 1

    def turn(self, phase: str) -> None:
        self.phase, self.seen = phase, None


class Rounds(RuleBasedStateMachine):
    """One run. Every rule is an event that production can have at that moment."""

    url: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.store = RecordingStore(self.url, uuid.uuid4().hex)
        self.client = redis.Redis.from_url(self.url)
        self.elastic = ElasticConfig(min_nodes=1, start_nodes=2)
        self.start_deadline_s = float("inf")
        self.nodes: dict[int, Node] = {}
        self.gone: dict[str, int] = {}
        """Members that may never commit again -> number of verdicts when they were excluded."""
        self.entered: dict[int, dict[str, bool]] = {}
        """Version -> member -> whether it came with groups that it had already."""
        self.built: set[tuple[str, int]] = set()
        self.line: dict[int, tuple[int, str, str]] = {}
        """Round -> what the first to apply it saw: version, digest, state after it."""

    # -- events -------------------------------------------------------------------------------------------------

    @initialize(is_founded=st.booleans())
    def found(self, is_founded: bool) -> None:
        for slot in range(FOUNDERS):
            self.start_node(slot)
        for _ in range(6 if is_founded else 0):
            self.all_act()

    @rule(order=ORDER)
    def act(self, order: list[int]) -> None:
        """Time passes: nodes take their steps in this order."""
        self.act_in(order)

    @rule()
    def all_act(self) -> None:
        for node in list(self.nodes.values()):
            self.step(node)

    @rule(order=ORDER, slot=SLOT)
    def start(self, order: list[int], slot: int) -> None:
        self.act_in(order)
        self.start_node(slot)

    @rule(order=ORDER, slot=SLOT, is_lease_released=st.booleans())
    def die(self, order: list[int], slot: int, is_lease_released: bool) -> None:
        """SIGKILL: with a living guardian the lease ends at once, with the whole machine it runs out later."""
        self.act_in(order)
        node = self.nodes.pop(slot, None)
        if node is not None and is_lease_released:
            self.store.release_lease(node.member.member_id)

    @rule(order=ORDER, slot=SLOT, later=st.lists(SLOT, max_size=5))
    def lease_runs_out_and_is_renewed(self, order: list[int], slot: int, later: list[int]) -> None:
        self.act_in(order)
        if slot in self.nodes:
            self.client.delete(self.store.keys.lease(self.nodes[slot].member.member_id))
        self.act_in(later)
        if slot in self.nodes:
            self.renew(self.nodes[slot])

    @rule(order=ORDER)
    def leases_of_the_dead_run_out(self, order: list[int]) -> None:
        self.act_in(order)
        self.bury_the_dead()

    @rule(order=ORDER, slot=SLOT, later=ORDER)
    def look_and_act_later(self, order: list[int], slot: int, later: list[int]) -> None:
        """A node decides on what it saw a while ago."""
        self.act_in(order)
        if slot in self.nodes:
            node = self.nodes[slot]
            node.seen = self.store.view(node.next_round)
            self.act_in([other for other in later if other != slot])
            self.step(node)

    @rule(order=ORDER, slot=SLOT, later=ORDER)
    def proposal_comes_late(self, order: list[int], slot: int, later: list[int]) -> None:
        self.act_in(order)
        if slot in self.nodes:
            self.store.is_slow = True
            self.step(self.nodes[slot])
            self.store.is_slow = False
            self.act_in(later)
            self.store.deliver()

    @rule(order=ORDER, slot=SLOT)
    def transfer_breaks(self, order: list[int], slot: int) -> None:
        self.act_in(order)
        if (node := self.in_phase("reducing", slot)) is not None:
            self.give_up(node, "a lane broke")

    @rule(order=ORDER, slot=SLOT)
    def result_is_damaged(self, order: list[int], slot: int) -> None:
        self.act_in(order)
        if (node := self.in_phase("reducing", slot)) is not None:
            self.reduce(node, digest="damaged")

    @rule(order=ORDER, slot=SLOT)
    def update_is_not_finite(self, order: list[int], slot: int) -> None:
        self.act_in(order)
        if (node := self.in_phase("training", slot)) is not None:
            self.arrive(node, weight=0)

    @rule()
    def founders_stop_waiting(self) -> None:
        self.start_deadline_s = float("-inf")

    @rule(order=ORDER, data=st.data())
    def proposal_comes_twice(self, order: list[int], data: st.DataObject) -> None:
        self.act_in(order)
        if not self.store.proposed:
            return
        again = data.draw(st.sampled_from(self.store.proposed))
        if isinstance(again, Opening):
            assert not Store.propose_opening(self.store, again)
        else:
            assert not Store.propose_verdict(self.store, again)

    # -- what a node does ---------------------------------------------------------------------------------------

    def act_in(self, order: list[int]) -> None:
        for slot in order:
            if slot in self.nodes:
                self.step(self.nodes[slot])

    def in_phase(self, phase: str, slot: int) -> Node | None:
        """A node in this phase: the one in the slot, or another."""
        slots = [slot, *sorted(self.nodes)]
        return next((self.nodes[s] for s in slots if s in self.nodes and self.nodes[s].phase == phase), None)

    def start_node(self, slot: int) -> None:
        if slot in self.nodes:
            return
        member = StepMember(self.store, f"n{slot}")
        self.nodes[slot] = node = Node(member)
        self.renew(node, first=True)
        if self.store.view(FOUNDING_ROUND).committed is not None:
            node.turn("recovering")
        else:
            member.announce_ready(Ready(FOUNDING_ROUND, 0, node.state))

    def bury_the_dead(self) -> None:
        living = {node.member.member_id for node in self.nodes.values()}
        for member in self.store.view(FOUNDING_ROUND).alive - living:
            self.client.delete(self.store.keys.lease(member))

    def renew(self, node: Node, *, first: bool = False) -> None:
        if not self.store.renew_lease(node.member.member_id, lease_s=LONG_S, progress=0, first=first):
            node.is_fenced = True

    def step(self, node: Node) -> None:
        try:
            if node.is_fenced:
                raise Fenced("the lease was refused")
            getattr(self, node.phase)(node)
        except PeerLost:
            node.group_epoch = None
            node.turn("entering" if node.is_joiner else "opening" if node.round >= 0 else "founding")
        except Fenced:
            if node.is_fenced or not (node.is_joiner or node.round < 0):
                self.come_back(node)
            else:
                node.turn("recovering")

    def come_back(self, node: Node) -> None:
        self.store.release_lease(node.member.member_id)
        self.gone[node.member.member_id] = len(self.store.history())
        node.member = StepMember(self.store, node.member.member_id.partition("#")[0])
        node.group_epoch, node.is_fenced = None, False
        self.renew(node, first=True)
        node.turn("recovering")

    def view_of(self, node: Node) -> View:
        seen, node.seen = node.seen, None
        return seen or self.store.view(node.next_round)

    def founding(self, node: Node) -> None:
        self.opening(node)

    def opening(self, node: Node) -> None:
        decide: Any = node.member.await_opening(node.next_round, self.elastic, start_deadline_s=self.start_deadline_s)
        self.take_opening(node, decide(self.view_of(node)))

    def take_opening(self, node: Node, decision: Opening | Wait) -> None:
        if isinstance(decision, Opening):
            node.opening = decision
            node.turn("reducing" if decision.round != FOUNDING_ROUND else "agreeing")

    def agreeing(self, node: Node) -> None:
        """The founders vote for the state that they hold; nothing is reduced."""
        assert node.opening is not None
        self.vote(node, node.state)

    def reducing(self, node: Node) -> None:
        assert node.opening is not None
        try:
            node.member.check(self.store.view(node.next_round), node.opening)
        except PeerLost as error:
            self.give_up(node, str(error))
            return
        entered = self.connect(node, node.opening)
        if set(entered) == set(node.opening.members):
            assert len(set(entered.values())) == 1, f"some have groups of epoch {node.opening.epoch}, others wait"
            self.reduce(node, hashed(node.opening))

    def connect(self, node: Node, opening: Opening) -> dict[str, bool]:
        """Have groups for the opening, as LaneGroups does; a group's keys in the store serve once."""
        entered = self.entered.setdefault(opening.version, {})
        member_id = node.member.member_id
        if member_id not in entered:
            entered[member_id] = node.group_epoch == opening.epoch
            if not entered[member_id]:
                assert (member_id, opening.epoch) not in self.built, f"{member_id} meets its own keys of {opening}"
                self.built.add((member_id, opening.epoch))
            node.group_epoch = opening.epoch
        return entered

    def give_up(self, node: Node, reason: str) -> None:
        assert node.opening is not None
        node.member.report_failure(node.opening, reason)
        node.group_epoch = None
        node.turn("entering" if node.is_joiner else "opening")

    def reduce(self, node: Node, digest: str) -> None:
        assert node.opening is not None
        self.connect(node, node.opening)
        self.vote(node, digest)

    def vote(self, node: Node, digest: str) -> None:
        assert node.opening is not None
        node.member.vote(node.opening, digest)
        progress = node.progress.after(node.opening, SHAPE)
        node.payload = {"progress": progress.to_record(), "state_before": node.state, "digest": digest}
        node.turn("committing")

    def committing(self, node: Node) -> None:
        assert node.opening is not None
        decide: Any = node.member.await_verdict(node.opening, node.payload)
        verdict = decide(self.view_of(node))
        if isinstance(verdict, Verdict):
            self.apply(node, verdict)

    def apply(self, node: Node, verdict: Verdict) -> None:
        assert verdict.digest == node.payload["digest"], "applies what it did not vote for"
        assert verdict.payload["state_before"] == node.state
        assert node.member.member_id in verdict.members
        node.round, node.is_joiner = verdict.round, False
        node.state = hashed(node.state, verdict.digest) if verdict.round != FOUNDING_ROUND else node.state
        node.progress = Progress.from_record(verdict.payload["progress"])
        seen = (verdict.version, verdict.digest, node.state)
        assert self.line.setdefault(verdict.round, seen) == seen, f"round {verdict.round} has two results"
        node.turn("training")

    def training(self, node: Node) -> None:
        assert node.progress.assigned[node.member.member_id], "a member has work"
        self.arrive(node, TOKENS)

    def arrive(self, node: Node, weight: int) -> None:
        node.member.announce_ready(Ready(node.next_round, weight, node.state))
        node.turn("opening")

    def recovering(self, node: Node) -> None:
        """Take over the state of a living member, as the join path does by fetching and replaying."""
        view = self.store.view(FOUNDING_ROUND)
        members = view.committed.members if view.committed is not None else ()
        donors = [
            d
            for d in self.nodes.values()
            if d is not node and d.member.member_id in members and d.round >= 0 and not d.is_joiner
        ]
        if donors:
            donor = max(donors, key=lambda d: d.round)
            node.round, node.state, node.progress = donor.round, donor.state, donor.progress
            node.is_joiner = True
            node.member.announce_ready(Ready(node.next_round, 0, node.state))
            node.turn("entering")

    def entering(self, node: Node) -> None:
        decide: Any = node.member.await_admission(node.next_round, self.elastic)
        decision = decide(self.view_of(node))
        if isinstance(decision, Verdict):
            node.turn("recovering")
        else:
            self.take_opening(node, decision)

    # -- what must hold -----------------------------------------------------------------------------------------

    @invariant()
    def history_is_one_exact_line(self) -> None:
        history = self.store.history()
        assert [v.round for v in history] == list(range(len(history)))
        versions = [v.version for v in history]
        assert versions == sorted(set(versions))
        for member, length in self.gone.items():
            assert all(member not in verdict.members for verdict in history[length:]), f"{member} was excluded"
        assert_every_sample_has_one_place(history)

    def teardown(self) -> None:
        self.committed_rounds_follow_again_once_faults_end()
        self.store.close()
        self.client.close()

    def committed_rounds_follow_again_once_faults_end(self) -> None:
        """No deadlock: whatever happened, those who live commit rounds together, all of them."""
        self.start_deadline_s = float("-inf")
        self.bury_the_dead()
        length = len(self.store.history())
        if not any(self.carries_on(node, length - 1) for node in self.nodes.values()):
            return
        for _ in range(60):
            for node in list(self.nodes.values()):
                self.renew(node)
                node.seen = None
                self.step(node)
        history = self.store.history()
        assert len(history) >= length + 5, [(n.member.member_id, n.phase, n.round) for n in self.nodes.values()]
        assert set(history[-1].members) == {n.member.member_id for n in self.nodes.values()}
        assert_every_sample_has_one_place(history)

    def carries_on(self, node: Node, newest_round: int) -> bool:
        """Whether a node can found the run, or hand its newest state to the others."""
        return not node.is_fenced and node.round >= newest_round and node.phase != "recovering"


def samples(ranges: Any) -> list[int]:
    return [index for start, stop in ranges for index in range(start, stop)]


def assert_every_sample_has_one_place(history: list[Verdict]) -> None:
    """Every index below the ledger's next was contributed once, or is assigned, or was given back."""
    places: list[int] = []
    before = Progress.at_start()
    for verdict in history:
        for member, weight in zip(verdict.members, verdict.weights, strict=True):
            if weight:
                places += samples(before.assigned[member])
        before = Progress.from_record(verdict.payload["progress"])
    for ranges in (*before.assigned.values(), before.ledger.returned):
        places += samples(ranges)
    assert sorted(places) == list(range(before.ledger.next))


def test_members_commit_one_line_of_rounds_whatever_happens(redis_url: str) -> None:
    Rounds.url = redis_url
    run_state_machine_as_test(
        Rounds,
        settings=settings(
            max_examples=60,
            stateful_step_count=25,
            phases=[Phase.generate],  # add Phase.shrink to understand a failure; it takes minutes
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
