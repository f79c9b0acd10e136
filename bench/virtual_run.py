"""A run in virtual time: the rules, the store and the ledger of production, with models in place of work and bytes.

One thread takes events in the order of their virtual times. What nodes decide, `membership.round_rules` decides from a
view of a store; what is read by whom, `membership.progress`. So thousands of rounds of a large run take seconds.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

from bench.virtual_models import EvenTimes, Phase, RunModel, fetch_s, transfer_s
from tests.memory_store import MemoryRecord, MemoryStore

from zeroband.data.ledger import SHARED
from zeroband.data.ledger import count as samples_in
from zeroband.elastic.membership.progress import Progress, RunShape, choose_claim, valid_claims
from zeroband.elastic.membership.records import (
    BOOTSTRAP_ROUND,
    Carried,
    Carry,
    Claim,
    Peer,
    Ready,
    RoundPlan,
    Verdict,
    View,
)
from zeroband.elastic.membership.round_rules import (
    ElapsedWaits,
    Rules,
    Wait,
    has_quorum,
    must_leave,
    next_plan,
    next_verdict,
)
from zeroband.elastic.rounds.background import LOOK_S

_FOREVER = 10**9
_LEASE_S = 1e9  # a lease ends here when the model says so
_ROUNDING_S = 1e-6
_APPLIED_S = 0.25
"""Until a node that waits for others to apply a round sees that they have, on average."""
_STUCK_S = 1e7
"""Without a round for so long, a run does not go on."""


@dataclass
class _Node:
    """A node, over all its memberships."""

    number: int
    lives: int = 0
    doing: str = "away"
    since_s: float = 0.0
    phase: Phase | None = None
    """It trains."""
    learned: int = 0
    """Inner steps behind it that it has not contributed yet."""
    offered: int = 0
    """Inner steps in what it contributed, until a round counts them."""
    longest: int = 0
    """Inner steps of the longest phase among those."""
    offer: tuple[int, float] = (0, 0.0)
    """For which round it made what it contributes, and when."""
    round: int = BOOTSTRAP_ROUND
    """That it contributed to last."""
    holds: int = BOOTSTRAP_ROUND
    """The newest round that its state holds."""
    is_pending: bool = False
    """It stands at the boundary of its round, or that is on its way; beside that it may train."""
    is_behind: bool = False
    """Its round was committed without it, which it answers at the end of its phase."""
    missed: int = 0
    """Rounds that went without what it contributed."""
    timed: int = BOOTSTRAP_ROUND
    """The newest round that it saw opened."""
    claim: tuple[int, Claim] | None = None
    """What it trains on that no round has dealt it, with the newest round when it joined."""
    is_member: bool = False
    plan: RoundPlan | None = None
    """Whose transfer it is in."""
    born_s: float = 0.0
    began_s: float = 0.0
    """When it last began to join."""
    link_part: float = 1.0
    """Part of its rate that its link has now."""
    is_leaving: bool = False
    """It was asked to leave."""

    @property
    def member_id(self) -> str:
        return f"node{self.number}#{self.lives}"


@dataclass
class SimulationResult:
    """What came of a run."""

    seconds: float = 0.0
    """Virtual time that it took."""
    rounds: int = 0
    tokens: int = 0
    """That count in committed rounds; of one node's inner step: 1."""
    trained: int = 0
    """Also those that never counted, since their node was lost."""
    possible: float = 0.0
    """Tokens that all nodes would have trained in that time, had none been lost and had they waited for nothing."""
    losses: int = 0
    joins: int = 0
    joined_s: list[float] = field(default_factory=list[float])
    """How long each of them took until it trained."""
    leaves: int = 0
    slow_links: int = 0
    store_losses: int = 0
    cuts: int = 0
    speakers_lost: int = 0
    """Nodes that were lost while they spoke for a site in a transfer."""
    wasted: int = 0
    """Trained by members that ended before it counted; its samples are dealt again."""
    wasted_s: float = 0.0
    """Seconds of nodes behind that."""
    late: int = 0
    """Contributions that counted in a later round than they were meant for."""
    reopened: int = 0
    """Plans beyond the first of a round."""
    spent_s: dict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    """Seconds of all nodes together, by what they did."""
    members: int = 0
    """Over all rounds."""
    weightless: int = 0
    """Those of them that brought nothing to their round."""

    @property
    def goodput(self) -> float:
        """Part of the possible tokens that count."""
        return self.tokens / self.possible if self.possible else 0.0

    @property
    def training(self) -> float:
        """Part of their time that nodes train, whatever counts of it later."""
        spent_s = sum(self.spent_s.values())
        return self.spent_s["training"] / spent_s if spent_s else 0.0


