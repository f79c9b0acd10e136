"""Streaming DiLoCo, arXiv:2501.18512, algorithm 2, as written: a clock of inner steps and a list of what travels.

What is sent of a pseudo-gradient and how the outer parameters step by it are the rule's: Nesterov as in the paper, Adam
(arXiv:2003.00295), or sparse values with error feedback (arXiv:2508.15706).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy
import torch
from tests.oracles.problem import LAYOUT, Problem, mean, nesterov
from tests.oracles.sparse import Runs, divided, sparsified
from torch import Tensor

N = LAYOUT.numel


class OuterRule(Protocol):
    def sent(self, node: int, p: int, here: list[int], delta: Tensor) -> Tensor:
        """What the others get of a node's pseudo-gradient of fragment `p`, whose values are `here`."""
        ...

    def combined(self, sent: list[Tensor]) -> Tensor:
        """What the nodes make together of what they sent of a fragment."""
        ...

    def stepped(self, here: list[int], theta: Tensor, update: Tensor) -> Tensor:
        """The outer parameters of a fragment after a step by what the nodes made together."""
        ...


class Mean:
    """The nodes make the mean of their pseudo-gradients."""

    def sent(self, node: int, p: int, here: list[int], delta: Tensor) -> Tensor:
        return delta

    def combined(self, sent: list[Tensor]) -> Tensor:
        return mean(sent)


@dataclass
class Nesterov(Mean):
    lr: float
    mu: float
    v: Tensor = field(default_factory=lambda: torch.zeros(N))

    def stepped(self, here: list[int], theta: Tensor, update: Tensor) -> Tensor:
        theta, self.v[here] = nesterov(theta, self.v[here], update, self.lr, self.mu)
        return theta


@dataclass
class Adam(Mean):
    lr: float
    beta1: float
    beta2: float
    tau: float
    m: Tensor = field(default_factory=lambda: torch.zeros(N))
    v: Tensor = field(default_factory=lambda: torch.zeros(N))

    def stepped(self, here: list[int], theta: Tensor, update: Tensor) -> Tensor:
        self.m[here] = self.m[here] * self.beta1 + update * (1 - self.beta1)
        self.v[here] = self.v[here] * self.beta2 + update * update * (1 - self.beta2)
        return theta - self.m[here] / (torch.from_numpy(numpy.sqrt(self.v[here].numpy())) + self.tau) * self.lr


@dataclass
class Sparse:
    lr: float
    decay: float
    runs: list[Runs]
    """For each fragment, as indices of the whole state."""
    divisor: str
    errors: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def sent(self, node: int, p: int, here: list[int], delta: Tensor) -> Tensor:
        errors = self.errors.setdefault(node, torch.zeros(N))
        errors[here] = self.decay * errors[here] + delta
        decoded = sparsified(errors, self.runs[p])
        errors[here] = errors[here] - decoded[here]
        return decoded[here]

    def combined(self, sent: list[Tensor]) -> Tensor:
        return divided(sent, self.divisor)

    def stepped(self, here: list[int], theta: Tensor, update: Tensor) -> Tensor:
        return theta - self.lr * update


def streaming(
    problem: Problem,
    steps: int,
    inner_steps: int,
    fragments: list[list[int]],
    overlap: int,
    alpha: float,
    rule: OuterRule,
) -> tuple[Tensor, list[Tensor]]:
    """The outer parameters and each replica's own, after so many inner steps. `fragments`: indices of values.

    Fragments take turns from the first window on, as in torchft; in the paper's example the first turns are left out.
    """
    nodes, count = range(problem.nodes), len(fragments)
    anchor = problem.start()
    thetas = [anchor.clone() for _ in nodes]
    in_flight: list[tuple[int, int, Tensor]] = []
    for t in range(1, steps + 1):
        thetas = [problem.inner_step(m, t, thetas[m]) for m in nodes]
        for p in range(count):
            if (t - (p + 1) * inner_steps // count) % inner_steps == 0:
                here = fragments[p]
                sent = [rule.sent(m, p, here, anchor[here] - thetas[m][here]) for m in nodes]
                in_flight.append((t + overlap, p, rule.combined(sent)))
        for due, p, update in in_flight:
            if due == t:
                here = fragments[p]
                anchor = anchor.clone()
                new = anchor[here] = rule.stepped(here, anchor[here], update)
                for theta in thetas:
                    theta[here] = alpha * theta[here] + (1 - alpha) * new if alpha else new
    return anchor, thetas
