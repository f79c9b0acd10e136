"""Muon beside AdamW: torch's class, the iteration written out, bits that nothing but the values decides."""

import math
from contextlib import nullcontext
from fractions import Fraction
from typing import Any

import pytest
import torch
from tests.unit.model.tiny import SHAPES, Matrices, made, muon_optim, set_gradients, train, values
from torch import Tensor, nn

from zeroband.config.model import LlamaConfig
from zeroband.config.optim import MuonConfig
from zeroband.errors import ConfigError
from zeroband.kernels.one_rounding import OneRounding
from zeroband.model import Transformer
from zeroband.model.muon import muon_parameters, muon_step, orthogonalized, orthogonalized_exactly
from zeroband.model.optim import InnerOptimizer


def written_out(matrix: Tensor, steps: int = 5) -> Tensor:
    """The quintic on the singular values, in float64."""
    left, s, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return left @ torch.diag(s) @ right


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("orthogonal", [orthogonalized, orthogonalized_exactly])
def test_iteration_is_the_quintic_on_singular_values(orthogonal: Any, shape: tuple[int, int]) -> None:
    for scale in (1e-6, 1.0, 1e6):
        found = orthogonal(scale * values(*shape), steps=5)
        torch.testing.assert_close(found.double(), written_out(values(*shape)), rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_iteration_in_bfloat16_is_that_of_torchs_class_to_the_last_bit(shape: tuple[int, int]) -> None:
    theirs = nn.Parameter(torch.zeros(shape))
    theirs.grad = values(*shape)
    torch.optim.Muon([theirs], lr=1.0, weight_decay=0.0, momentum=0.0, adjust_lr_fn="original").step()
    ours = orthogonalized(values(*shape).bfloat16(), steps=5).float() * math.sqrt(max(1.0, shape[0] / shape[1]))
    assert torch.equal(-theirs.detach(), ours)


@pytest.mark.parametrize("orthogonal", [orthogonalized, orthogonalized_exactly])
def test_stack_is_each_of_its_matrices_and_zeros_stay_zeros(orthogonal: Any) -> None:
    stack = values(4, 6, 5)
    stack[2] = 0.0
    found = orthogonal(stack, steps=5)
    assert not found[2].any()
    for matrix, expected in zip(found, stack, strict=True):
        torch.testing.assert_close(matrix, orthogonal(expected, steps=5), rtol=1e-5, atol=1e-6)


def in_integers(matrix: Tensor, steps: int = 5) -> Tensor:
    """The exact iteration of a wide matrix with products in Python's integers, which round nothing."""
    grid = 1 << 25
    x = [[Fraction(value) for value in row] for row in matrix.tolist()]
    largest, bits = max(abs(value) for row in x for value in row), (62 - matrix.numel().bit_length()) // 2
    squares = sum(round(float(value) / float(largest) * 2.0**bits) ** 2 for row in x for value in row)
    norm = math.sqrt(squares) * 2.0**-bits * float(largest)
    held = [[round(float(value) / norm * grid) for value in row] for row in x]

    def product(a: list[list[int]], b: list[list[int]]) -> list[list[float]]:
        sums = [[[u * v for u, v in zip(row, column, strict=True)] for column in zip(*b, strict=True)] for row in a]
        assert all(sum(map(abs, terms)) < 2**53 for row in sums for terms in row), "no order of these sums rounds"
        return [[sum(terms) / grid**2 for terms in row] for row in sums]

    for _ in range(steps):
        transposed = [list(column) for column in zip(*held, strict=True)]
        gram = [[round(value * grid) for value in row] for row in product(held, transposed)]
        squared = product(gram, gram)
        polynomial = [
            [round((s * 2.0315 + g / grid * -4.7750) * grid) for s, g in zip(*rows, strict=True)]
            for rows in zip(squared, gram, strict=True)
        ]
        moved = product(polynomial, held)
        held = [
            [round((m + h / grid * 3.4445) * grid) for m, h in zip(*rows, strict=True)]
            for rows in zip(moved, held, strict=True)
        ]
    return torch.tensor([[value / grid for value in row] for row in held], dtype=torch.float64).float()


@pytest.mark.parametrize("shape", [(5, 8), (6, 7), (12, 30)])
def test_exact_iteration_is_that_of_integers_to_the_last_bit(shape: tuple[int, int]) -> None:
    for seed in range(3):
        matrix = values(*shape, seed=seed)
        assert torch.equal(orthogonalized_exactly(matrix, steps=5), in_integers(matrix))
        assert torch.equal(orthogonalized_exactly(matrix.T, steps=5), in_integers(matrix).T)


def stepped(order: Tensor, *, slice_exact: bool) -> Tensor:
    """A matrix after one step, with its columns in another order meanwhile."""
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(values(48, 200)[:, order]))
    model.weight.grad = values(48, 200, seed=1)[:, order]
    InnerOptimizer(model, muon_optim(), total_steps=5, slice_exact=slice_exact).step()
    return model.weight.detach()[:, order.argsort()]


