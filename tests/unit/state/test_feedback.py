"""What int4 takes from a contribution goes into the next one: once, whatever happens to the round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from tests.unit.conftest import FakeRun
from tests.unit.elastic.rounds.test_rollback import go_back, order, save
from tests.unit.elastic.transport.oracle import averaged
from torch import Tensor

from zeroband.config.outer import DdpConfig, DilocoConfig, OuterSGDConfig
from zeroband.elastic.membership.records import RestartPoint
from zeroband.elastic.rounds.exchange import CONTRIBUTION, RESULT
from zeroband.errors import Fenced
from zeroband.kernels.codec import CODECS

StartRun = Callable[..., FakeRun]
Noise = Callable[..., Tensor]
INT4 = CODECS["int4"]
NESTEROV = DilocoConfig(type="diloco", inner_steps=1, optimizer=OuterSGDConfig(lr=0.7, momentum=0.9))
N = 22


def residual_of(run: FakeRun, name: str) -> Tensor:
    residual = run[name].feedback.residual
    assert residual is not None
    return residual


class Oracle:
    """DiLoCo with Nesterov momentum and error feedback in plain torch, without a codec's or an outer class of ours."""

    def __init__(self, theta: Tensor, *names: str) -> None:
        self.theta, self.velocity = theta, torch.zeros(N)
        self.residuals = {name: torch.zeros(N) for name in names}

    def contribution(self, name: str, update: Tensor) -> Tensor:
        return (self.theta - (self.theta + update)) + self.residuals[name]

    def step(self, weights: Mapping[str, int], contributions: Mapping[str, Tensor]) -> Tensor:
        """A round of these members, in the order of their names; its mean."""
        names, total = sorted(contributions), sum(weights.values())
        shares, bounds = [weights[name] / total for name in names], (0, *[N] * len(names))
        mean, taken = averaged(INT4, [contributions[name] for name in names], shares, bounds)
        for name, error in zip(names, taken, strict=True):
            if weights[name] > 0:
                self.residuals[name] = error
        self.velocity = self.velocity * 0.9 + mean
        self.theta = self.theta - (self.velocity * 0.9 + mean) * 0.7
        return mean

    def require_equal(self, run: FakeRun, *names: str) -> None:
        for name in names:
            assert torch.equal(run[name].params, self.theta)
            assert torch.equal(residual_of(run, name), self.residuals[name])


@pytest.mark.slow
def test_twenty_rounds_are_those_of_plain_torch_bit_for_bit(start_run: StartRun, noise: Noise) -> None:
    run, names = start_run(NESTEROV, "a", "b", "c", codec="int4"), ("a", "b", "c")
    oracle = Oracle(run["a"].params, *names)
    for round in range(20):
        updates = {name: noise(3 * round + i) for i, name in enumerate(names)}
        oracle.step(dict.fromkeys(names, 10), {name: oracle.contribution(name, u) for name, u in updates.items()})
        run.round(**updates)
        oracle.require_equal(run, *names)
        assert all(residual.any() for residual in oracle.residuals.values())


@pytest.mark.parametrize("point", ["opened", "reduced"])
def test_retry_takes_the_residual_once_and_leaves_that_of_the_committed_attempt(
    start_run: StartRun, noise: Noise, point: str
) -> None:
    run = start_run(NESTEROV, "a", "b", "c", codec="int4", inject={"c": [f"{point}@2=SIGKILL"]})
    oracle = Oracle(run["a"].params, "a", "b", "c")
    for round, names in ((1, ("a", "b", "c")), (2, ("a", "b")), (3, ("a", "b"))):
        updates = {name: noise(10 * round + i) for i, name in enumerate("abc"[: 3 if round < 3 else 2])}
        contributions = {name: oracle.contribution(name, updates[name]) for name in names}
        oracle.step(dict.fromkeys(names, 10), contributions)
        reports = run.round(**updates)
        assert {report.retries for report in reports.values()} == {int(round == 2)}
        assert torch.equal(run["a"].buffers[CONTRIBUTION], contributions["a"])
        oracle.require_equal(run, *names)


def test_late_node_contributes_its_residual_with_what_it_learned(start_run: StartRun, noise: Noise) -> None:
    run = start_run(NESTEROV, "a", "b", "c", codec="int4")
    oracle = Oracle(run["a"].params, "a", "b", "c")
    first = {name: noise(i) for i, name in enumerate("abc")}
    oracle.step(dict.fromkeys("abc", 10), {name: oracle.contribution(name, u) for name, u in first.items()})
    run.round(**first)
    late = oracle.contribution("c", noise(9))
    second = {name: noise(10 + i) for i, name in enumerate("ab")}
    oracle.step(dict.fromkeys("ab", 10), {name: oracle.contribution(name, u) for name, u in second.items()})
    with run.hurry():
        assert run.round(**second)["a"].late == ("c",)
    assert torch.equal(residual_of(run, "c"), oracle.residuals["c"])
    third = {name: noise(20 + i) for i, name in enumerate("ab")}
    contributions = {name: oracle.contribution(name, u) for name, u in third.items()} | {"c": late}
    oracle.step(dict.fromkeys("abc", 10), contributions)
    run.round_with_late("c", [noise(9)], **third)
    oracle.require_equal(run, "a", "b", "c")


