"""A run of several nodes in one process, each of which does one thing when it is told to: the run under `test_rounds`.

Production decides (`Member`, the rules, the store); here is what comes before and after its decisions, as
`RoundRunner`, the transaction and the join path do it, with digests of words in place of tensors. Leases are as
long as a test never takes.
"""

from __future__ import annotations

import hashlib
import uuid
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import redis
from tests.memberships import a_member

from zeroband.data.ledger import SHARED, Range, take
from zeroband.elastic.membership.orders import resume
from zeroband.elastic.membership.progress import Progress, RunShape
from zeroband.elastic.membership.records import (
    BOOTSTRAP_ROUND,
    Attempt,
    Peer,
    Ready,
    RoundPlan,
    StoreTerm,
    Verdict,
    View,
)
from zeroband.elastic.membership.round_rules import Rules, Wait
from zeroband.elastic.rounds.member import Member
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.errors import Fenced, PeerLost
from zeroband.node.shared_flags import SharedFlags

LEASE_S = 1000.0
SHAPE = RunShape(total_steps=10_000, batch_size=3)
MOST_STEPS = 3


def hashed(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]


def up_to(most: int, *parts: object) -> int:
    """A number in 1..most that differs from node to node and round to round, the same in every repetition."""
    return 1 + int(hashed(*parts), 16) % most


class RecordingStore(RedisStore):
    """Keeps what was proposed, so that it can be proposed again, and delays it while it is told to."""

    def __init__(self, url: str, run_id: str) -> None:
        super().__init__(url, run_id, lease_s=LEASE_S, retry_s=5.0)
        self.proposed: list[tuple[RoundPlan, RoundPlan | None] | Verdict] = []
        self.on_the_way: list[tuple[RoundPlan, RoundPlan | None] | Verdict] = []
        self.is_slow = False
        self.newest_version = 0
        self.failed: set[str] = set()
        """Plans that somebody gave up, so that nobody may commit them."""

    def propose_plan(
        self,
        plan: RoundPlan,
        *,
        current: RoundPlan | None,
        generation: StoreTerm | None = None,
        heard: Attempt | None = None,
    ) -> bool:
        if self.is_slow:
            self.on_the_way.append((plan, current))
            return False
        self.proposed.append((plan, current))
        self.newest_version = max(self.newest_version, plan.version)
        return super().propose_plan(plan, current=current, generation=generation, heard=heard)

    def propose_verdict(self, verdict: Verdict, *, generation: StoreTerm | None = None) -> bool:
        if self.is_slow:
            self.on_the_way.append(verdict)
            return False
        self.proposed.append(verdict)
        return super().propose_verdict(verdict, generation=generation)

    def report_failure(self, plan: RoundPlan, reason: str) -> bool:
        is_failed = super().report_failure(plan, reason)
        if is_failed:
            self.failed.add(plan.id)
        return is_failed

    def propose(self, proposal: tuple[RoundPlan, RoundPlan | None] | Verdict) -> bool:
        if isinstance(proposal, Verdict):
            return self.propose_verdict(proposal)
        return self.propose_plan(proposal[0], current=proposal[1])

    def deliver(self) -> None:
        for proposal in self.on_the_way:
            self.propose(proposal)
        self.on_the_way = []


@dataclass
class Node:
    """A node between its calls. `phase` names what it does next."""

    slot: int
    member: Member
    flags: SharedFlags
    phase: str = "founding"
    round: int = -1
    state_digest: str = "initial"
    progress: Progress = field(default_factory=Progress.at_start)
    plan: RoundPlan | None = None
    group: tuple[int, tuple[str, ...]] | None = None
    """Epoch and members for which it has groups between nodes."""
    learned: tuple[Range, ...] = ()
    """Samples behind what it contributes."""
    steps: int = 0
    is_finite: bool = True
    is_joiner: bool = False
    is_fenced: bool = False
    is_leaving: bool = False
    is_faulty: bool = False
    """What it computes is wrong, to the end of the round."""
    seen: View | None = None
    """An older look at the store, on which it acts next."""
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def corpus(self) -> str:
        """Every other node has documents of its own."""
        return f"n{self.slot}/own" if self.slot % 2 else SHARED

    @property
    def id(self) -> str:
        return self.member.member_id

    @property
    def next_round(self) -> int:
        return self.round + 1

    @property
    def has_founded(self) -> bool:
        return self.round >= BOOTSTRAP_ROUND

    def turn(self, phase: str) -> None:
        self.phase, self.seen = phase, None


