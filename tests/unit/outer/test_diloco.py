import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from zeroband.config.outer import ClipConfig, DilocoConfig, OuterSGDConfig, TrimmedConfig
from zeroband.elastic.rounds.exchange import CONTRIBUTION
from zeroband.kernels import host_passes
from zeroband.node.mesh import LocalMesh, barrier
from zeroband.outer import diloco as module
from zeroband.outer.diloco import MOMENTUM, PARAMS
from zeroband.outer.outer_optimizer import OuterSGD
from zeroband.state.digest import digest_of

StartRun = Callable[..., Any]
Noise = Callable[..., Tensor]


def diloco(inner_steps: int = 1, lr: float = 0.7, momentum: float = 0.9) -> DilocoConfig:
    sgd = OuterSGDConfig(lr=lr, momentum=momentum, nesterov=momentum > 0)
    return DilocoConfig(type="diloco", inner_steps=inner_steps, optimizer=sgd)


def test_round_ends_every_inner_steps_and_with_the_run(start_run: StartRun, noise: Noise) -> None:
    run = start_run(diloco(inner_steps=3), "a", total_steps=7)
    reports = [run["a"].diloco_step(noise(step), 10) for step in range(7)]
    assert [report and report.round for report in reports] == [None, None, 1, None, None, 2, 3]
    assert [report.weights for report in reports if report] == [(30,), (30,), (10,)]
    assert run["a"].outer.progress.inner_step == 7
    assert run["a"].outer.progress.assigned == {}


@pytest.mark.defect(6)
@pytest.mark.parametrize("is_native", [True, False])
def test_two_nodes_take_the_nesterov_step_on_their_mean_bit_for_bit(
    start_run: StartRun, noise: Noise, monkeypatch: pytest.MonkeyPatch, is_native: bool
) -> None:
    monkeypatch.setattr(host_passes, "is_native", lambda: is_native)
    run = start_run(diloco(), "a", "b", lanes=3)
    theta, velocity = run["a"].params, torch.zeros(22)
    for round in range(1, 6):
        updates = {"a": noise(2 * round), "b": noise(2 * round + 1)}
        mean = sum((theta - (theta + update)) * 0.5 for update in updates.values())
        velocity = velocity * 0.9 + mean
        theta = theta - (velocity * 0.9 + mean) * 0.7
        reports = run.round(**updates)
        for name in ("a", "b"):
            assert torch.equal(run[name].params, theta)
            assert reports[name].state_digest == digest_of(theta, velocity)


def test_plain_average_sends_differences_where_they_are_rounded(start_run: StartRun, noise: Noise) -> None:
    run = start_run(diloco(lr=1.0, momentum=0.0), "a", "b", codec="int8")
    theta = run["a"].params
    run.round(a=noise(1, 1e-3), b=noise(2, 1e-3))
    assert torch.equal(run["a"].buffers[CONTRIBUTION], theta - (theta + noise(1, 1e-3)))


def test_plain_average_with_clipped_updates_moves_by_the_median_one(start_run: StartRun, noise: Noise) -> None:
    """It is the updates that are clipped, and not the parameters, whose mean a missing share would shrink."""
    config = diloco(lr=1.0, momentum=0.0).model_copy(update={"robust": ClipConfig(type="clip")})
    run, updates = start_run(config, "a", "b", "c"), {name: noise(n, 1e-3) for n, name in enumerate("abc")}
    theta, lengths = run["a"].params, {name: float(update.norm()) for name, update in updates.items()}
    reports = run.round(**(updates | {"c": 1000 * updates["c"]}))
    median = max(lengths["a"], lengths["b"])
    clipped = updates["a"] + updates["b"] + updates["c"] * median / lengths["c"]
    torch.testing.assert_close(run["a"].params, theta + clipped / 3, rtol=0, atol=1e-6)
    assert {report.trust for report in reports.values()} == {1.0}


def test_member_that_pulls_against_the_others_counts_nothing_in_the_end(start_run: StartRun, noise: Noise) -> None:
    config = diloco(lr=1.0, momentum=0.0).model_copy(update={"robust": TrimmedConfig(type="trimmed")})
    run, trusts = start_run(config, "a", "b", "c", "d"), list[dict[str, float | None]]()
    for seed in range(8):
        learned = noise(seed, 1e-2)
        honest = {name: learned + noise(100 * seed + n, 1e-3) for n, name in enumerate("abc", 1)}
        reports = run.round(**honest, d=-100 * learned)
        trusts.append({name: report.trust for name, report in reports.items()})
        assert len({report.state_digest for report in reports.values()}) == 1
    assert all(trust["a"] == trust["b"] == trust["c"] == 1.0 for trust in trusts)
    assert [trust["d"] for trust in trusts][-1] == 0.0 and trusts[0]["d"] != 0.0