def test_exact_step_does_not_depend_on_the_order_of_sums() -> None:
    """As threads, ranks and processors have their own."""
    orders = torch.arange(200), torch.randperm(200, generator=torch.Generator().manual_seed(2))
    exact, rounded = ([stepped(order, slice_exact=exact) for order in orders] for exact in (True, False))
    assert torch.equal(*exact)
    assert not torch.equal(*rounded), "an order that changes nothing"


@pytest.mark.parametrize("kind", [{}, {"adjust_lr": "original"}, {"nesterov": False, "lr": 0.05, "weight_decay": 0.3}])
@pytest.mark.parametrize("slice_exact", [False, True])
def test_steps_are_those_of_torchs_muon_and_adamw(kind: dict[str, Any], slice_exact: bool) -> None:
    ours, theirs, optim = Matrices(), Matrices(), muon_optim(**kind)
    muon, adamw = optim.muon, optim.adamw
    assert muon is not None
    optimizer = InnerOptimizer(ours, optim, total_steps=20, slice_exact=slice_exact)
    stacks = [nn.Parameter(expert.clone()) for expert in theirs.experts.detach()]
    matrices = torch.optim.Muon(
        [theirs.tall, theirs.wide, theirs.square, *stacks],
        weight_decay=adamw.weight_decay if muon.weight_decay is None else muon.weight_decay,
        nesterov=muon.nesterov,
        adjust_lr_fn=muon.adjust_lr,
    )
    vectors = {"params": [theirs.norm], "weight_decay": 0.0}
    rest = [{"params": [theirs.embed.weight, theirs.conv.weight], "weight_decay": adamw.weight_decay}, vectors]
    others = torch.optim.AdamW(rest, betas=adamw.betas, eps=adamw.eps, fused=not slice_exact)
    for step in range(5):
        rates = {matrices: optimizer.lr if optimizer.lr_muon is None else optimizer.lr_muon, others: optimizer.lr}
        train(ours, optimizer, step, 1)
        set_gradients(theirs, step)
        assert theirs.experts.grad is not None
        for expert, gradient in zip(stacks, theirs.experts.grad, strict=True):
            expert.grad = gradient
        for reference, lr in rates.items():
            for group in reference.param_groups:
                group["lr"] = lr
            with OneRounding() if slice_exact else nullcontext():
                reference.step()
    theirs.experts.data = torch.stack([expert.detach() for expert in stacks])
    before, after = dict(Matrices().named_parameters()), dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        if name in muon_parameters(ours):  # torch's iterates in bfloat16
            moved = (after[name] - before[name]).abs().max().item()
            torch.testing.assert_close(parameter, after[name], rtol=0.0, atol=0.02 * moved)
        else:
            assert torch.equal(parameter, after[name])


def test_moved_as_far_as_by_adamw() -> None:
    """What the scale of match_rms_adamw promises: 0.2 of the learning rate for each value (arXiv:2502.16982)."""
    weight = nn.Parameter(torch.zeros(64, 256))
    weight.grad = values(64, 256)
    muon_step({"w": weight}, {"w": torch.zeros(64, 256)}, MuonConfig(), lr=0.5, weight_decay=0.0)
    assert 0.15 * 0.5 < weight.detach().square().mean().sqrt() < 0.25 * 0.5


def test_muon_is_for_the_matrices_between_embedding_and_head() -> None:
    for tied in (False, True):
        model = Transformer(LlamaConfig(d_model=8, n_layers=1, n_heads=2, tie_embeddings=tied), 16)
        found = muon_parameters(model)
        assert {name for name, p in model.named_parameters() if p.ndim == 2} - found.keys() == (
            {"embed_tokens.weight"} if tied else {"embed_tokens.weight", "lm_head.weight"}
        )
        assert len(found) == 7
    assert muon_parameters(Matrices()).keys() == {"tall", "wide", "square", "experts"}


def test_model_without_matrices_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[optim.muon\] applies to matrices .* drop the section"):
        InnerOptimizer(nn.Sequential(nn.Embedding(3, 2), nn.LayerNorm(2)), muon_optim(), total_steps=5)


def test_matrices_have_one_moment() -> None:
    model, optimizer = made("muon")
    second = {name for name, _ in model.named_parameters()} - muon_parameters(model).keys()
    assert {moment: of.keys() for moment, of in optimizer.moments().items()} == {
        "momentum_buffer": dict(model.named_parameters()).keys(),
        "exp_avg_sq": second,
    }
    assert len(optimizer.named_moments()) == len(list(model.parameters())) + len(second)


def test_rate_of_its_own_follows_the_same_schedule() -> None:
    apart, common = (InnerOptimizer(Matrices(), muon_optim(lr=lr), total_steps=20) for lr in (0.06, None))
    assert common.lr_muon is None
    for step in (0, 1, 10, 19):
        apart.seek(step)
        assert apart.lr_muon == pytest.approx(3 * apart.lr) and apart.lr > 0
