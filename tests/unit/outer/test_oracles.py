"""The parts of each algorithm, put together in one process, against its oracle; identities between algorithms."""

from __future__ import annotations

import pytest
import torch
from tests.oracles.diloco import ddp, delayed, diloco, eager
from tests.oracles.problem import LAYOUT, Converging, Pooled, Problem, mean
from tests.oracles.sparse import demo, runs_of, sparseloco
from torch import Tensor

from zeroband.config.outer import DemoConfig, OuterSGDConfig, SparseLocoConfig
from zeroband.config.stability import largest_stable_lr
from zeroband.model.optim import sign_step
from zeroband.outer.demo import momentum_rule
from zeroband.outer.merge import EagerView
from zeroband.outer.outer_optimizer import OuterSGD
from zeroband.outer.sparse.residual import SparseResidual
from zeroband.outer.sparse.sparse_codec import SparseCodec, SparseRule
from zeroband.outer.sparseloco import error_rule

ROUNDS, INNER_STEPS = 14, 4
SGD = OuterSGDConfig(lr=0.7, momentum=0.9)


def zeros() -> Tensor:
    return torch.zeros(LAYOUT.numel)


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def contributions(problem: Problem, round: int, start: Tensor, optimizer: OuterSGD) -> list[Tensor]:
    found: list[Tensor] = []
    for m in range(problem.nodes):
        inner = problem.inner_steps(m, 1 + round * INNER_STEPS, INNER_STEPS, start)
        found.append(torch.empty_like(inner))
        optimizer.contribution(start, inner, found[-1])
    return found


def run_diloco(problem: Problem) -> list[Tensor]:
    optimizer = OuterSGD(SGD)
    theta, v = problem.start(), zeros()
    history: list[Tensor] = []
    for round in range(ROUNDS):
        optimizer.apply(theta, v, mean(contributions(problem, round, theta, optimizer)), outer_step=round + 1)
        history.append(theta.clone())
    return history


def run_delayed(problem: Problem, config: OuterSGDConfig) -> list[Tensor]:
    optimizer = OuterSGD(config)
    theta, v, late = problem.start(), zeros(), zeros()
    history: list[Tensor] = []
    for round in range(ROUNDS):
        fresh = mean(contributions(problem, round, theta, optimizer))
        optimizer.apply(theta, v, late, outer_step=round + 1)
        late = fresh
        history.append(theta.clone())
    return history


def run_eager(problem: Problem, config: OuterSGDConfig) -> tuple[list[list[Tensor]], Tensor]:
    """Views of all nodes after each round, and the canonical parameters at the end, one mean behind."""
    optimizer, nodes = OuterSGD(config), range(problem.nodes)
    view = EagerView(lr=config.lr, momentum=config.momentum, nesterov=config.nesterov)
    canonical, v, late = problem.start(), zeros(), zeros()
    own, histories = [canonical.clone() for _ in nodes], [zeros() for _ in nodes]
    found: list[list[Tensor]] = []
    for round in range(ROUNDS):
        first = 1 + round * INNER_STEPS
        fresh = [own[m] - problem.inner_steps(m, first, INNER_STEPS, own[m]) for m in nodes]
        optimizer.apply(canonical, v, late, outer_step=round + 1)
        for m in nodes:
            view.add(histories[m], fresh[m], share=1 / problem.nodes)
            view.write(canonical, histories[m], fresh[m], own[m], share=1 / problem.nodes)
        late = mean(fresh)
        found.append([theta.clone() for theta in own])
    return found, canonical