@pytest.mark.parametrize("codec", ["fp32", "int8", "int4"])
def test_contribution_is_announced_as_large_as_it_is(start_run: StartRun, noise: Noise, codec: str) -> None:
    """Also where what encoding took before comes to it after it was written."""
    run = start_run(diloco(), "a", "b", codec=codec)
    for round in range(1, 4):
        run.round(a=noise(round), b=noise(10 + round))
        for name in ("a", "b"):
            sent = run[name].buffers[CONTRIBUTION]
            assert run[name].outer.exchange.largest == float(sent.abs().max()), (name, round)


def test_inner_parameters_restart_from_the_outer_ones(start_run: StartRun, noise: Noise) -> None:
    run = start_run(diloco(), "a", "b")
    run.round(a=noise(1), b=noise(2))
    assert torch.equal(run["a"].params, run["a"].buffers[PARAMS])
    assert torch.equal(run["a"].buffers[MOMENTUM], run["b"].buffers[MOMENTUM])
    assert run["a"].buffers[MOMENTUM].any()


def test_moments_stay_on_their_node_over_a_round(start_run: StartRun, noise: Noise) -> None:
    run = start_run(diloco(), "a", "b")
    for name, value in (("a", 1.0), ("b", 2.0)):
        for moment in run[name].inner.moments()["exp_avg"].values():
            moment.fill_(value)
    run.round(a=noise(1), b=noise(2))
    for name, value in (("a", 1.0), ("b", 2.0)):
        assert all((first == value).all() for first in run[name].inner.moments()["exp_avg"].values())


@pytest.mark.defect(11)
def test_joiner_goes_on_with_the_learning_rate_of_the_others(start_run: StartRun, noise: Noise) -> None:
    run = start_run(diloco(inner_steps=2), "a", total_steps=8)
    for seed in range(4):
        run["a"].diloco_step(noise(seed), 10)
    joiner = run.add("b")
    fresh = joiner.inner.lr
    joiner.receive(run["a"])
    assert joiner.inner.lr == run["a"].inner.lr != fresh


@pytest.mark.defect(9)
def test_copies_made_while_rounds_go_on_are_each_of_one_round(start_run: StartRun, noise: Noise) -> None:
    run = start_run(diloco(), "a")
    digests, copies, is_over = {0: run["a"].outer.state_digest}, [], threading.Event()

    def train() -> None:
        for round in range(1, 60):
            digests[round] = run["a"].take_step(noise(round), 10).state_digest
        is_over.set()

    def serve() -> None:
        while not is_over.is_set():
            copies.append(run["a"].outer.copy_state())

    run.together(train=train, serve=serve)
    assert len({copy.round for copy in copies}) > 5
    different = {}  # of tens of thousands, which would take 20 s to hash
    for copy in copies:
        parts = (section.numpy().tobytes() for section in copy.sections.values())
        different[copy.round, copy.state_digest, copy.record["progress"]["inner_step"], *parts] = copy
    for copy in different.values():
        assert digest_of(copy.sections[PARAMS], copy.sections[MOMENTUM]) == copy.state_digest == digests[copy.round]
        assert copy.record["progress"]["inner_step"] == copy.round


def test_no_rank_applies_before_the_first_one_keeps_copies_away(
    start_run: StartRun, noise: Noise, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only local rank 0 makes copies, so the other ranks have to wait until it holds the lock."""
    run = start_run(diloco(), "a")
    outer, order, apply, copying = run["a"].outer, list[str](), OuterSGD.apply, list[threading.Thread]()

    def barrier_(local: LocalMesh) -> None:
        copying.append(threading.Thread(target=outer.copy_state))
        copying[-1].start()
        copying[-1].join(0.05)
        order.append("barrier, copies kept away" if copying[-1].is_alive() else "barrier")
        barrier(local)

    def apply_(*arguments: Any, **more: Any) -> None:
        order.append("apply")
        apply(*arguments, **more)

    monkeypatch.setattr(module, "barrier", barrier_)
    monkeypatch.setattr("zeroband.elastic.rounds.outer_state.barrier", barrier_)
    monkeypatch.setattr(OuterSGD, "apply", apply_)
    run.round(a=noise(1))
    for thread in copying:
        thread.join(10)
        assert not thread.is_alive()
    assert order[order.index("apply") - 1] == "barrier, copies kept away"
