"""A run in virtual time: the rules, the store and the ledger of production, with models in place of work and bytes.

One thread takes events in the order of their virtual times. What nodes decide, `membership.epoch` decides from a view
of a store; what is read by whom, `membership.progress`. So thousands of rounds of a large run take seconds.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from zeroband.data.ledger import SHARED
from zeroband.data.ledger import count as samples_in
from zeroband.elastic.membership.epoch import Patience, Rules, Wait, has_quorum, must_leave, next_opening, next_verdict
from zeroband.elastic.membership.progress import Progress, RunShape
from zeroband.elastic.membership.records import FOUNDING_ROUND, Opening, Peer, Ready, Verdict
from zeroband.tools.virtual.memory_store import MemoryRecord, MemoryStore
from zeroband.tools.virtual.models import RunModel, fetch_s, transfer_s

_FOREVER = 10**9
_LEASE_S = 1e9  # a lease ends here when the model says so
_ROUNDING_S = 1e-6


@dataclass
class _Node:
    """A node, over all its memberships."""

    number: int
    lives: int = 0
    doing: str = "away"
    since_s: float = 0.0
    round: int = FOUNDING_ROUND
    """That it takes part in next."""
    steps: int = 0
    """Inner steps since it said last what it contributes."""
    contributed: int = 0
    """Inner steps behind what it said, until they count: where it was late, they do in a later round."""
    missed: int = 0
    """Rounds that went without what it said."""
    is_training: bool = False
    is_member: bool = False
    is_at_boundary: bool = False
    """It has said what it contributes to its round, which is not over."""
    opening: Opening | None = None
    """Whose transfer it is in."""

    @property
    def member_id(self) -> str:
        return f"node{self.number}#{self.lives}"


@dataclass
class Found:
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
    late: int = 0
    """Contributions that counted in a later round than they were meant for."""
    reopened: int = 0
    """Openings beyond the first of a round."""
    spent_s: dict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    """Seconds of all nodes together, by what they did."""
    members: int = 0
    """Over all rounds."""

    @property
    def goodput(self) -> float:
        """Part of the possible tokens that count."""
        return self.tokens / self.possible if self.possible else 0.0


class VirtualRun:
    """One run. The same `seed` gives the same run."""

    def __init__(self, model: RunModel, *, seed: int = 0) -> None:
        self._model = model
        self._chance = random.Random(seed)
        self._record = MemoryRecord()
        self._store = MemoryStore(self._record, lease_s=_LEASE_S)
        self._store.found_or_match({})
        self._begin_ms = self._record.now_ms
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._now_s = 0.0
        self._nodes = [_Node(number) for number in range(len(model.nodes))]
        self._rules = Rules(
            min_nodes=model.min_nodes,
            start_nodes=len(model.nodes),
            straggler_deadline_s=model.straggler_s,
            straggler_grace=model.straggler_grace,
            transfer_bytes=model.encoded_bytes,
            hidden=float(model.overlaps),
        )
        self._settled_at_s = 0.0
        """When the last round was committed."""
        self._quorum_at_s: float | None = None
        """When a quorum of the next one was at the boundary."""
        self._shape = RunShape(total_steps=_FOREVER, batch_size=1, reads_ahead=model.overlaps)
        self._progress = Progress.at_start()
        self._found = Found()

    def play(self, rounds: int) -> Found:
        """Run until so many rounds are committed behind the founding. Raises RuntimeError where nothing goes on."""
        for node in self._nodes:
            self._start(node)
        while self._found.rounds < rounds:
            if not self._events:
                raise RuntimeError(f"nothing happens any more after {self._found.rounds} rounds, at {self._now_s:g} s")
            self._now_s, _, act = heapq.heappop(self._events)
            self._record.now_ms = self._record.pulse_ms = self._begin_ms + int(1000 * self._now_s)
            act()
        for node in self._nodes:
            self._turn_to(node, node.doing)
        found = self._found
        found.seconds, found.tokens = self._now_s, self._progress.tokens
        found.possible = sum(self._now_s / node.step_s for node in self._model.nodes)
        self._require_exact()
        return found

    def _require_exact(self) -> None:
        """Hold the ledger against what counted. Raises RuntimeError."""
        ledger = self._progress.ledgers[SHARED]
        if samples_in(ledger.settled) != self._progress.tokens:
            raise RuntimeError(f"{samples_in(ledger.settled)} samples settled, {self._progress.tokens} trained")

    def lose_at(self, node: int, at_s: float) -> None:
        """Have a node be lost at this time, whatever the model says of losses."""
        self._after(at_s - self._now_s, lambda: self._lose(self._nodes[node]))

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

    def _turn_to(self, node: _Node, doing: str) -> None:
        self._found.spent_s[node.doing] += self._now_s - node.since_s
        node.doing, node.since_s = doing, self._now_s

    # -- one node -------------------------------------------------------------------------------------------------

    def _start(self, node: _Node) -> None:
        """Take a lease as another member; found the run, or fetch its state."""
        node.lives += 1
        node.is_member = node.is_training = node.is_at_boundary = False
        node.steps, node.contributed, node.missed, node.opening = 0, 0, 0, None
        self._store.renew_lease(node.member_id, Peer(node.member_id, "", 1, True), first=True)
        if self._model.mtbf_s is not None:
            self._after(self._chance.expovariate(1 / self._model.mtbf_s), self._in_this_life(node, self._lose))
        committed = self._record.committed
        if committed is None:
            self._turn_to(node, "waiting")
            self._arrive(node, FOUNDING_ROUND)
            return
        self._turn_to(node, "joining")
        self._after(fetch_s(self._model, node.number), self._in_this_life(node, self._has_fetched))

    def _has_fetched(self, node: _Node) -> None:
        committed = self._record.committed
        assert committed is not None, "it fetched what was committed"
        self._arrive(node, committed.round + 1)

    def _lose(self, node: _Node) -> None:
        """Its machine is gone: others know it when its lease has run out."""
        self._found.losses += 1
        lost = node.member_id
        self._turn_to(node, "away")
        self._after(self._model.detect_s, lambda: self._expire(lost))
        self._after(self._chance.expovariate(1 / self._model.away_s), lambda: self._start(node))

    def _expire(self, member_id: str) -> None:
        self._store.release_lease(member_id)
        opening = self._record.opening
        if opening is not None and self._store.view(opening.round).lost(opening):
            self._give_up(opening, f"{member_id} lost")
        self._look()

    def _give_up(self, opening: Opening, reason: str) -> None:
        if self._store.report_failure(opening, reason):
            for node in self._nodes:
                if node.opening != opening or node.doing == "away":
                    continue
                node.opening = None
                if not node.is_training:
                    self._turn_to(node, "waiting")

    def _train(self, node: _Node) -> None:
        """The inner steps of the next round."""
        model = self._model
        seconds = model.inner_steps * model.nodes[node.number].step_s
        seconds *= 1 + self._chance.uniform(-model.jitter, model.jitter)
        node.is_training = True
        self._turn_to(node, "training")
        freezes = model.freeze_every_s is not None and self._chance.random() < seconds / model.freeze_every_s
        frozen_s = self._chance.expovariate(1 / model.freeze_s) if freezes else 0.0
        if frozen_s > model.detect_s:  # it is lost, and finds that out when it goes on
            member = node.member_id
            self._after(model.detect_s, lambda: self._expire(member))
            self._after(frozen_s, self._in_this_life(node, self._start))
        else:
            self._after(seconds + frozen_s, self._in_this_life(node, self._has_trained))

    def _has_trained(self, node: _Node) -> None:
        node.steps, node.is_training = self._model.inner_steps, False
        self._found.trained += node.steps
        if node.is_at_boundary:  # of the round before, which is on its way
            self._turn_to(node, "waiting" if node.opening is None else "transferring")
        else:
            self._arrive(node, node.round)

    def _arrive(self, node: _Node, round: int) -> None:
        """Stand at the boundary of a round."""
        node.round, node.is_at_boundary = round, True
        if node.doing != "joining":
            self._turn_to(node, "waiting")
        committed = self._record.committed
        state = "initial" if committed is None else committed.digest
        node.contributed, node.steps = node.contributed + node.steps, 0
        ready = Ready(
            round,
            node.contributed,
            state,
            steps=node.contributed,
            steps_requested=self._model.inner_steps,
            rate=self._model.nodes[node.number].mbit_s,
            missed=node.missed,
        )
        view = self._store.announce_ready(node.member_id, ready)
        is_next = committed is not None and committed.round + 1 == round
        if is_next and self._quorum_at_s is None and has_quorum(view, self._rules):
            self._quorum_at_s = self._now_s
            patience_s = self._rules.patience_s(self._phase_s)
            if patience_s < math.inf:
                self._after(patience_s, lambda: self._stop_waiting(round))
        self._decide(node)

    @property
    def _phase_s(self) -> float:
        """From the last verdict until a quorum was at the boundary; 0: none is."""
        return 0.0 if self._quorum_at_s is None else self._quorum_at_s - self._settled_at_s

    @property
    def _patience(self) -> Patience:
        waited_s = 0.0 if self._quorum_at_s is None else self._now_s - self._quorum_at_s
        is_over = self._quorum_at_s is not None and waited_s >= self._rules.patience_s(self._phase_s) - _ROUNDING_S
        return Patience(stragglers_are_late=is_over, phase_s=self._phase_s)

    def _stop_waiting(self, round: int) -> None:
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
        return [n for n in self._nodes if n.is_at_boundary and n.opening is None and n.doing != "away"]

    def _decide(self, node: _Node) -> bool:
        """What a node that waits makes of the store. Whether it opened a round."""
        view = self._store.view(node.round)
        if node.is_member and must_leave(view, node.member_id, node.round) is not None:
            self._store.release_lease(node.member_id)
            self._start(node)
            return False
        if view.committed is not None and view.committed.round >= node.round:
            node.missed += bool(node.contributed)
            self._arrive(node, view.committed.round + 1)
            return False
        decision = next_opening(view, node.round, self._rules, self._patience)
        if isinstance(decision, Wait) or decision == view.opening:  # it is open to others
            return False
        if not self._store.propose_opening(decision, current=view.opening):
            return False
        self._found.reopened += view.opening is not None and view.opening.round == decision.round
        self._begin(decision)
        return True

    # -- one round ------------------------------------------------------------------------------------------------

    def _begin(self, opening: Opening) -> None:
        """Its members transfer."""
        by_id = {node.member_id: node for node in self._nodes if node.doing != "away"}
        members = [by_id[member] for member in opening.members if member in by_id]
        for node in members:
            node.opening = opening
            if self._trains_ahead(node):
                self._train(node)
            elif not node.is_training:
                self._turn_to(node, "transferring")
        seconds = self._model.agreement_s
        if opening.round != FOUNDING_ROUND:
            seconds += transfer_s(self._model, [node.number for node in members])
        self._after(seconds, lambda: self._end(opening, members))

    def _trains_ahead(self, node: _Node) -> bool:
        """Whether a node whose round begins its transfer starts the steps of the next one."""
        return self._model.overlaps and node.is_member and not (node.is_training or node.steps)

    def _end(self, opening: Opening, members: list[_Node]) -> None:
        """The members that are still there vote; the last one commits the round, if all have."""
        if self._record.opening != opening or opening in self._record.failed:
            return
        for node in members:
            if node.opening == opening and node.doing != "away":
                self._store.vote(opening, node.member_id, f"state {opening.round}")
        verdict = next_verdict(self._store.view(opening.round), opening, {})
        if isinstance(verdict, Verdict) and self._store.propose_verdict(verdict):
            self._commit(verdict, members)

    def _commit(self, verdict: Verdict, members: list[_Node]) -> None:
        opening = verdict.opening
        self._settled_at_s, self._quorum_at_s = self._now_s, None
        if opening.round == FOUNDING_ROUND:
            self._progress = self._progress.begin(opening, self._shape, after_round=None)
        else:
            self._progress = self._progress.after(opening, self._shape)
            self._found.rounds += 1
            self._found.members += len(opening.members)
        self._forget_rounds_before(opening.round)
        for node in members:
            if node.opening != opening:
                continue
            self._found.joins += opening.round != FOUNDING_ROUND and not node.is_member
            node.opening, node.is_member, node.is_at_boundary = None, True, False
            self._found.late += node.missed > 0
            node.round, node.contributed, node.missed = opening.round + 1, 0, 0
            if node.steps:
                self._arrive(node, node.round)
            elif not node.is_training:
                self._train(node)
        self._look_again()

    def _look_again(self) -> None:
        """Those who wait for a round that is over now: joiners, and members that were late."""
        committed = self._record.committed
        for node in self._at_boundary():
            if committed is not None and node.round <= committed.round:
                self._decide(node)

    def _forget_rounds_before(self, round: int) -> None:
        """A run may be longer than memory."""
        record = self._record
        for old in [number for number in record.ready if number < round]:
            del record.ready[old]
        record.votes.clear()
        record.failed.clear()
        record.openings.clear()
        record.verdicts.clear()