class VirtualRun:
    """One run. The same `seed` gives the same run."""

    def __init__(self, model: RunModel, *, seed: int = 0) -> None:
        self._model = model
        self._chance = random.Random(seed)
        self._lives_s, self._away_s = (
            EvenTimes(model.mtbf_s or math.inf, self._chance),
            EvenTimes(model.away_s, self._chance),
        )
        self._record = MemoryRecord()
        self._store = MemoryStore(self._record, lease_s=_LEASE_S)
        self._store.found_or_match({})
        self._begin_ms = self._record.now_ms
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._now_s = 0.0
        self._nodes = [_Node(number) for number in range(len(model.nodes))]
        self._store_back_s = 0.0
        """Until then the store is away."""
        self._apart: frozenset[int] = frozenset()
        """Nodes that are cut from all others."""
        self._outlasting: dict[str, list[Callable[[], None]]] = {}
        """What is to be done when the lease of a member has run out."""
        self._is_cut_seen = False
        self._applied = BOOTSTRAP_ROUND
        """The newest round that a node has applied: from then on it can be had of it."""
        self._catching_up: list[Callable[[], None]] = []
        """What nodes do once they can catch up."""
        self._counted = 0
        """Steps that counted, as their nodes know it."""
        self._calls = model.overlaps and model.inner_seconds is not None
        self._rules = Rules(
            min_nodes=model.min_nodes,
            start_nodes=len(model.nodes),
            straggler_deadline_s=model.straggler_s,
            straggler_grace=model.straggler_grace,
            transfer_bytes=model.encoded_bytes,
            sites="off" if model.sites is None else "named",
            hidden=float(model.overlaps),
            syncs_on_demand=self._calls,
        )
        self._settled_at_s = 0.0
        """When the last round was committed."""
        self._is_reached = False
        """A member stands at the boundary of the next round."""
        self._quorum_at_s: float | None = None
        """When a quorum of the next one was at the boundary."""
        self._shape = RunShape(total_steps=_FOREVER, batch_size=1, reads_ahead=model.overlaps)
        self._progress = Progress.at_start()
        self._found = SimulationResult()

    def play(self, rounds: int) -> SimulationResult:
        """Run until so many rounds are committed behind the founding. Raises RuntimeError where nothing goes on."""
        for node in self._nodes:
            self._start(node)
        while self._found.rounds < rounds:
            if not self._events:
                raise RuntimeError(f"nothing happens any more after {self._found.rounds} rounds, at {self._now_s:g} s")
            self._now_s, _, act = heapq.heappop(self._events)
            if self._now_s > self._settled_at_s + _STUCK_S:
                raise RuntimeError(f"no round after {self._found.rounds}, which ended at {self._settled_at_s:g} s")
            self._record.now_ms = self._record.pulse_ms = self._begin_ms + int(1000 * self._now_s)
            act()
        for node in self._nodes:
            self._stop_training(node)
            self._turn_to(node, node.doing)
        found = self._found
        found.seconds, found.tokens = self._now_s, self._progress.tokens
        found.possible = sum((self._now_s - n.born_s) / self._model.node(n.number).step_s for n in self._nodes)
        self._require_exact()
        return found

    def _require_exact(self) -> None:
        """Hold the ledger against what counted, and all that was trained against what became of it.

        Raises RuntimeError.
        """
        found, settled = self._found, samples_in(self._progress.ledgers[SHARED].settled)
        if not settled == self._progress.tokens == self._counted:
            raise RuntimeError(f"{settled} samples settled, {self._progress.tokens} trained, {self._counted} counted")
        held = sum(node.offered + node.learned for node in self._nodes)
        if found.trained != self._counted + found.wasted + held:
            raise RuntimeError(f"{found.trained} trained: {self._counted} counted, {found.wasted} wasted, {held} held")

    def lose_at(self, at_s: float, *nodes: int) -> None:
        """Have nodes be lost at this time, at once, whatever the model says of losses."""
        self._after(at_s - self._now_s, lambda: self._lose(*(self._nodes[node] for node in nodes)))

    def store_away_at(self, at_s: float, seconds: float) -> None:
        """Have the store be away for so long from this time on."""
        self._after(at_s - self._now_s, lambda: self._lose_store(seconds))

    def join_at(self, at_s: float, count: int) -> None:
        """Have so many new nodes join at this time."""
        self._after(at_s - self._now_s, lambda: self._join_many(count))

    # -- events ---------------------------------------------------------------------------------------------------

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now_s + seconds, next(self._order), act))

    def _in_this_life(self, node: _Node, act: Callable[[_Node], None]) -> Callable[[], None]:
        """What a node does later, unless it is lost before."""
        life = node.lives

        def act_if_alive() -> None:
            if node.lives == life and node.doing != "away":
                act(node)

        return act_if_alive

    def _is_put_off(self, act: Callable[[], None], later_s: float = 0.0) -> bool:
        """Whether the store is away; then `act` comes so much later than it is back."""
        is_away = self._now_s < self._store_back_s
        if is_away:
            self._after(self._store_back_s - self._now_s + later_s, act)
        return is_away

    def _turn_to(self, node: _Node, doing: str) -> None:
        self._found.spent_s[node.doing] += self._now_s - node.since_s
        node.doing, node.since_s = doing, self._now_s

    # -- one node -------------------------------------------------------------------------------------------------

    def _start(self, node: _Node) -> None:
        """Become another member: found the run, or fetch its state."""
        self._forget_work(node)
        earlier = node.member_id
        node.lives += 1
        node.is_member = node.is_pending = node.is_behind = node.is_leaving = False
        node.claim, node.missed, node.plan, node.began_s = None, 0, None, self._now_s
        if self._model.mtbf_s is not None:
            self._after(self._lives_s.draw(), self._in_this_life(node, self._lose))
        if (leaves_s := self._model.chaos.leave_every_s) is not None:
            self._after(self._chance.expovariate(1 / leaves_s), self._in_this_life(node, self._ask_to_leave))
        self._turn_to(node, "joining")
        self._take_lease(node, earlier)

    def _forget_work(self, node: _Node) -> None:
        """What it learned and no round counted goes back to the run."""
        self._stop_training(node)
        lost = node.offered + node.learned
        self._found.wasted += lost
        self._found.wasted_s += lost * self._model.node(node.number).step_s
        node.offered = node.learned = node.longest = 0

    def _take_lease(self, node: _Node, earlier: str = "") -> None:
        """Come in, once the lease of its earlier life has run out; who is cut from the others, as soon as it is not."""
        if node.number in self._apart or self._is_put_off(self._in_this_life(node, self._take_lease)):
            return
        if node.member_id in self._record.leases:  # it was put off, and the cut healed
            return
        if earlier in self._record.leases:
            self._outlasting.setdefault(earlier, []).append(self._in_this_life(node, self._take_lease))
            return
        self._store.renew_lease(node.member_id, self._peer(node), first=True)
        if self._record.committed is None:
            node.round, node.is_pending = BOOTSTRAP_ROUND, True
            self._turn_to(node, "waiting")
            self._announce(node)
            return
        joining = sum(other.doing == "joining" for other in self._nodes)
        donors = sum(self._mbit(other) for other in self._nodes if other.is_member and other.doing != "away")
        mbit = min(self._mbit(node), donors / joining) if donors else self._mbit(node)
        self._after(fetch_s(self._model, mbit), self._in_this_life(node, self._has_fetched))

    def _mbit(self, node: _Node) -> int:
        return max(1, round(node.link_part * self._model.node(node.number).mbit_s))

    def _peer(self, node: _Node) -> Peer:
        """What a node tells of itself: also whom it does not reach, when that is seen."""
        is_cut = self._is_cut_seen and node.number in self._apart
        others = [n.member_id for n in self._nodes if n.number not in self._apart and n.doing != "away"]
        return Peer(node.member_id, "", 1, True, tuple(others) if is_cut else ())

    def _has_fetched(self, node: _Node) -> None:
        """It claims samples, and trains at once."""
        if self._is_put_off(self._in_this_life(node, self._has_fetched)):
            return
        committed = self._record.committed
        assert committed is not None, "it fetched what was committed"
        ledgers = self._progress.ledgers
        held = max((samples_in(spans) for spans in self._progress.assigned.values()), default=0)
        samples = max(held, self._wanted_steps(node))

        def choose(others: Mapping[str, Claim]) -> Claim:
            return choose_claim(ledgers, SHARED, samples, others)

        node.holds, node.claim = committed.round, (committed.round, self._store.claim_samples(node.member_id, choose))
        self._found.joins += 1
        self._found.joined_s.append(self._now_s - node.began_s)
        self._begin_phase(node)
        self._watch(node)

    def _wanted_steps(self, node: _Node) -> int:
        """Inner steps for which it asks samples: of two phases where it trains while its round travels."""
        wanted = self._model.wanted_steps(self._model.node(node.number).step_s)
        return wanted * (2 if self._model.overlaps else 1)

    def _lose(self, *nodes: _Node) -> None:
        """Their machines are gone at once: others know it when their leases have run out."""
        self._found.losses += len(nodes)
        lost = [node.member_id for node in nodes]
        for node in nodes:
            spoken = () if node.plan is None else node.plan.speakers().values()
            self._found.speakers_lost += node.member_id in spoken
            self._go_away(node, self._away_s.draw())
        self._after(self._model.detect_s, lambda: self._expire(*lost))

    def _go_away(self, node: _Node, seconds: float) -> None:
        self._stop_training(node)
        self._turn_to(node, "away")
        life = node.lives
        self._after(seconds, lambda: self._start(node) if node.lives == life else None)

    def _expire(self, *member_ids: str) -> None:
        """They are known to be gone; while the store is away its time stands still."""
        if self._is_put_off(lambda: self._expire(*member_ids), self._model.detect_s):
            return
        for member_id in member_ids:
            self._release(member_id)
        self._give_up_if_lost()
        self._look()

    def _release(self, member_id: str) -> None:
        self._store.release_lease(member_id)
        for come_in in self._outlasting.pop(member_id, ()):
            self._after(0.0, come_in)

    def _give_up_if_lost(self) -> None:
        plan = self._record.plan
        if plan is not None and self._store.view(plan.round).lost(plan):
            self._give_up(plan, "members are lost")

    def _give_up(self, plan: RoundPlan, reason: str) -> None:
        if self._store.report_failure(plan, reason):
            for node in self._nodes:
                if node.plan != plan or node.doing == "away":
                    continue
                node.plan = None
                if node.phase is None:
                    self._turn_to(node, "retrying")

    # -- a phase of inner steps -----------------------------------------------------------------------------------

    def _held(self, node: _Node) -> int:
        """Inner steps for which it holds samples, with those behind it that no round has counted."""
        if node.claim is not None:
            start, stop = node.claim[1].span
            return stop - start
        return samples_in(self._progress.assigned.get(node.member_id, ()))

    def _left(self, node: _Node) -> int:
        """Inner steps for which it holds samples."""
        return self._held(node) - node.offered - node.learned

    def _begin_phase(self, node: _Node) -> None:
        model = self._model
        step_s = model.node(node.number).step_s * (1 + self._chance.uniform(-model.jitter, model.jitter))
        most = min(self._left(node), model.inner_steps)
        if most < 1:
            raise RuntimeError(f"{node.member_id} has no samples for a phase behind round {node.holds}")
        node.phase = phase = Phase(self._now_s, step_s, most)
        self._turn_to(node, "training")
        seconds = phase.time_of(self._due_steps(node, phase)) - self._now_s
        if model.freeze_every_s is not None and self._chance.random() < seconds / model.freeze_every_s:
            phase.stands_at_s = self._now_s + self._chance.uniform(0.0, seconds)
            phase.stands_s = self._chance.expovariate(1 / model.freeze_s)
            if phase.stands_s > model.detect_s:
                self._after(phase.stands_at_s - self._now_s, lambda: self._freeze_for_long(node, phase))
        self._plan_end(node)

    def _freeze_for_long(self, node: _Node, phase: Phase) -> None:
        """It is lost to the others, and finds that out when it goes on."""
        if node.phase is phase:
            member_id, seconds, phase.stands_s = node.member_id, phase.stands_s, 0.0
            self._go_away(node, seconds)
            self._after(self._model.detect_s, lambda: self._expire(member_id))

    def _due_steps(self, node: _Node, phase: Phase) -> int:
        """With which inner step its phase ends, as far as it knows now."""
        if node.is_leaving or phase.is_called:
            due = phase.steps_at(self._now_s) + 1
        elif self._model.inner_seconds is None:
            due = self._model.inner_steps
        else:
            due = phase.steps_until(phase.clock_s + self._model.inner_seconds)
        return min(phase.most, max(due, phase.steps_at(self._now_s) + 1))

    def _plan_end(self, node: _Node) -> None:
        """Have its phase end when that is due; what was planned before is void."""
        phase = node.phase
        assert phase is not None, "it trains"
        steps = self._due_steps(node, phase)
        phase.plan += 1
        plan = phase.plan

        def end() -> None:
            if node.phase is phase and phase.plan == plan:
                self._end_phase(node, steps)

        self._after(phase.time_of(steps) - self._now_s, end)

    def _end_phase(self, node: _Node, steps: int) -> None:
        if node.phase is not None and node.phase.is_called and not self._is_reached:  # it comes too late
            node.phase.is_called = False
            self._plan_end(node)
            return
        self._stop_training(node, steps)
        if node.is_pending:
            self._turn_to(node, "waiting" if node.plan is None else "transferring")
        else:
            self._go_on(node)

    def _stop_training(self, node: _Node, steps: int | None = None) -> None:
        """`steps`: that it made; None: as many as it has made by now."""
        phase = node.phase
        if phase is None:
            return
        self._turn_to(node, node.doing)
        made, stood_s = phase.steps_at(self._now_s) if steps is None else steps, phase.stood_s(self._now_s)
        self._found.spent_s["training"] -= stood_s
        self._found.spent_s["frozen"] += stood_s
        self._found.trained += made
        node.learned, node.longest, node.phase = node.learned + made, max(node.longest, made), None

    def _go_on(self, node: _Node) -> None:
        """Contribute what it learned, with what a round went without; where there is nothing, train."""
        if (node.is_behind or node.claim is not None) and not self._can_catch_up(node):
            return
        if node.is_behind:
            self._catch_up(node)
        self._note_applied(node)
        if node.learned:
            self._contribute(node, may_train_on=node.missed > 0)
        elif node.is_leaving:
            self._leave(node)
        else:
            self._begin_phase(node)

    def _can_catch_up(self, node: _Node) -> bool:
        """Whether members have applied the newest round, so that it can be had of them; else it waits for that."""
        committed = self._record.committed
        assert committed is not None, "it is in a run"
        if committed.round <= max(self._applied, node.holds):
            return True
        self._turn_to(node, "waiting")
        self._catching_up.append(self._in_this_life(node, self._go_on))
        return False

    def _note_applied(self, node: _Node) -> None:
        """It has applied the rounds that it was in; those who wait for that see it a moment later."""
        if node.holds > self._applied:
            self._applied, waiting = node.holds, self._catching_up
            self._catching_up = []
            for go_on in waiting:
                self._after(_APPLIED_S, go_on)

    def _catch_up(self, node: _Node) -> None:
        """Its state is the newest again; what it offered in vain is part of what it contributes next."""
        committed = self._record.committed
        assert committed is not None, "it was in a run"
        node.holds, node.is_behind = committed.round, False
        node.learned, node.offered = node.learned + node.offered, 0

    def _contribute(self, node: _Node, *, may_train_on: bool) -> None:
        """Stand at the boundary of the next round. It trains on where rounds travel, or where it is late."""
        if node.claim is not None and not self._follow(node):
            return
        node.round, node.is_pending = node.holds + 1, True
        node.offered, node.learned, node.offer = node.learned, 0, (node.round, self._now_s)
        trains_on = self._model.overlaps or may_train_on or self._is_slow(node)
        if trains_on and self._left(node) >= 1 and not node.is_leaving:
            self._begin_phase(node)
        else:
            self._turn_to(node, "waiting")
        self._announce(node)

    def _follow(self, node: _Node) -> bool:
        """Catch up as a joiner. Whether its claim was dealt or stands: else it begins again."""
        committed = self._record.committed
        assert committed is not None, "it joined a run"
        node.holds = committed.round
        self._settle_claim(node)
        is_void = bool(claim := self._claim_of(node)) and not valid_claims(self._progress.ledgers, claim)
        if is_void:
            self._begin_again(node)
        return not is_void

    def _claim_of(self, node: _Node) -> dict[str, Claim]:
        """What a node claimed and no round has dealt it, by its name; nothing of others."""
        return {} if node.claim is None else {node.member_id: node.claim[1]}

    def _settle_claim(self, node: _Node) -> None:
        """A round that lists it has dealt it what it claimed."""
        committed = self._record.committed
        if node.claim is None or committed is None or committed.round <= node.claim[0]:
            return
        if node.member_id in (*committed.members, *committed.plan.late):
            node.claim = None

    def _begin_again(self, node: _Node) -> None:
        self._release(node.member_id)
        self._start(node)

    def _is_slow(self, node: _Node) -> bool:
        """Whether the newest plan has another member carry what it contributes."""
        plan = self._record.plan
        return plan is not None and any(carried.member == node.member_id for carried in plan.carried)

    def _watch(self, node: _Node) -> None:
        """It trains, and no round waits for it: it sees when the others stand at the boundary, and joins them."""
        if self._is_reached:
            self._after(self._chance.uniform(0.0, LOOK_S), self._in_this_life(node, self._call))

    def _call(self, node: _Node) -> None:
        """Its phase ends with the step that it makes: a quorum stands at the boundary of the next round."""
        if self._calls and self._is_reached and node.phase is not None and not node.is_pending:
            node.phase.is_called = True
            self._plan_end(node)

    # -- the boundary of a round ----------------------------------------------------------------------------------

    def _announce(self, node: _Node) -> None:
        """Say what it contributes to its round."""
        if not node.is_pending or self._is_put_off(self._in_this_life(node, self._announce)):
            return
        committed = self._record.committed
        state = "initial" if committed is None else committed.digest
        is_carried = node.offer[0] != node.round
        self._settle_claim(node)
        ready = Ready(
            node.round,
            node.offered,
            f"{state}, behind" if is_carried else state,
            steps=node.offered,
            steps_requested=0 if node.is_leaving else self._wanted_steps(node),
            phase_steps=node.longest if node.longest < node.offered else None,
            rate=self._mbit(node),
            largest=1.0,
            offer=self._offer_of(node),
            carries=self._carried_by(node),
            claim=None if node.claim is None else node.claim[1],
            site=None if self._model.sites is None else f"site{node.number % self._model.sites}",
        )
        self._store.announce_ready(node.member_id, ready)
        self._decide(node)

    def _offer_of(self, node: _Node) -> str | None:
        """What it says that its carrier can fetch: nothing yet, where no plan lists it as carried."""
        if not node.is_member or self._model.overlaps:
            return None
        return _offer(node) if self._is_slow(node) else ""

    def _carried_by(self, node: _Node) -> tuple[Carry, ...]:
        """What it holds whole of members with slow links, whose contributions travel from when they are made."""
        plan, found = self._record.plan, list[Carry]()
        mine = {c.member for c in plan.carried if c.carrier == node.member_id} if plan is not None else set[str]()
        for other in self._nodes if mine else ():
            travels_s = self._model.encoded_bytes * 8e-6 / self._mbit(other)
            is_here = other.doing != "away" and other.offered > 0 and self._now_s - other.offer[1] >= travels_s
            if other.member_id in mine and is_here:
                found.append(Carry(other.member_id, _offer(other), 1.0))
        return tuple(found)

    @property
    def _phase_s(self) -> float:
        """From the last verdict until a quorum was at the boundary; 0: none is."""
        return 0.0 if self._quorum_at_s is None else self._quorum_at_s - self._settled_at_s

    @property
    def _waits(self) -> ElapsedWaits:
        waited_s = 0.0 if self._quorum_at_s is None else self._now_s - self._quorum_at_s
        is_over = (
            self._quorum_at_s is not None and waited_s >= self._rules.straggler_wait_s(self._phase_s) - _ROUNDING_S
        )
        return ElapsedWaits(stragglers_are_late=is_over, phase_s=self._phase_s)

    def _note_quorum(self, view: View, round: int) -> None:
        """From when a quorum stands at the boundary, the others are waited for so long, and called."""
        committed = self._record.committed
        is_next = committed is not None and committed.round + 1 == round
        if is_next and not self._is_reached:
            self._is_reached = True
            for node in self._nodes:
                if node.phase is not None and not node.is_pending:
                    self._watch(node)
        if not is_next or self._quorum_at_s is not None or not has_quorum(view, self._rules):
            return
        self._quorum_at_s = self._now_s
        straggler_wait_s = self._rules.straggler_wait_s(self._phase_s)
        if straggler_wait_s < math.inf:
            self._after(straggler_wait_s, lambda: self._stop_waiting(round))

    def _stop_waiting(self, round: int) -> None:
        if self._is_put_off(lambda: self._stop_waiting(round)):
            return
        committed = self._record.committed
        if committed is not None and committed.round + 1 == round:
            self._look()

    def _look(self) -> None:
        """Have the first that waits see whether something is to be proposed."""
        for node in self._at_boundary():
            if self._decide(node):
                return

    def _at_boundary(self) -> list[_Node]:
        """Nodes that wait for a round to be opened to them."""
        return [n for n in self._nodes if n.is_pending and n.plan is None and n.doing != "away"]

    def _decide(self, node: _Node) -> bool:
        """What a node that waits makes of the store. Whether it opened a round."""
        view = self._store.view(node.round)
        self._settle_claim(node)
        claim = None if node.claim is None else node.claim[1]
        if node.round != BOOTSTRAP_ROUND and must_leave(view, node.member_id, node.round, claim) is not None:
            self._begin_again(node)
            return False
        if view.committed is not None and view.committed.round >= node.round:
            self._miss(node, view.committed)
            return False
        self._note_quorum(view, node.round)
        decision = next_plan(view, node.round, self._rules, self._waits, claims=self._store.claims)
        if isinstance(decision, Wait) or decision == view.plan:  # it is open to others
            return False
        if not self._store.propose_plan(decision, current=view.plan):
            return False
        self._found.reopened += view.plan is not None and view.plan.round == decision.round
        self._begin(decision)
        return True

    def _miss(self, node: _Node, committed: Verdict) -> None:
        """The round was committed without it: its carrier has what it offers, or that is part of its next."""
        node.missed += bool(node.offered)
        if self._is_slow(node) and _offer(node):
            node.round = committed.round + 1
            self._announce(node)
        elif node.phase is None:
            self._catch_up(node)
            self._contribute(node, may_train_on=True)
        else:
            node.is_pending, node.is_behind = False, True
            self._watch(node)
            self._plan_end(node)

    # -- one round ------------------------------------------------------------------------------------------------

    def _begin(self, plan: RoundPlan) -> None:
        """Its members transfer."""
        by_id = {node.member_id: node for node in self._nodes if node.doing != "away"}
        members = [by_id[member] for member in plan.members if member in by_id]
        for node in members:
            node.plan = plan
            if node.phase is None:
                self._turn_to(node, "transferring")
            elif node.timed != plan.round:  # its phase counts its time from here, as those of the others
                node.timed, node.phase.clock_s = plan.round, self._now_s
                self._plan_end(node)
        seconds = self._model.agreement_s
        if plan.round != BOOTSTRAP_ROUND:
            speaking = {*plan.speakers().values()} or {*plan.members}
            seconds += transfer_s(self._model, [self._mbit(n) for n in members if n.member_id in speaking])
        self._after(seconds, lambda: self._end(plan, members))

    def _end(self, plan: RoundPlan, members: list[_Node]) -> None:
        """The members that are still there vote; the last one commits the round, if all have."""
        if self._record.plan != plan or plan in self._record.failed:
            return
        if len({node.number in self._apart for node in members}) > 1:  # it stands still
            self._after(self._model.detect_s, lambda: self._end(plan, members))
            return
        if self._is_put_off(lambda: self._end(plan, members)):
            return
        for node in members:
            if node.plan == plan and node.doing != "away":
                self._store.vote(plan, node.member_id, f"state {plan.round}")
        verdict = next_verdict(self._store.view(plan.round), plan, {})
        if not isinstance(verdict, Verdict):
            return
        if plan.round == BOOTSTRAP_ROUND:
            progress = self._progress.begin(plan, self._shape, after_round=None)
        else:
            progress = self._progress.after(plan, self._shape)
        verdict = replace(verdict, record=_Record(progress))
        if self._store.propose_verdict(verdict):
            self._progress = progress
            self._commit(verdict, members)

    def _count_carried(self, carried: Carried, round: int) -> None:
        """What a node contributed counted without it: it trains on. One that was lost since is another member now."""
        self._counted += carried.steps
        self._found.late += 1
        node = next((n for n in self._nodes if n.member_id == carried.member), None)
        if node is None:
            self._found.wasted -= carried.steps
            return
        self._settle(node, round)

    def _settle(self, node: _Node, round: int) -> None:
        """What it contributed counted in this round."""
        node.offered, node.longest, node.missed, node.holds = 0, 0, 0, round
        node.plan, node.is_pending = None, False
        if node.doing == "away":
            return
        if node.phase is None:
            self._go_on(node)

    def _commit(self, verdict: Verdict, members: list[_Node]) -> None:
        plan = verdict.plan
        self._settled_at_s, self._quorum_at_s, self._is_reached = self._now_s, None, False
        if plan.round == BOOTSTRAP_ROUND:
            self._begin_chaos()
        else:
            self._found.rounds += 1
            self._found.members += len(plan.members)
            self._found.weightless += plan.weights.count(0)
        self._forget_rounds_before(plan.round)
        for carried in plan.counted:
            self._count_carried(carried, plan.round)
        for node in members:
            if node.plan == plan:
                self._counted += node.offered
                self._found.late += node.missed > 0
                node.is_member, node.claim = True, None
                self._settle(node, plan.round)
        self._look_again()

    def _look_again(self) -> None:
        """Those who wait for a round that is over now, and those who came to the next one before it was."""
        for node in self._at_boundary():
            if node.is_pending and node.plan is None:
                self._decide(node)

    def _forget_rounds_before(self, round: int) -> None:
        """A run may be longer than memory."""
        record = self._record
        for old in [number for number in record.ready if number < round]:
            del record.ready[old]
        for gone in record.claims.keys() - record.leases.keys():
            del record.claims[gone]
        record.votes.clear()
        record.failed.clear()
        record.plans.clear()
        record.verdicts.clear()

    # -- chaos ----------------------------------------------------------------------------------------------------

    def _begin_chaos(self) -> None:
        chaos = self._model.chaos
        self._recur(chaos.store_every_s, lambda: self._lose_store(self._chance.expovariate(1 / chaos.store_away_s)))
        self._recur(chaos.cut_every_s, self._cut)
        self._recur(chaos.crowd_loss_every_s, lambda: self._lose(*self._some(chaos.crowd_loss_part)))
        self._recur(chaos.crowd_join_every_s, lambda: self._join_many(chaos.crowd_join_nodes))
        for node in self._nodes:
            self._recur(chaos.slow_link_every_s, partial(self._slow_down, node))

    def _recur(self, every_s: float | None, strike: Callable[[], None]) -> None:
        """Have something happen again and again."""
        if every_s is None:
            return

        def happen() -> None:
            strike()
            self._recur(every_s, strike)

        self._after(self._chance.expovariate(1 / every_s), happen)

    def _some(self, part: float) -> list[_Node]:
        there = [node for node in self._nodes if node.doing != "away"]
        return self._chance.sample(there, int(part * len(there)))

    def _lose_store(self, away_s: float) -> None:
        """Members wait at their boundaries and votes; what the store holds stays."""
        self._found.store_losses += 1
        self._store_back_s = max(self._store_back_s, self._now_s + away_s)

    def _slow_down(self, node: _Node) -> None:
        """Its link is slow for a time; a transfer that is on its way ends as it began."""
        chaos = self._model.chaos
        self._found.slow_links += 1
        node.link_part = chaos.slow_link_part

        def recover() -> None:
            node.link_part = 1.0

        self._after(self._chance.expovariate(1 / chaos.slow_link_s), recover)

    def _cut(self) -> None:
        """Some nodes and the others do not reach one another for a time."""
        apart = frozenset(node.number for node in self._some(self._model.chaos.cut_part))
        if self._apart or not apart:
            return
        self._found.cuts += 1
        self._apart, lasts_s = apart, self._chance.expovariate(1 / self._model.chaos.cut_s)
        if lasts_s > self._model.detect_s:
            self._after(self._model.detect_s, self._tell_cut)
        self._after(lasts_s, self._heal)

    def _tell_cut(self) -> None:
        """Those apart say whom they do not reach, or that they reach all again."""
        self._is_cut_seen = bool(self._apart)
        if self._is_put_off(self._tell_cut):
            return
        for node in self._nodes:
            if node.doing != "away" and node.member_id in self._record.leases:
                self._store.renew_lease(node.member_id, self._peer(node))
        self._give_up_if_lost()
        self._look()

    def _heal(self) -> None:
        kept_out = [n for n in self._nodes if n.number in self._apart and n.doing == "joining"]
        self._apart = frozenset()
        self._tell_cut()
        for node in kept_out:
            if node.member_id not in self._record.leases:
                self._take_lease(node)

    def _ask_to_leave(self, node: _Node) -> None:
        """It ends its phase early, and hands over what it learned if the others are there in time."""
        self._found.leaves += 1
        node.is_leaving = True
        if node.phase is not None:
            self._plan_end(node)
        grace_s = 0.0 if node.doing == "joining" else self._model.chaos.grace_s
        self._after(grace_s, self._in_this_life(node, self._leave))

    def _leave(self, node: _Node) -> None:
        self._go_away(node, self._chance.expovariate(1 / self._model.away_s))
        self._expire(node.member_id)

    def _join_many(self, count: int) -> None:
        """New nodes, all at once."""
        fresh = [_Node(len(self._nodes) + more, since_s=self._now_s, born_s=self._now_s) for more in range(count)]
        self._nodes += fresh
        for node in fresh:
            node.doing = "joining"
        for node in fresh:
            self._start(node)
            self._recur(self._model.chaos.slow_link_every_s, partial(self._slow_down, node))


class _Record(dict[str, Any]):
    """What a verdict records. Its progress is written out when it is asked for: it has ranges of all nodes."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def __missing__(self, key: str) -> Any:
        if key != "progress":
            raise KeyError(key)
        self[key] = self._progress.to_record()
        return self[key]


def _offer(node: _Node) -> str:
    """What names a node's contribution; empty where it has none."""
    return f"{node.offer[0]}-{node.number}" if node.offered else ""
