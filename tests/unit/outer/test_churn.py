"""Streaming DiLoCo with a node that is lost and one that joins, as nodes run it, against a reference of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.oracles.churn import Simulation, Streaming, strided_fragments
from tests.oracles.problem import SHAPES, Problem, ProblemModel
from tests.unit.audits import audit_of
from torch import Tensor

from zeroband.config.outer import DilocoConfig, OuterSGDConfig
from zeroband.outer.diloco import PARAMS

Run = Any
BATCH, NAMES = 4, ("a", "b", "c", "d")
LENGTHS = [(name, math.prod(shape)) for name, shape in sorted(SHAPES.items())]
InnerStep = Callable[[int, int, Tensor], Tensor]


def steady_drift(node: int, step: int, theta: Tensor) -> Tensor:
    """Every step of every node goes the same way, so that a contribution is as long as the steps behind it."""
    return theta - 2.0**-10


def settings_of(reference: Streaming) -> DilocoConfig:
    sgd = OuterSGDConfig(lr=reference.lr, momentum=reference.mu, nesterov=reference.mu > 0)
    return DilocoConfig(
        type="diloco",
        inner_steps=reference.inner_steps,
        fragments=len(reference.fragments),
        overlap=reference.overlap,
        merge="mix",
        alpha=reference.alpha,
        optimizer=sgd,
    )


class Churn:
    """A run whose nodes train step by step, beside the reference that says what its outer parameters are."""

    def __init__(self, start_run: Callable[..., Run], reference: Simulation, rounds: int) -> None:
        self.reference, self.inner_step, self.streaming = reference, reference.inner_step, reference.run
        self.theirs = reference.history(rounds)
        lost = {NAMES[node]: [f"reduced@{round}=SIGKILL"] for node, round in reference.lost.items()}
        founders = [NAMES[node] for node in range(reference.nodes) if node not in reference.joins]
        self.run = start_run(settings_of(self.streaming), *founders, model=ProblemModel, inject=lost)
        self.there = list(founders)

    def train(self, rounds: int) -> list[Tensor]:
        """Return the outer parameters after each round, which are the same on all nodes."""
        phase, overlap, found = self.streaming.phase, self.streaming.overlap, list[Tensor]()
        joins = {round: NAMES[node] for node, round in self.reference.joins.items()}
        self.together(overlap)
        joiner = ""
        for round in range(1, rounds + 1):
            self.together(phase - overlap, joiner)
            joiner = ""
            for node, last in self.reference.lost.items():
                self.there = [name for name in self.there if not (name == NAMES[node] and last == round)]
            self.together(overlap)
            if round in joins:
                joiner = self.bring(joins[round])
                self.there.append(joiner)
                self.together(overlap, names=[joiner])
            nodes = [self.run[name] for name in self.there]
            assert {node.outer.round for node in nodes} == {round}
            assert len({node.outer.state_digest for node in nodes}) == 1
            found.append(nodes[0].buffers[PARAMS].clone())
        return found

    def bring(self, name: str) -> str:
        self.run.add(name).receive(self.run[self.there[0]])
        self.run[name].join()
        return name

    def together(self, steps: int, joiner: str = "", names: list[str] | None = None) -> None:
        """Train these nodes on. `joiner`: comes to the boundary of the next round before the others do."""
        there = self.there if names is None else names
        works: dict[str, Callable[[], Any]] = {name: partial(self.steps, name, steps, joiner) for name in there}
        self.run.together(**works)

    def steps(self, name: str, steps: int, joiner: str) -> None:
        if joiner not in ("", name):
            self.run.store.await_ready(self.run[name].outer.round + 1, joiner)
        self.run[name].train(partial(self.inner_step, NAMES.index(name)), steps)


def streaming_of(fragments: int, phase: int, overlap: int, alpha: float, **outer: float) -> Streaming:
    indices = strided_fragments(LENGTHS, fragments)
    return Streaming(fragments * phase, indices, overlap=overlap, alpha=alpha, **outer)


@pytest.mark.parametrize(
    ("fragments", "phase", "overlap", "alpha"), [(2, 4, 0, 0.0), (2, 4, 1, 0.5), (4, 3, 2, 0.25), (4, 2, 1, 0.0)]
)
def test_streaming_with_a_lost_node_and_a_joiner_is_its_reference(
    start_run: Callable[..., Run], fragments: int, phase: int, overlap: int, alpha: float
) -> None:
    """A node is lost in round 5 and another one joins after round 9, before which float32 leaves the bits no choice."""
    problem, lost, joins, rounds = Problem(4), {2: 5}, {3: 9}, 9 + 2 * fragments
    streaming = streaming_of(fragments, phase, overlap, alpha, lr=0.4)
    churn = Churn(start_run, Simulation(streaming, problem.inner_step, problem.start(), 4, lost, joins), rounds)
    ours = churn.train(rounds)
    assert [len(verdict.members) for verdict in churn.run.store.verdicts[1:]] == [3] * 4 + [2] * 5 + [3] * (rounds - 9)
    for found, expected in zip(ours[:9], churn.theirs[:9], strict=True):
        assert torch.equal(found, expected)
    for found, expected in zip(ours[9:], churn.theirs[9:], strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert audit_of(churn.run).is_exact


@pytest.mark.parametrize(("fragments", "overlap", "alpha"), [(2, 0, 0.0), (4, 0, 0.0), (2, 2, 0.0), (4, 1, 0.5)])
def test_outer_steps_with_a_joiner_are_as_long_as_without(
    start_run: Callable[..., Run], fragments: int, overlap: int, alpha: float
) -> None:
    """All nodes drift alike, so that a fragment's outer step is as long as the steps of a whole turn."""
    streaming = streaming_of(fragments, 4, overlap, alpha, lr=1.0, mu=0.0)
    joined = 2 * fragments
    reference = Simulation(streaming, steady_drift, Problem(1).start(), 2, joins={1: joined})
    ours = Churn(start_run, reference, 1).train(joined + fragments + 1)
    for round in range(joined, joined + fragments + 1):
        here = streaming.fragments[round % fragments]
        moved = (ours[round - 1] - ours[round])[here] * 2.0**10
        torch.testing.assert_close(moved, torch.full_like(moved, streaming.turn), rtol=0, atol=0.02)
