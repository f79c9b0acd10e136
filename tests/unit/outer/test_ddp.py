import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from zeroband.config.optim import AdamWConfig, MuonConfig, OptimConfig
from zeroband.config.outer import DdpConfig
from zeroband.state.digest import digest_of
from zeroband.state.round_state import RoundState

DDP = DdpConfig(type="ddp")
StartRun = Callable[..., Any]
Noise = Callable[..., Tensor]


def flat(run: Any, name: str, moment: str) -> Tensor:
    moments = run[name].inner.moments()[moment]
    return torch.cat([moments[key].reshape(-1) for key in sorted(moments)])


@pytest.mark.parametrize("scale", [0.1, 3.0], ids=["below the clip", "clipped"])
def test_two_nodes_train_as_one_with_the_mean_gradient_bit_for_bit(
    start_run: StartRun, noise: Noise, scale: float
) -> None:
    run, alone = start_run(DDP, "a", "b"), None
    for seed in range(5):
        gradients = {"a": noise(2 * seed, scale), "b": noise(2 * seed + 1, scale)}
        mean = gradients["a"] * 0.5 + gradients["b"] * 0.5
        norm = float(torch.linalg.vector_norm(mean, dtype=torch.float64))
        assert (norm > 1) == (scale > 1)
        alone = alone or run.add("alone")
        alone.set_gradient(mean * (1.0 / norm) if norm > 1 else mean)
        alone.inner.step()
        reports = run.round(**gradients)
        for name in ("a", "b"):
            assert torch.equal(run[name].params, alone.params)
            moments = (flat(run, "alone", "exp_avg"), flat(run, "alone", "exp_avg_sq"))
            assert reports[name].state_digest == digest_of(alone.params, *moments)
            assert torch.equal(flat(run, name, "exp_avg_sq"), flat(run, "alone", "exp_avg_sq"))


MUON = OptimConfig(adamw=AdamWConfig(lr=0.1), muon=MuonConfig(), warmup_steps=0, clip_norm=1.0)


def test_joiner_goes_on_with_the_moments_of_muon(start_run: StartRun, noise: Noise) -> None:
    """After a state that it fetched, and a round that it replayed."""
    run = start_run(DDP, "a", "b", optim=MUON)
    for seed in (0, 2):
        run.round(a=noise(seed), b=noise(seed + 1))
    assert run["a"].outer.sections == ("params", "momentum_buffer", "exp_avg_sq")
    joiner = run.add("c")
    assert joiner.receive(run["a"]) == run["a"].outer.state_digest
    for moment, shards in run["a"].inner.moments().items():
        assert shards.keys() == joiner.inner.moments()[moment].keys()
        assert all(torch.equal(joiner.inner.moments()[moment][name], shard) for name, shard in shards.items())
        assert all(shard.any() for shard in shards.values())
    run.round(a=noise(4), b=noise(5))
    run.round_with_joiner("c", a=noise(6), b=noise(7))
    run.round(a=noise(8), b=noise(9), c=noise(10))
    assert len({run[name].outer.state_digest for name in "abc"}) == 1
    assert torch.equal(joiner.params, run["a"].params)


def test_gradient_norm_is_the_nodes_common_one_before_clipping(start_run: StartRun, noise: Noise) -> None:
    run = start_run(DDP, "a", "b")
    gradients = {"a": noise(1, 3.0), "b": noise(2, 3.0)}

    def norm_of(name: str) -> float | None:
        run[name].set_gradient(gradients[name])
        run[name].outer.learned(10, 0.0)
        return run[name].outer.sync_gradients(0, 10)

    norms = run.together(a=lambda: norm_of("a"), b=lambda: norm_of("b"))
    expected = (gradients["a"] * 0.5 + gradients["b"] * 0.5).double().norm().item()
    assert norms == {"a": pytest.approx(expected), "b": norms["a"]}


def test_copy_holds_the_moments_of_the_step_that_ended(start_run: StartRun, noise: Noise) -> None:
    run = start_run(DDP, "a")
    run.round(a=noise(1))
    run.round(a=noise(2))
    copy = run["a"].outer.copy_state()
    assert (copy.round, copy.state_digest) == (2, run["a"].outer.state_digest)
    assert torch.equal(copy.sections["params"], run["a"].params)
    for moment in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(copy.sections[moment], flat(run, "a", moment))


def test_copy_is_no_view_of_the_state_that_goes_on(start_run: StartRun, noise: Noise) -> None:
    run = start_run(DDP, "a")
    run.round(a=noise(2))
    copy = run["a"].outer.copy_state()
    run.round(a=noise(3))
    assert digest_of(*copy.sections.values()) == copy.state_digest != run["a"].outer.state_digest


def test_copies_that_joiners_ask_for_between_two_steps_are_whole(start_run: StartRun, noise: Noise) -> None:
    run = start_run(DDP, "a", total_steps=1_000_000)
    copies: list[RoundState] = []

    def train() -> None:
        until_s = time.monotonic() + 20
        while len(copies) < 30 and time.monotonic() < until_s:
            run["a"].take_step(noise(1), 10)

    def ask() -> None:
        copies.extend(run["a"].outer.copy_state() for _ in range(10))

    run.together(a=train, b=ask, c=ask, d=ask)
    assert len(copies) == 30
    assert all(digest_of(*copy.sections.values()) == copy.state_digest for copy in copies)
