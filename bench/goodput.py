"""Goodput of a run whose nodes fail, by the rules of membership in a simulation: no sockets, no clocks, no tensors.

Openings, verdicts, who is late and who has to join anew are decided by `elastic/membership`, and tokens are counted
by its ledgers. Around them: how long phases and transfers take, when nodes fail (exponential gaps), for how long they
are down, and how long they stand still without failing. Beside it, with the same failures: data parallelism in which
every failure stops all nodes until the node is back, and one that goes on without it after a pause.

Defaults: 2.4 million chips in 64 nodes, each of which fails once a year; a node is down for as long as lets plain data
parallelism keep the 27 %, and others pause for as long as lets elastic data parallelism keep the 58 %, that were
published for it beside Decoupled DiLoCo's 88 % (arXiv:2604.21428, in words of others).

    python bench/goodput.py [--nodes 64] [--mtbf-s 841] [--down-s 35] [--pause-s 5.5] [--hours 8] [--grace 0.1]
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from dataclasses import dataclass, field, replace
from itertools import count as counter

from evidence import count, require

from zeroband.elastic.membership.epoch import Patience, Rules, has_quorum, must_leave, next_opening, next_verdict
from zeroband.elastic.membership.progress import Progress, RunShape
from zeroband.elastic.membership.records import FOUNDING_ROUND, Opening, Ready, Verdict, View
from zeroband.tools.data.audit import AuditedRound, audit

STEPS = 30
"""Inner steps of a phase, each of which is a token."""
SHAPE = RunShape(total_steps=10**9, batch_size=1)


@dataclass(frozen=True)
class Setting:
    """What is simulated; seconds."""

    nodes: int
    mtbf_s: float
    """Mean time from one failure of a node to its next."""
    down_s: float
    """Until it is back and holds the state again."""
    pause_s: float
    """For which an elastic data-parallel run stands still at a failure."""
    phase_s: float
    jitter: float
    """By which phases differ, as a part of them."""
    transfer_s: float
    detect_s: float
    freeze_every_s: float
    freeze_s: float
    """Means of how often and for how long a node stands still in a phase."""
    grace: float | None


@dataclass
class Node:
    """A node; `member` is its present membership."""

    number: int
    member: str = ""
    is_up: bool = True
    began: int = 0
    """Counts what it began, so that what it no longer does is told apart."""
    offer: Ready | None = None
    """What it stands at the boundary with."""
    last_round: int = FOUNDING_ROUND - 1
    """The newest that it was in, or stood before when it came."""


@dataclass
class Simulation:
    """A run from its founding."""

    setting: Setting
    seed: int
    now_s: float = 0.0
    opening: Opening | None = None
    committed: Verdict | None = None
    progress: Progress = field(default_factory=Progress.at_start)
    settled_at_s: float = 0.0
    quorum_since_s: float | None = None
    trained: int = 0
    rejoined: int = 0
    late: int = 0
    """Contributions that counted in a later round than they were meant for."""
    history: list[AuditedRound] = field(default_factory=list[AuditedRound])
    reopened: int = 0

    def __post_init__(self) -> None:
        setting = self.setting
        self._chance = random.Random(self.seed)
        self._names = counter()
        self._events: list[tuple[float, int, str, Node | None, int]] = []
        self._order = counter()
        self._alive: set[str] = set()
        self._is_transferred = False
        self.nodes = [Node(number) for number in range(setting.nodes)]
        self.rules = Rules(start_nodes=setting.nodes, straggler_grace=setting.grace)
        for node in self.nodes:
            self._become_member(node)
            node.offer = Ready(FOUNDING_ROUND, 0, "s", 0, STEPS)
            self._plan(self._chance.expovariate(1 / setting.mtbf_s), "fail", node)

    def run(self, until_s: float) -> float:
        """The part of what nodes that never fail and never wait would learn that was counted."""
        self._decide()
        while self._events and self._events[0][0] < until_s:
            self.now_s, _, kind, node, began = heapq.heappop(self._events)
            if node is None or kind in ("fail", "lost") or began == node.began:
                getattr(self, f"_{kind}")(*([] if node is None else [node]))
            self._decide()
        return self.progress.tokens / (self.setting.nodes * until_s / self.setting.phase_s * STEPS)

    def _plan(self, in_s: float, kind: str, node: Node | None = None) -> None:
        began = 0 if node is None else node.began
        heapq.heappush(self._events, (self.now_s + in_s, next(self._order), kind, node, began))

    # -- nodes --------------------------------------------------------------------------------------------------

    def _become_member(self, node: Node) -> None:
        node.member, node.offer = f"n{node.number:03}#{next(self._names):08}", None
        self._alive.add(node.member)

    def _begin_phase(self, node: Node) -> None:
        setting = self.setting
        node.began += 1
        node.offer = None
        took_s = setting.phase_s * (1 + setting.jitter * self._chance.random())
        if self._chance.random() < took_s / setting.freeze_every_s:
            took_s += self._chance.expovariate(1 / setting.freeze_s)
        self._plan(took_s, "finish", node)

    def _finish(self, node: Node) -> None:
        self.trained += STEPS
        assert self.committed is not None
        node.offer = Ready(node.last_round + 1, STEPS, "s", STEPS, STEPS)
        self._catch_up(node)

    def _catch_up(self, node: Node) -> None:
        """A round went without it: it replays that, and stands before the next one, or joins anew."""
        assert self.committed is not None and node.offer is not None
        while self.committed.round >= node.offer.round:
            if must_leave(self._view(node.offer.round), node.member, node.offer.round) is not None:
                self._leave(node)
                self._plan(0.0, "join", node)
                return
            node.offer = replace(node.offer, round=self.committed.round + 1)
        node.offer = replace(node.offer, missed=node.offer.round - node.last_round - 1)

    def _fail(self, node: Node) -> None:
        self._plan(self.setting.down_s + self._chance.expovariate(1 / self.setting.mtbf_s), "fail", node)
        node.began += 1
        node.is_up = False
        self._plan(self.setting.detect_s, "lost", node)
        self._plan(self.setting.down_s, "join", node)

    def _lost(self, node: Node) -> None:
        """Its lease runs out."""
        if not node.is_up:
            self._leave(node)

    def _leave(self, node: Node) -> None:
        self._alive.discard(node.member)
        node.offer = None

    def _join(self, node: Node) -> None:
        self.rejoined += 1
        self._leave(node)
        self._become_member(node)
        node.is_up = True
        assert self.committed is not None
        node.last_round = self.committed.round
        node.offer = Ready(self.committed.round + 1, 0, "s", 0, STEPS)

    # -- rounds -------------------------------------------------------------------------------------------------

    def _view(self, round: int) -> View:
        ready = {n.member: n.offer for n in self.nodes if n.offer is not None and n.offer.round == round}
        votes = {}
        if self.opening is not None and self.opening.round == round and self._is_transferred:
            votes = {m: "d" for m in self.opening.members if m in self._alive}
        return View(self.opening, self.committed, frozenset(self._alive), ready, votes, None)

    def _decide(self) -> None:
        """What the members propose, as soon as they can."""
        round = FOUNDING_ROUND if self.committed is None else self.committed.round + 1
        view = self._view(round)
        if self.quorum_since_s is None and has_quorum(view, self.rules):
            self.quorum_since_s = self.now_s
            if self.setting.grace is not None:
                self._plan(self.rules.patience_s(self.now_s - self.settled_at_s) + 1e-6, "look")
        decision = next_opening(view, round, self.rules, self._patience())
        if not isinstance(decision, Opening) or decision == self.opening:
            return
        self.reopened += self.opening is not None and self.opening.round == round
        self.opening, self._is_transferred = decision, False
        self._plan(0.0 if round == FOUNDING_ROUND else self.setting.transfer_s, "transfer")

    def _patience(self) -> Patience:
        if self.quorum_since_s is None:
            return Patience()
        phase_s = self.quorum_since_s - self.settled_at_s
        return Patience(False, self.now_s - self.quorum_since_s >= self.rules.patience_s(phase_s), phase_s)

    def _look(self) -> None:
        """A wait is over."""

    def _transfer(self) -> None:
        """The transfer of an opening ends; where a member failed, nothing came of it."""
        opening = self.opening
        assert opening is not None
        is_over = self.committed is not None and self.committed.round >= opening.round
        if is_over or any(not n.is_up for n in self.nodes if n.member in opening.members):
            return
        self._is_transferred = True
        verdict = next_verdict(self._view(opening.round), opening, {})
        assert isinstance(verdict, Verdict)
        begins = opening.round == FOUNDING_ROUND
        progress = self.progress
        self.progress = progress.begin(opening, SHAPE, after_round=None) if begins else progress.after(opening, SHAPE)
        self.committed, self.settled_at_s, self.quorum_since_s = verdict, self.now_s, None
        self.history.append(AuditedRound(verdict.round, opening.contributors(), self.progress.ledgers))
        for node in self.nodes:
            if node.member in opening.members:
                self.late += node.offer is not None and node.offer.missed > 0
                node.last_round = opening.round
                self._begin_phase(node)
            elif node.offer is not None and node.is_up:
                self._again(node)

    def _again(self, node: Node) -> None:
        """Who stood at the boundary of a round that went without it: a late member, or a joiner that came too late."""
        assert node.offer is not None and self.committed is not None
        if node.offer.weight:
            self._catch_up(node)
        else:
            node.offer = replace(node.offer, round=self.committed.round + 1)


def data_parallel(setting: Setting, until_s: float, seed: int, *, is_elastic: bool) -> float:
    """The same part where all nodes make one step together, and a failure stops them all."""
    chance, now_s, useful_s, down = random.Random(seed), 0.0, 0.0, list[float]()
    while now_s < until_s:
        down = [back_at_s for back_at_s in down if back_at_s > now_s]
        there = setting.nodes - len(down)
        gap_s = chance.expovariate(max(there, 1) / setting.mtbf_s)
        back_s = min(down, default=math.inf) - now_s
        useful_s += there * min(gap_s, back_s, until_s - now_s)
        now_s += min(gap_s, back_s)
        if gap_s <= back_s:
            now_s += setting.pause_s if is_elastic else setting.down_s
            if is_elastic:
                down.append(now_s - setting.pause_s + setting.down_s)
        else:
            now_s += setting.pause_s  # who is back is taken in
    return useful_s / (setting.nodes * until_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=count, default=64)
    for name, default in (
        *(("mtbf", 841.0), ("down", 35.0), ("pause", 5.5), ("phase", 60.0), ("transfer", 2.0), ("detect", 5.0)),
        *(("freeze-every", 600.0), ("freeze", 20.0)),
    ):
        parser.add_argument(f"--{name}-s", type=float, default=default)
    parser.add_argument("--jitter", type=float, default=0.05)
    parser.add_argument("--grace", type=float, default=0.1)
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=0)
    parsed = vars(parser.parse_args())
    until_s, seed = 3600 * parsed.pop("hours"), parsed.pop("seed")
    setting = Setting(**parsed)
    steady = replace(setting, freeze_every_s=math.inf)
    print("| run | goodput | counted of trained | rounds | opened again | late | joined |\n|" + "---|" * 7)
    for name, chosen in {
        f"failures, grace {setting.grace:g}": steady,
        "failures, waiting for all that live": replace(steady, grace=None),
        f"failures and freezes, grace {setting.grace:g}": setting,
        "failures and freezes, waiting for all that live": replace(setting, grace=None),
    }.items():
        run = Simulation(chosen, seed)
        goodput = run.run(until_s)
        require(audit(run.history).is_exact, "samples were trained twice or lost")
        counted = f"{goodput:.3f} | {run.progress.tokens / run.trained:.4f}"
        print(f"| {name} | {counted} | {len(run.history)} | {run.reopened} | {run.late} | {run.rejoined} |")
    for name, is_elastic in (("data parallel, elastic", True), ("data parallel", False)):
        print(f"| failures, {name} | {data_parallel(setting, until_s, seed, is_elastic=is_elastic):.3f} | | | | | |")


if __name__ == "__main__":
    main()