def run_demo(
    problem: Problem, feedback: SparseResidual, lr: float, peers: list[int], steps: int = ROUNDS
) -> list[Tensor]:
    codec = feedback.codec
    theta, momenta = problem.start(), [zeros() for _ in range(problem.nodes)]
    history: list[Tensor] = []
    for step in range(1, steps + 1):
        payloads: list[Tensor] = []
        for m, momentum in enumerate(momenta):
            feedback.accumulate(momentum, problem.gradient(m, step, theta), scale=lr)
            payloads.append(feedback.extract(momentum).payload)
        update = torch.empty_like(theta)
        codec.decode([codec.check(payloads[m]) for m in peers], update, divisor="senders")
        sign_step(theta, update, lr=lr)
        history.append(theta.clone())
    return history


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_diloco_is_its_oracle_bit_for_bit(nodes: int) -> None:
    problem = Problem(nodes)
    assert equal(run_diloco(problem), diloco(problem, ROUNDS, INNER_STEPS, SGD.lr, SGD.momentum))


def test_delayed_updates_are_their_oracle_bit_for_bit() -> None:
    config = OuterSGDConfig(lr=0.1, momentum=0.9)
    theirs = delayed(Problem(4), ROUNDS, INNER_STEPS, config.lr, config.momentum)
    assert equal(run_delayed(Problem(4), config), theirs)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_eager_views_are_the_replicas_of_the_oracle(nodes: int, momentum: float) -> None:
    config = OuterSGDConfig(lr=0.2, momentum=momentum)
    ours, _ = run_eager(Problem(nodes), config)
    theirs = eager(Problem(nodes), ROUNDS, INNER_STEPS, config.lr, config.momentum)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.stack(a), torch.stack(b), rtol=0, atol=3e-6)


def test_eager_update_of_one_node_is_diloco() -> None:
    replicas = eager(Problem(1), ROUNDS, INNER_STEPS, SGD.lr, SGD.momentum)
    expected = diloco(Problem(1), ROUNDS, INNER_STEPS, SGD.lr, SGD.momentum)
    assert equal([own for (own,) in replicas], expected)
    views, _ = run_eager(Problem(1), SGD)
    torch.testing.assert_close(torch.stack([own for (own,) in views]), torch.stack(expected), rtol=0, atol=3e-6)


def test_eager_replicas_stay_together_and_the_flush_makes_them_equal() -> None:
    config = OuterSGDConfig(lr=0.2, momentum=0.9)
    views, canonical = run_eager(Problem(4), config)
    spread = (torch.stack(views[-1]) - mean(views[-1])).abs().max()
    assert 0 < spread < 0.2
    view, flushed = EagerView(lr=0.2, momentum=0.9), [torch.empty_like(canonical) for _ in range(4)]
    for out in flushed:
        view.write(canonical, zeros(), zeros(), out, share=0.25)
    assert all(torch.equal(out, canonical) for out in flushed)


@pytest.mark.parametrize(("method", "nodes"), [("delayed", 2), ("eager", 2), ("eager", 4)])
def test_oracles_diverge_above_the_limit_of_stability_and_not_below(method: str, nodes: int) -> None:
    problem = Converging(nodes, numel=8)
    limit = largest_stable_lr("eager" if method == "eager" else "delayed", nodes, 0.9)

    def distance(lr: float) -> float:
        oracle = eager if method == "eager" else delayed
        last = oracle(problem, 400, 1, lr, 0.9)[-1]
        return float(torch.stack(last if isinstance(last, list) else [last]).abs().max())

    assert distance(0.9 * limit) < 10
    assert distance(1.1 * limit) > 100


def test_diloco_of_one_node_without_momentum_is_its_inner_optimizer() -> None:
    problem = Problem(1)
    got = diloco(problem, ROUNDS, INNER_STEPS, lr=1.0, mu=0.0)[-1]
    expected = problem.inner_steps(0, 1, ROUNDS * INNER_STEPS, problem.start())
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


def test_ddp_is_one_node_with_the_batch_of_all() -> None:
    theta = Problem(4).start()
    pooled = Pooled(4).inner_steps(0, 1, ROUNDS, theta)
    torch.testing.assert_close(ddp(Problem(4), ROUNDS)[-1], pooled, rtol=0, atol=1e-6)
    averaged = diloco(Problem(4), ROUNDS, 1, 1.0, 0.0)[-1]
    torch.testing.assert_close(averaged, pooled, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.2])