class Run:
    """The nodes by slot, the store between them, and what somebody has applied."""

    def __init__(self, url: str) -> None:
        self.opened = ExitStack()
        self.folder = Path(self.opened.enter_context(TemporaryDirectory()))
        self.store = self.opened.enter_context(closing(RecordingStore(url, uuid.uuid4().hex)))
        self.client = self.opened.enter_context(redis.Redis.from_url(url))
        self.shared = self.store.found_or_match({"model.d_model": "256"})
        self.start_is_over = False
        self.members = 0
        self.nodes: dict[int, Node] = {}
        self.cuts: set[tuple[int, int]] = set()
        """Slots (one, other) of which the first does not reach the second."""
        self.has_lost_data = False
        """The store did, at least once."""
        self.gone: dict[str, int] = {}
        """Members that may never commit again -> the newest version when they were excluded."""
        self.entered: dict[str, dict[str, bool]] = {}
        """RoundPlan -> member -> whether it came with groups that it had already."""
        self.built: set[tuple[str, int, tuple[str, ...]]] = set()
        self.line: list[Verdict] = []
        """The verdicts that somebody applied, by round."""
        self.states: list[str] = []
        """The state after each of them."""

    def close(self) -> None:
        self.opened.close()

    # -- what a node does ---------------------------------------------------------------------------------------

    def all_act(self) -> None:
        for node in list(self.nodes.values()):
            self.step(node)

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
        node = self.new_node(slot)
        self.renew(node, first=True)
        if self.store.view(BOOTSTRAP_ROUND).committed is not None:
            node.turn("recovering")
        else:
            self.announce(node)

    def new_node(self, slot: int) -> Node:
        """As another member; numbered, so that a failure comes again when it is looked into."""
        self.members += 1
        flags = SharedFlags(self.folder / f"n{slot}-{self.members}", create=True)
        member = a_member(self.store, f"n{slot}#{self.members}", flags, shared=self.shared, has_lease=False)
        self.opened.callback(flags.close)
        self.opened.callback(member.close)
        self.nodes[slot] = Node(slot, member, flags)
        return self.nodes[slot]

    def bury_the_dead(self) -> None:
        living = {node.id for node in self.nodes.values()}
        for member in self.store.view(BOOTSTRAP_ROUND).alive - living:
            self.store.expire_lease(member)

    def renew(self, node: Node, *, first: bool = False) -> None:
        cut_off = tuple(n.id for n in self.nodes.values() if (node.slot, n.slot) in self.cuts)
        peer = Peer(f"n{node.slot}", "host", 1, False, cut_off)
        if self.store.renew_lease(node.id, peer, first=first, listed_version=node.flags.listed_version) is None:
            node.is_fenced = True

    def renew_all(self) -> None:
        for node in self.nodes.values():
            self.renew(node)

    def step(self, node: Node, *, straggler_deadline_s: float | None = None) -> None:
        try:
            if node.is_fenced:
                raise Fenced("the lease was refused")
            if node.phase == "waiting":
                self.waiting(node, straggler_deadline_s)
            else:
                getattr(self, node.phase)(node)
        except PeerLost:
            node.group = None
            node.turn("waiting" if node.has_founded else "founding")
        except Fenced:
            if node.is_fenced or not (node.is_joiner or not node.has_founded):
                self.come_back(node)
            else:
                node.turn("waiting" if node.is_joiner else "recovering")

    def come_back(self, node: Node) -> None:
        self.store.release_lease(node.id)
        self.gone[node.id] = self.store.newest_version
        again = self.new_node(node.slot)
        self.renew(again, first=True)
        again.turn("recovering")

    def look(self, node: Node) -> View:
        seen, node.seen = node.seen, None
        return seen or node.member.look(node.next_round)

    def announce(self, node: Node) -> None:
        weight = 10 * node.steps if node.is_finite and not node.is_joiner else 0
        wants = 0 if node.is_leaving else up_to(MOST_STEPS, "wants", node.slot, node.next_round)
        ready = Ready(node.next_round, weight, node.state_digest, node.steps, wants, corpus=node.corpus)
        node.member.announce_ready(ready)

    def founding(self, node: Node) -> None:
        decision = self.turn_of(node)
        if isinstance(decision, Verdict):
            node.turn("recovering")
        elif isinstance(decision, RoundPlan):
            node.plan = decision
            self.vote(node, node.state_digest)

    def waiting(self, node: Node, straggler_deadline_s: float | None = None) -> None:
        decision = self.turn_of(node, straggler_deadline_s)
        if isinstance(decision, Verdict):
            self.catch_up(node, decision.round)
        elif isinstance(decision, RoundPlan):
            node.plan = decision
            node.turn("reducing")

    def turn_of(self, node: Node, straggler_deadline_s: float | None = None) -> RoundPlan | Verdict | Wait:
        is_member = node.has_founded and not node.is_joiner
        rules, deadline_s = Rules(1, 2, straggler_deadline_s), float("-inf" if self.start_is_over else "inf")
        rule = node.member.turn_rule(node.next_round, rules, is_member=is_member, start_deadline_s=deadline_s)
        return rule.decide(self.look(node))

    def catch_up(self, node: Node, round: int) -> None:
        """Replay what was committed without it, from the journal of one who has it."""
        if not any(other.round >= round and not other.is_joiner for other in self.nodes.values()):
            node.turn("recovering")
            if not node.is_joiner:
                raise Fenced("nobody keeps the rounds that it missed")
            return
        if node.state_digest != self.states[node.round]:
            assert self.has_lost_data and node.is_joiner, f"{node.id} replays on a state that is not the run's"
            node.turn("recovering")
            return
        node.round, node.state_digest = round, self.states[round]
        node.progress = Progress.from_record(self.line[round].record["progress"])
        if not node.is_joiner:
            assert node.progress.assigned[node.id] is not None, "a late member keeps its samples"
        self.announce(node)

    def reducing(self, node: Node) -> None:
        plan = node.plan
        assert plan is not None
        view = node.member.look(plan.round)
        if not view.can_finish(plan):
            self.give_up(node, "it cannot be finished")
            return
        entered = self.connect(node, plan)
        if set(entered) != set(plan.members) or self.is_held_up(plan, view):
            return
        if len(set(entered.values())) > 1:
            assert self.has_lost_data, f"some have groups of epoch {plan.epoch}, others wait for them"
            self.give_up(node, "the groups do not come together")
            return
        self.vote(node, hashed(plan.id, node.id if node.is_faulty else ""))

    def is_held_up(self, plan: RoundPlan, view: View) -> bool:
        """Whether a member that still reduces and another one do not reach each other."""
        slots = {n.slot: n.id in view.votes for n in self.nodes.values() if n.id in plan.members}
        return any((a, b) in self.cuts and not (slots[a] and slots[b]) for a in slots for b in slots)

    def connect(self, node: Node, plan: RoundPlan) -> dict[str, bool]:
        """Have groups for the plan, as LaneGroups does; a group's keys in the store serve once."""
        entered = self.entered.setdefault(plan.id, {})
        wanted = (plan.epoch, plan.members)
        if node.id not in entered:
            entered[node.id] = node.group == wanted
            if not entered[node.id]:
                assert (node.id, *wanted) not in self.built or self.has_lost_data, f"{node.id} meets its own keys"
                self.built.add((node.id, *wanted))
            node.group = wanted
        return entered

    def give_up(self, node: Node, reason: str) -> None:
        assert node.plan is not None
        node.member.report_failure(node.plan, reason)
        node.group = None
        node.turn("waiting")

    def vote(self, node: Node, digest: str) -> None:
        assert node.plan is not None
        begins = node.plan.round == BOOTSTRAP_ROUND
        progress = node.progress
        progress = progress.begin(node.plan, SHAPE, after_round=None) if begins else progress.after(node.plan, SHAPE)
        node.record = {"progress": progress.to_record(), "state_before": node.state_digest, "digest": digest}
        node.member.vote(node.plan, digest, node.record)
        node.turn("committing")

    def committing(self, node: Node) -> None:
        assert node.plan is not None
        verdict = node.member.verdict_rule(node.plan, node.record).decide(self.look(node))
        if isinstance(verdict, Verdict):
            self.apply(node, verdict)

    def apply(self, node: Node, verdict: Verdict) -> None:
        assert verdict.record == node.record, "applies what it did not vote for"
        round, is_last_here = verdict.round, verdict.plan.wanted()[node.id] == 0
        if node.id in verdict.plan.contributors():
            read, _ = take(node.progress.assigned[node.id], node.steps * SHAPE.batch_size)
            assert read == node.learned, "what it learned from is not what is counted"
        state = hashed(node.state_digest, verdict.digest) if round != BOOTSTRAP_ROUND else node.state_digest
        self.note(verdict, state)
        node.round, node.state_digest, node.is_joiner, node.is_faulty = round, state, False, False
        node.progress = Progress.from_record(verdict.record["progress"])
        node.learned, node.steps, node.is_finite = (), 0, True
        node.turn("training")
        if is_last_here:
            assert node.id not in node.progress.assigned
            del self.nodes[node.slot]
            self.store.release_lease(node.id)

    def note(self, verdict: Verdict, state: str) -> None:
        """Somebody applies a verdict: it is the one of its round, unless nobody is left who applied another."""
        round = verdict.round
        assert round <= len(self.line), f"round {round} follows on {len(self.line) - 1}"
        if round < len(self.line) and (self.line[round], self.states[round]) != (verdict, state):
            holders = [n.id for n in self.nodes.values() if n.round >= round and not n.is_joiner]
            assert not holders and self.has_lost_data, f"round {round} has two results; {holders} hold the other"
            del self.line[round:], self.states[round:]
        if round == len(self.line):
            assert verdict.plan.id not in self.store.failed or self.has_lost_data, "committed what somebody dropped"
            version = verdict.plan.version
            excluded = [m for m in verdict.members if self.gone.get(m, version) < version]
            assert not excluded, f"{excluded} were excluded before version {version}"
            self.line.append(verdict)
            self.states.append(state)

    def training(self, node: Node) -> None:
        assigned = node.progress.assigned[node.id]
        most = sum(stop - start for start, stop in assigned) // SHAPE.batch_size
        node.steps = up_to(most, "steps", node.slot, node.round)
        node.learned, _ = take(assigned, node.steps * SHAPE.batch_size)
        self.announce(node)
        node.turn("waiting")

    def recovering(self, node: Node) -> None:
        """Take over the state of a living member, as the join path does by fetching and replaying."""
        committed = self.store.view(BOOTSTRAP_ROUND).committed
        members = committed.members if committed is not None else ()
        donors = [d for d in self.nodes.values() if d.id in members and d.has_founded and not d.is_joiner]
        if donors:
            donor = max(donors, key=lambda d: d.round)
            node.round, node.state_digest, node.progress = donor.round, donor.state_digest, donor.progress
            node.is_joiner, node.steps = True, 0
            self.announce(node)
            node.turn("waiting")

    # -- what the store and the machines do ------------------------------------------------------------------------

    def after_a_loss(self, looks: list[int], later: list[int]) -> None:
        """The members' watchers look within a fraction of a lease; nothing is decided before a lease has passed."""
        self.has_lost_data = True
        for slot in looks:
            if slot in self.nodes:
                self.nodes[slot].member.look(BOOTSTRAP_ROUND)
        view = self.store.view(BOOTSTRAP_ROUND)
        if view.is_settling:
            self.act_in(later)
            after = self.store.view(BOOTSTRAP_ROUND)
            assert (after.plan, after.committed) == (view.plan, view.committed), "decided on half a record"
            self.settle()

    def set_clock_forward(self, ms: int) -> None:
        """Have so much of the store's time pass in which nobody renews."""
        for member in cast("list[bytes]", self.client.zrange(self.store.keys.leases, 0, -1)):
            self.client.zincrby(self.store.keys.leases, -ms, member)
        self.client.hincrby(self.store.keys.clock, "renewed_ms", -ms)

    def settle(self) -> None:
        """A lease passes, in which all who live renew theirs and look."""
        self.renew_all()
        for node in self.nodes.values():
            node.member.look(node.next_round)
        self.client.hset(self.store.keys.clock, "settling_until_ms", 0)

    # -- what must hold -----------------------------------------------------------------------------------------

    def assert_every_sample_has_one_place(self) -> None:
        """It was contributed once, or is assigned, or was given back."""
        places: dict[str, list[int]] = defaultdict(list)
        before = Progress.at_start()
        for verdict in self.line:
            for member, steps in verdict.plan.contributors().items():
                corpus = verdict.plan.corpus_of()[member]
                places[corpus] += samples(take(before.assigned[member], steps * SHAPE.batch_size)[0])
            before = Progress.from_record(verdict.record["progress"])
        assert set(places) <= set(before.ledgers)
        for corpus, ledger in before.ledgers.items():
            assert sorted([*places[corpus], *samples(ledger.owed)]) == list(range(ledger.next)), corpus

    def assert_history_is_in_order(self) -> None:
        if not self.has_lost_data:
            history = self.store.history()
            assert [v.round for v in history] == list(range(len(history)))
            assert history[: len(self.line)] == self.line and len(history) <= len(self.line) + 1
            versions = [v.plan.version for v in history]
            assert versions == sorted(set(versions))

    def assert_rounds_follow_again_once_faults_end(self) -> None:
        """No deadlock: whatever happened, those who live commit rounds; all of them together once links heal."""
        self.start_is_over = True
        self.store.give_orders(resume)
        for node in self.nodes.values():
            node.seen, node.is_leaving, node.is_faulty = None, node.is_leaving and node.phase != "training", False
        self.settle()
        self.bury_the_dead()
        if self.cuts:
            self.assert_rounds_follow()
            self.cuts.clear()
        if self.assert_rounds_follow():
            standing = [(n.id, n.phase, n.round) for n in self.nodes.values()]
            assert set(self.line[-1].members) == {n.id for n in self.nodes.values()}, standing

    def assert_rounds_follow(self) -> bool:
        """Everybody acts for long enough. False: the run may have ended with those who held it."""
        committed = self.store.view(BOOTSTRAP_ROUND).committed
        newest = -1 if committed is None else committed.round
        holders = [node for node in self.nodes.values() if self.holds_the_run(node, newest)]
        if all(n.is_leaving for n in [n for n in holders if not n.is_joiner] or holders):
            return False
        for _ in range(60):
            self.renew_all()
            self.all_act()
        self.assert_every_sample_has_one_place()
        standing = [(n.id, n.phase, n.round) for n in self.nodes.values()]
        assert len(self.line) >= newest + 6, standing
        return True

    def holds_the_run(self, node: Node, newest_round: int) -> bool:
        """Whether a node can found the run, or hand its newest state to the others."""
        return not node.is_fenced and node.round >= newest_round and node.phase != "recovering"


def samples(ranges: Any) -> list[int]:
    return [index for start, stop in ranges for index in range(start, stop)]
