import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from zeroband.config.outer import DilocoConfig, OuterSGDConfig
from zeroband.kernels import host_passes
from zeroband.kernels.codec import CODECS, Codec
from zeroband.outer.outer_optimizer import OuterOptimizer, OuterSGD, PlainAverage, build_outer_optimizer

N, ROUNDS = 1003, 20
CONFIGS = [
    OuterSGDConfig(lr=0.7, momentum=0.9),
    OuterSGDConfig(lr=0.7, momentum=0.9, nesterov=False),
    OuterSGDConfig(lr=0.3, momentum=0.95, momentum_warmup_rounds=7),
    OuterSGDConfig(lr=0.7, momentum=0.0, nesterov=False),
]
AVERAGE = DilocoConfig(type="diloco", optimizer=OuterSGDConfig(lr=1.0, momentum=0.0))


def noise(seed: int, n: int = N) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def run(optimizer: OuterOptimizer, slices: int = 1, n: int = N) -> tuple[Tensor, Tensor]:
    """Outer parameters and momentum after 20 rounds, each applied in so many slices."""
    outer, momentum = noise(0, n), torch.zeros(n)
    bounds = [n * i // slices for i in range(slices + 1)]
    for round in range(1, ROUNDS + 1):
        mean = noise(round, n)
        for part in (slice(a, b) for a, b in itertools.pairwise(bounds)):
            optimizer.apply(outer[part], momentum[part], mean[part], outer_step=round)
    return outer, momentum


def reference(config: OuterSGDConfig) -> tuple[Tensor, Tensor]:
    """Nesterov momentum as it is written, in numpy float32, one rounding for each operation."""
    theta, v, lr = noise(0).numpy().copy(), np.zeros(N, np.float32), np.float32(config.lr)
    for round in range(1, ROUNDS + 1):
        warm = min(1.0, round / (config.momentum_warmup_rounds + 1))
        mu = np.float32(config.momentum * warm)
        delta = noise(round).numpy()
        v = mu * v + delta
        theta = theta - lr * (delta + mu * v if config.nesterov else v)
    assert theta.dtype == np.float32
    return torch.from_numpy(theta), torch.from_numpy(v)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_outer_sgd_equals_the_reference_bit_for_bit(config: OuterSGDConfig) -> None:
    outer, momentum = run(OuterSGD(config))
    expected_outer, expected_momentum = reference(config)
    assert torch.equal(outer, expected_outer)
    assert torch.equal(momentum, expected_momentum)


@pytest.mark.parametrize("slices", [2, 3, 7])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_outer_sgd_gives_the_same_bits_however_it_is_sliced(config: OuterSGDConfig, slices: int) -> None:
    whole, sliced = run(OuterSGD(config)), run(OuterSGD(config), slices)
    assert all(torch.equal(a, b) for a, b in zip(whole, sliced, strict=True))


def test_outer_sgd_gives_the_same_bits_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(OuterSGD(CONFIGS[0]))
    monkeypatch.setattr(host_passes, "is_native", lambda: False)
    monkeypatch.setattr(host_passes, "_CHUNK", 10)
    assert all(torch.equal(a, b) for a, b in zip(whole, run(OuterSGD(CONFIGS[0])), strict=True))


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.momentum_warmup_rounds == 0], ids=str)
def test_outer_sgd_is_torchs_sgd_within_rounding(config: OuterSGDConfig) -> None:
    theta = torch.nn.Parameter(noise(0))
    sgd = torch.optim.SGD([theta], lr=config.lr, momentum=config.momentum, nesterov=config.nesterov)
    for round in range(1, ROUNDS + 1):
        theta.grad = noise(round)
        sgd.step()
    ours, _ = run(OuterSGD(config))
    assert (ours - theta.detach()).abs().max() <= 1e-6 * theta.detach().abs().max()


def test_momentum_grows_to_its_full_value_over_the_warm_up() -> None:
    optimizer = OuterSGD(OuterSGDConfig(momentum=0.8, momentum_warmup_rounds=3))
    assert [optimizer.momentum_at(round) for round in (1, 2, 3, 4, 5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])
    assert OuterSGD(OuterSGDConfig(momentum=0.8)).momentum_at(1) == 0.8


def test_outer_sgd_contributes_the_way_back_to_the_outer_parameters() -> None:
    outer, inner, out = noise(1), noise(2), torch.empty(N)
    OuterSGD(OuterSGDConfig()).contribution(outer, inner, out)
    assert torch.equal(out, outer - inner)


def test_plain_average_of_one_node_keeps_every_bit() -> None:
    outer, inner, momentum, sent = noise(1), 1e-7 * noise(2), torch.zeros(N), torch.empty(N)
    optimizer = build_outer_optimizer(AVERAGE, CODECS["fp32"])
    optimizer.contribution(outer, inner, sent)
    optimizer.apply(outer, momentum, sent, outer_step=1)
    assert torch.equal(outer, inner)
    assert not momentum.any()
    assert not torch.equal(noise(1) - (noise(1) - inner), inner)  # what the pseudo-gradient would have cost


def test_plain_average_is_taken_only_for_lr_1_without_momentum() -> None:
    for lr, momentum, kind in ((1.0, 0.0, PlainAverage), (1.0, 0.9, OuterSGD), (0.7, 0.0, OuterSGD)):
        sgd = OuterSGDConfig(lr=lr, momentum=momentum)
        assert type(build_outer_optimizer(DilocoConfig(type="diloco", optimizer=sgd), CODECS["fp32"])) is kind


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_average_learns_what_is_small_beside_the_parameters_whatever_encodes_it(codec: Codec) -> None:
    """Less than half a quantum of a block of parameters, round after round."""
    optimizer, start = build_outer_optimizer(AVERAGE, codec), 0.02 * noise(0)
    outer, momentum, learned = start.clone(), torch.zeros(N), 2e-5 * noise(1).sign()
    for round in range(1, ROUNDS + 1):
        sent = torch.empty(N)
        optimizer.contribution(outer, outer + learned, sent)
        optimizer.apply(outer, momentum, codec.decode(codec.encode(sent), N), outer_step=round)
    assert ((outer - start) / (ROUNDS * learned)).sub(1).abs().max() < 0.01