def test_demo_is_its_oracle(share: float) -> None:
    problem = Problem(4)
    codec = SparseCodec(LAYOUT, SparseRule(k=2, chunk=4, uneven="divide"))
    ours = run_demo(problem, SparseResidual(codec, decay=0.99, share=share), 0.01, [0, 1, 2, 3])
    theirs = demo(problem, ROUNDS, chunk=4, k=2, lr=0.01, decay=0.99, share=share)
    assert equal(ours, theirs)


def test_demo_with_all_coefficients_and_no_momentum_is_the_sign_of_the_mean_gradient() -> None:
    problem = Problem(4)
    feedback = momentum_rule(DemoConfig(type="demo", k=4096, chunk=4, values="float32", decay=0.0), LAYOUT)
    theta = problem.start()
    for step, ours in enumerate(run_demo(problem, feedback, 0.01, [0, 1, 2, 3], steps=5), start=1):
        gradient = mean([problem.gradient(m, step, theta) for m in range(4)])
        assert gradient.abs().min() > 1e-6
        sign_step(theta, gradient, lr=0.01)
        assert torch.equal(ours, theta)


@pytest.mark.slow
@pytest.mark.parametrize("values", ["float32", "sign"])
def test_demo_without_a_peer_is_as_if_it_had_never_been_listed(values: str) -> None:
    config = DemoConfig(type="demo", k=2, chunk=4, values="sign" if values == "sign" else "float32")
    dropped = run_demo(Problem(4), momentum_rule(config, LAYOUT), 0.01, peers=[0, 1, 2], steps=4)
    assert equal(dropped, run_demo(Problem(3), momentum_rule(config, LAYOUT), 0.01, peers=[0, 1, 2], steps=4))
    assert not equal(dropped, run_demo(Problem(4), momentum_rule(config, LAYOUT), 0.01, peers=[0, 1, 2, 3], steps=4))


@pytest.mark.slow
@pytest.mark.parametrize("divisor", ["senders", "members"])
def test_sparseloco_is_its_oracle_bit_for_bit(divisor: str) -> None:
    problem, feedback = Problem(4), error_rule(SparseLocoConfig(type="sparseloco", k=5, chunk=4), LAYOUT)
    optimizer = OuterSGD(OuterSGDConfig(lr=0.8, momentum=0.0, nesterov=False))
    theta, v, errors = problem.start(), zeros(), [zeros() for _ in range(4)]
    ours: list[Tensor] = []
    for round in range(ROUNDS):
        payloads: list[Tensor] = []
        for m, delta in enumerate(contributions(problem, round, theta, optimizer)):
            feedback.accumulate(errors[m], delta)
            payloads.append(feedback.extract(errors[m]).payload)
        result = torch.empty_like(theta)
        rule = "senders" if divisor == "senders" else "none"
        feedback.codec.decode([feedback.codec.check(p) for p in payloads], result, weights=[0.25] * 4, divisor=rule)
        optimizer.apply(theta, v, result, outer_step=round + 1)
        ours.append(theta.clone())
    runs = runs_of(feedback.codec)
    theirs = sparseloco(problem, ROUNDS, INNER_STEPS, runs=runs, decay=0.95, lr=0.8, divisor=divisor)
    assert equal(ours, theirs)


@pytest.mark.slow
def test_error_feedback_conserves_what_goes_in() -> None:
    feedback = error_rule(SparseLocoConfig(type="sparseloco", k=3, chunk=4, decay=1.0), LAYOUT)
    memory, into, out = zeros(), zeros(), zeros()
    for step in range(ROUNDS):
        delta = Problem(1).gradient(0, step + 1, zeros())
        into += delta
        feedback.accumulate(memory, delta)
        sent = torch.empty_like(out)
        feedback.codec.decode([feedback.codec.check(feedback.extract(memory).payload)], sent)
        out += sent
    torch.testing.assert_close(out + memory, into, rtol=1e-6, atol=1e-5)
