"""Streaming DiLoCo, arXiv:2501.18512, algorithm 2, as written: a clock of inner steps and a list of what travels."""

from __future__ import annotations

import torch
from tests.oracles.problem import Problem, mean, nesterov
from torch import Tensor


def streaming(
    problem: Problem,
    steps: int,
    inner_steps: int,
    fragments: list[list[int]],
    overlap: int,
    alpha: float,
    lr: float,
    mu: float,
) -> tuple[Tensor, list[Tensor]]:
    """The outer parameters and each replica's own, after so many inner steps. `fragments`: indices of values.

    Fragments take turns from the first window on, as in torchft; in the paper's example the first turns are left out.
    """
    nodes, count = range(problem.nodes), len(fragments)
    anchor, v = problem.start(), torch.zeros(problem.numel)
    thetas = [anchor.clone() for _ in nodes]
    in_flight: list[tuple[int, int, Tensor]] = []
    for t in range(1, steps + 1):
        thetas = [problem.inner_step(m, t, thetas[m]) for m in nodes]
        for p in range(count):
            if (t - (p + 1) * inner_steps // count) % inner_steps == 0:
                here = fragments[p]
                in_flight.append((t + overlap, p, mean([anchor[here] - theta[here] for theta in thetas])))
        for due, p, delta in in_flight:
            if due == t:
                here = fragments[p]
                new, v[here] = nesterov(anchor[here], v[here], delta, lr, mu)
                anchor = anchor.clone()
                anchor[here] = new
                for theta in thetas:
                    theta[here] = alpha * theta[here] + (1 - alpha) * new if alpha else new
    return anchor, thetas