def test_node_whose_update_is_left_out_keeps_its_residual_for_the_next_one(start_run: StartRun, noise: Noise) -> None:
    run = start_run(NESTEROV, "a", "b", codec="int4")
    run.round(a=noise(1), b=noise(2))
    kept = residual_of(run, "b").clone()
    assert run.round(a=noise(3), b=noise(4) * float("nan"))["b"].is_left_out
    assert torch.equal(residual_of(run, "b"), kept) and kept.any()
    before = run["b"].params
    run.round(a=noise(5), b=noise(6))
    assert torch.equal(run["b"].buffers[CONTRIBUTION], before - (before + noise(6)) + kept)


def test_fenced_node_and_joiner_begin_without_a_residual(start_run: StartRun, noise: Noise) -> None:
    run = start_run(NESTEROV, "a", "b", codec="int4")
    run.round(a=noise(1), b=noise(2))
    assert residual_of(run, "b").any()
    run["b"].member.close()
    run.round(a=noise(3))
    assert isinstance(run.together(b=lambda: run["b"].take_step(noise(4), 10))["b"], Fenced)
    run.replace_member("b")
    run["b"].receive(run["a"])
    run.round_with_joiner("b", a=noise(5))
    assert not residual_of(run, "b").any()
    joiner = run.add("c")
    joiner.receive(run["a"])
    assert not residual_of(run, "c").any()


@pytest.mark.parametrize("algorithm", [NESTEROV, DdpConfig(type="ddp")], ids=["diloco", "ddp"])
def test_run_that_goes_back_forgets_what_the_rounds_after_the_checkpoint_left(
    start_run: StartRun, noise: Noise, algorithm: DilocoConfig | DdpConfig
) -> None:
    run = start_run(algorithm, "a", "b", codec="int4")
    run.round(a=noise(1), b=noise(2))
    save(run, 1)
    again: list[list[str]] = []
    for spike in (10.0, 1000.0):
        run.round(a=noise(3) * spike, b=noise(4) * spike)
        order(run, 1)
        go_back(run, a=noise(5), b=noise(6))
        assert not residual_of(run, "a").any() and not residual_of(run, "b").any()
        again.append([run.round(a=noise(10 + n), b=noise(20 + n))["a"].state_digest for n in range(2)])
    assert again[0] == again[1]


def test_node_that_founds_the_run_again_begins_without_a_residual(start_run: StartRun, noise: Noise) -> None:
    """As the only one that is left: its trainer, fenced, finds nobody to fetch a state from, but a checkpoint."""
    run = start_run(NESTEROV, "a", codec="int4")
    run.round(a=noise(1))
    copy = run["a"].outer.copy_state()
    run.round(a=noise(2))
    assert residual_of(run, "a").any()
    run.replace_member("a")
    assert run.store.propose_restart_point(RestartPoint(9, 1, copy.state_digest, "a-again"), run.store.view(0))
    run["a"].outer.adopt(copy.round, copy.record, copy.sections)
    run["a"].outer.found(9)
    assert not residual_of(run, "a").any()


def test_ddp_feeds_back_what_was_taken_from_gradients(start_run: StartRun, noise: Noise) -> None:
    run, residuals = start_run(DdpConfig(type="ddp"), "a", "b", codec="int4"), [torch.zeros(N)] * 2
    for round in range(4):
        gradients = [noise(2 * round), noise(2 * round + 1)]
        sources = [gradient + residual for gradient, residual in zip(gradients, residuals, strict=True)]
        mean, residuals = averaged(INT4, sources, (0.5, 0.5), (0, N, N))
        run.round(a=gradients[0], b=gradients[1])
        assert torch.equal(run["a"].buffers[RESULT], mean)
        assert torch.equal(residual_of(run, "b"), residuals[1])


@pytest.mark.parametrize("codec", CODECS)
def test_only_int4_costs_a_buffer(start_run: StartRun, codec: str) -> None:
    run = start_run(NESTEROV, "a", codec=codec)
    assert (run["a"].feedback.residual is None) == (codec != "int4")
    assert len(list(run.folder.glob("a/residual*"))) == (codec == "int4")


def quadratic(run: FakeRun, target: Tensor, rounds: int) -> Tensor:
    """Two nodes that each go a tenth of the way to their own target; the mean of these is the common one.

    The first value of the block is ten times as large as all others, and its sign turns with every round.
    """
    own = {"a": target + 0.02, "b": target - 0.02}
    for round in range(rounds):
        updates: dict[str, Any] = {name: 0.1 * (own[name] - run[name].params) for name in own}
        for update in updates.values():
            update[0] = 1.0 - 2.0 * (round % 2)
        run.round(**updates)
    return (run["a"].params - target)[1:].abs()


@pytest.mark.slow
def test_int4_converges_where_it_stalls_without_feedback(start_run: StartRun) -> None:
    """Whatever is below a fourteenth of the largest of its block is 0 in int4, in every round alike."""
    sgd = DilocoConfig(type="diloco", inner_steps=1, optimizer=OuterSGDConfig(lr=0.5, momentum=0.0, nesterov=False))
    run = start_run(sgd, "a", "b", codec="int4")
    target = run["a"].params + 0.4
    for name in ("a", "b"):
        run[name].feedback.residual = None
    assert float(quadratic(run, target, 10).min()) >= 0.3999, "plain int4 moves nothing but the first value"
    for name in ("a", "b"):
        run[name].feedback.residual = torch.zeros(N)
    assert float(quadratic(run, target, 60).mean()) < 0.1
