"""DiLoCo, arXiv:2311.08105, algorithm 1, and per-step data parallel training, as they are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    inner_steps: int | Sequence[int],
    lr: float,
    mu: float,
    sent: Callable[[int, Tensor], Tensor] = lambda node, delta: delta,
    weights: Sequence[int] | None = None,
    flush_every: int | None = None,
) -> list[list[Tensor]]:
    """Eager updates, arXiv:2502.12996, algorithm 3 (second-hand): each replica's own parameters after each round.

    Each has an outer optimizer of its own, fed with the mean of its fresh pseudo-gradient and the others' late ones.
    `sent`: what becomes of a node's pseudo-gradient where it is compressed. `inner_steps`: of all nodes, or of each.
    `weights`: of the nodes in the mean; None: equal. `flush_every`: rounds from one to the next whose mean is waited
    for: then all replicas begin anew from the one that has had all means and nothing early. Where no late mean has
    come, in the first round and after a flush, only what is fresh moves a replica.
    """
    nodes, nothing = range(problem.nodes), torch.zeros(problem.numel)
    steps = [inner_steps] * problem.nodes if isinstance(inner_steps, int) else inner_steps
    common, common_v = problem.start(), nothing
    thetas, vs = [common for _ in nodes], [common_v for _ in nodes]
    late: list[Tensor] | None = None
    history: list[list[Tensor]] = []
    for round in range(rounds):
        fresh = [sent(m, thetas[m] - problem.inner_steps(m, 1 + round * steps[m], steps[m], thetas[m])) for m in nodes]
        old = late or [nothing for _ in nodes]
        for m in nodes:
            delta = mean([fresh[m] if other == m else old[other] for other in nodes], weights)
            if late is None:
                thetas[m], own = nesterov(common, nothing, delta, lr, mu)
                vs[m] = common_v + own
            else:
                thetas[m], vs[m] = nesterov(thetas[m], vs[m], delta, lr, mu)
        if late is not None:
            common, common_v = nesterov(common, common_v, mean(late, weights), lr, mu)
        late = fresh
        if flush_every and (round + 1) % flush_every == 0:
            common, common_v = nesterov(common, common_v, mean(late, weights), lr, mu)
            thetas, late = [common for _ in nodes], None
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
