"""DiLoCo, arXiv:2311.08105, algorithm 1, and per-step data parallel training, as they are written."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.oracles.problem import Problem, mean, nesterov
from torch import Tensor


def diloco(problem: Problem, rounds: int, inner_steps: int, lr: float, mu: float) -> list[Tensor]:
    """The outer parameters after each round."""
    theta, v = problem.start(), torch.zeros(problem.numel)
    history: list[Tensor] = []
    for round in range(rounds):
        first = 1 + round * inner_steps
        deltas = [theta - problem.inner_steps(m, first, inner_steps, theta) for m in range(problem.nodes)]
        theta, v = nesterov(theta, v, mean(deltas), lr, mu)
        history.append(theta)
    return history


def delayed(problem: Problem, rounds: int, inner_steps: int, lr: float, mu: float) -> list[Tensor]:
    """Naively delayed DiLoCo, arXiv:2502.12996, algorithm 2: the mean of a round is applied at the end of the next."""
    theta, v = problem.start(), torch.zeros(problem.numel)
    late = torch.zeros(problem.numel)
    history: list[Tensor] = []
    for round in range(rounds):
        first = 1 + round * inner_steps
        deltas = [theta - problem.inner_steps(m, first, inner_steps, theta) for m in range(problem.nodes)]
        theta, v = nesterov(theta, v, late, lr, mu)
        late = mean(deltas)
        history.append(theta)
    return history


def eager(
    problem: Problem,
    rounds: int,
    inner_steps: int,
    lr: float,
    mu: float,
    sent: Callable[[int, Tensor], Tensor] = lambda node, delta: delta,
) -> list[list[Tensor]]:
    """Eager updates, arXiv:2502.12996, algorithm 3 (second-hand): each replica's own parameters after each round.

    Each has an outer optimizer of its own, fed with the mean of its fresh pseudo-gradient and the others' late ones.
    `sent`: what becomes of a node's pseudo-gradient where it is compressed.
    """
    nodes = range(problem.nodes)
    thetas = [problem.start() for _ in nodes]
    vs = [torch.zeros(problem.numel) for _ in nodes]
    late = [torch.zeros(problem.numel) for _ in nodes]
    history: list[list[Tensor]] = []
    for round in range(rounds):
        first = 1 + round * inner_steps
        fresh = [sent(m, thetas[m] - problem.inner_steps(m, first, inner_steps, thetas[m])) for m in nodes]
        for m in nodes:
            delta = mean([fresh[m] if other == m else late[other] for other in nodes])
            thetas[m], vs[m] = nesterov(thetas[m], vs[m], delta, lr, mu)
        late = fresh
        history.append(list(thetas))
    return history


def ddp(problem: Problem, steps: int) -> list[Tensor]:
    """The parameters after each step by the mean of all nodes' gradients."""
    theta = problem.start()
    history: list[Tensor] = []
    for step in range(1, steps + 1):
        gradient = mean([problem.gradient(m, step, theta) for m in range(problem.nodes)])
        theta = theta - problem.lr * gradient
        history.append(theta)
    return history
