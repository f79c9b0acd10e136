"""Streaming DiLoCo (arXiv:2501.18512, algorithm 2) while nodes are lost and join: plain loops over phases and steps.

A phase is H / P inner steps. After phase r the fragment whose turn it is, (r - 1) mod P, is sent; tau steps later the
mean is applied to the outer parameters, and each replica keeps alpha of its own and takes 1 - alpha of the new ones.
Phase 1 sends already, as in torchft. The paper has a fixed set of replicas. What is added here for others:

- The mean is that of the members of a round: a node that is lost in round r is in no mean from r on.
- A node that joins with round r begins phase r + 1 at the outer parameters after r, all of them.
- u counts the steps behind the pseudo-gradient of a fragment of a replica: by so many it is ahead of the outer
  parameters. These go on by U steps with a mean, and mixing leaves alpha of the distance: u <- alpha (u - U). From turn
  to turn u is H - (1 - alpha) tau, for a joiner less at first. A pseudo-gradient grows with u, so the mean is that of
  the drift of a step, times the steps U of a whole turn, or of the longest one where nobody has made a whole one yet:
      Delta = U sum(w Delta_m) / sum(w u_m),  U = min(H - (1 - alpha) tau, max u)
  Where all u are equal, U is that u, and Delta the mean with weights w, as in the paper.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

InnerStep = Callable[[int, int, Tensor], Tensor]
"""From (node, number of the step from 1, parameters) to the parameters after it."""


@dataclass(frozen=True)
class Streaming:
    """Letters of the paper: H, P fragments as indices of values, tau, alpha; lr and mu of the outer Nesterov steps."""

    inner_steps: int
    fragments: list[list[int]]
    overlap: int = 0
    alpha: float = 0.0
    lr: float = 0.7
    mu: float = 0.9

    @property
    def phase(self) -> int:
        return self.inner_steps // len(self.fragments)

    @property
    def turn(self) -> float:
        """Steps behind a pseudo-gradient of a node that is not new."""
        return self.inner_steps - (1 - self.alpha) * self.overlap


@dataclass
class NodeRuntime:
    theta: Tensor
    u: list[float]


@dataclass
class Simulation:
    """`lost` and `joins`: nodes, and the round that lost or admitted them. Nodes that never join are there at first."""

    run: Streaming
    inner_step: InnerStep
    start: Tensor
    nodes: int
    lost: dict[int, int] = field(default_factory=dict[int, int])
    joins: dict[int, int] = field(default_factory=dict[int, int])
    replicas: dict[int, NodeRuntime] = field(default_factory=dict[int, NodeRuntime])

    def __post_init__(self) -> None:
        self.outer, self.v = self.start.clone(), torch.zeros_like(self.start)
        for node in range(self.nodes):
            if node not in self.joins:
                self.replicas[node] = self.new_replica()

    def new_replica(self) -> NodeRuntime:
        return NodeRuntime(self.outer.clone(), [0.0] * len(self.run.fragments))

    def history(self, rounds: int) -> list[Tensor]:
        """Return the outer parameters after each round."""
        found: list[Tensor] = []
        travelling: tuple[int, Tensor, float] | None = None
        for round in range(1, rounds + 1):
            for step in range(1, self.run.phase + 1):
                self.take_steps((round - 1) * self.run.phase + step)
                if travelling is not None and step == self.run.overlap:
                    found.append(self.receive(round - 1, *travelling))
                    travelling = None
            travelling = self.send(round)
            if self.run.overlap == 0 or round == rounds:
                found.append(self.receive(round, *travelling))
                travelling = None
        return found

    def take_steps(self, number: int) -> None:
        for node, replica in self.replicas.items():
            replica.theta = self.inner_step(node, number, replica.theta)
            replica.u = [u + 1 for u in replica.u]

    def send(self, round: int) -> tuple[int, Tensor, float]:
        """Return the turn, the mean, and the steps by which the outer parameters go on with it."""
        turn = (round - 1) % len(self.run.fragments)
        for node in [node for node, last in self.lost.items() if last == round]:
            del self.replicas[node]
        here = self.run.fragments[turn]
        deltas = [self.outer[here] - replica.theta[here] for replica in self.replicas.values()]
        us = [replica.u[turn] for replica in self.replicas.values()]
        goes_on = min(self.run.turn, max(us)) if len(set(us)) > 1 else us[0]
        share = goes_on / sum(us)
        mean = torch.zeros_like(deltas[0])
        for delta in deltas:  # w is the same for all: each phase has as many steps, each step as many tokens
            mean = mean + share * delta
        return turn, mean, goes_on

    def receive(self, round: int, turn: int, mean: Tensor, goes_on: float) -> Tensor:
        here, run = self.run.fragments[turn], self.run
        self.v[here] = run.mu * self.v[here] + mean
        self.outer[here] = self.outer[here] - run.lr * (run.mu * self.v[here] + mean)
        for replica in self.replicas.values():
            own, new = replica.theta[here], self.outer[here]
            replica.theta[here] = run.alpha * own + (1 - run.alpha) * new if run.alpha else new
            replica.u[turn] = run.alpha * (replica.u[turn] - goes_on)
        self.admit(round)
        return self.outer.clone()

    def admit(self, round: int) -> None:
        """Have the joiners of a round make up for the steps that the others have made of the next phase."""
        for node in [node for node, admitted in self.joins.items() if admitted == round]:
            replica = self.replicas[node] = self.new_replica()
            for step in range(1, self.run.overlap + 1):
                replica.theta = self.inner_step(node, round * self.run.phase + step, replica.theta)
                replica.u = [u + 1 for u in replica.u]


def strided_fragments(names: list[tuple[str, int]], count: int) -> list[list[int]]:
    """Return the indices of each fragment's values; `names`: parameters and their lengths, as they lie in the state.

    Block i belongs to fragment i mod P (the paper's strided pattern); an embedding goes with the first fragment, all
    else with the last one (as torchft and MaxText have it).
    """
    fragments: list[list[int]] = [[] for _ in range(count)]
    start = 0
    for name, length in names:
        parts = name.split(".")
        turn = int(parts[1]) % count if parts[0] == "layers" else 0 if parts[0] == "embed" else count - 1
        fragments[turn] += range(start, start + length)
        start += length
    return fragments
