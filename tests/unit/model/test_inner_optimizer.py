"""AdamW with its schedule: the update itself, the state's round trip, late joiners."""

import json
import logging
import math
from contextlib import nullcontext

import pytest
import torch
from tests.unit.model.tiny import KINDS, OPTIM, Tiny, are_equal, made, set_gradients, take_over, train
from torch import Tensor, nn

from zeroband.config.optim import OptimConfig
from zeroband.kernels.one_rounding import OneRounding
from zeroband.model.optim import InnerOptimizer, StepRule, sign_step

EACH = pytest.mark.parametrize("kind", KINDS)


def optimizer_of(model: nn.Module) -> InnerOptimizer:
    return InnerOptimizer(model, OPTIM, total_steps=20)


def test_step_equals_adamw_written_out() -> None:
    model = Tiny()
    expected = {name: p.detach().clone().double() for name, p in model.named_parameters()}
    first = {name: torch.zeros_like(p) for name, p in expected.items()}
    second = {name: torch.zeros_like(p) for name, p in expected.items()}
    config = OPTIM.adamw
    optimizer = optimizer_of(model)
    for step in range(5):
        lr = optimizer.lr
        set_gradients(model, step)
        for name, parameter in expected.items():
            gradient = model.get_parameter(name).grad.double()
            first[name] = config.betas[0] * first[name] + (1 - config.betas[0]) * gradient
            second[name] = config.betas[1] * second[name] + (1 - config.betas[1]) * gradient**2
            corrected = first[name] / (1 - config.betas[0] ** (step + 1))
            root = (second[name] / (1 - config.betas[1] ** (step + 1))).sqrt()
            decay = config.weight_decay if name == "matrix" else 0.0
            expected[name] = parameter * (1 - lr * decay) - lr * corrected / (root + config.eps)
        train(model, optimizer, step, 1)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach().double(), expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("slice_exact", [False, True])
def test_step_is_that_of_torchs_class_to_the_last_bit(slice_exact: bool) -> None:
    ours, theirs = Tiny(), Tiny()
    optimizer = InnerOptimizer(ours, OPTIM, total_steps=20, slice_exact=slice_exact)
    config = OPTIM.adamw
    groups = [
        {"params": [theirs.matrix], "weight_decay": config.weight_decay},
        {"params": [theirs.norm], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps, fused=not slice_exact)
    for step in range(5):
        for group in reference.param_groups:
            group["lr"] = optimizer.lr
        train(ours, optimizer, step, 1)
        with OneRounding() if slice_exact else nullcontext():
            train(theirs, reference, step, 1)
    assert are_equal(ours, theirs)


@EACH
def test_parameter_without_gradient_stays_as_it_is_and_is_not_decayed(kind: str) -> None:
    model, optimizer = made(kind)
    fresh, _ = made(kind)
    model.norm.grad = torch.ones_like(model.norm)
    optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, fresh.get_parameter(name))}
    assert moved == {"norm"}


@EACH
def test_step_whose_gradient_is_not_finite_moves_the_schedule_alone(kind: str) -> None:
    model, optimizer = made(kind)
    train(model, optimizer, 0, 1)
    before = [value.detach().clone() for value in (*model.parameters(), *optimizer.named_moments().values())]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    updates = optimizer.update_count
    optimizer.step(found_inf=torch.ones(()))
    after = [*model.parameters(), *optimizer.named_moments().values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert (optimizer.step_count, optimizer.update_count) == (2, updates)


@EACH
def test_finite_gradient_makes_the_same_step_whether_or_not_that_is_asked(kind: str) -> None:
    (asked, asked_optimizer), (plain, plain_optimizer), (fresh, _) = made(kind), made(kind), made(kind)
    for step in (0, 1):
        set_gradients(asked, step)
        set_gradients(plain, step)
        asked_optimizer.step(torch.zeros(()))
        plain_optimizer.step()
    assert asked_optimizer.update_count == plain_optimizer.update_count == (0 if kind == "signs" else 2)
    assert are_equal(asked, plain)
    assert not any(torch.equal(a, b) for a, b in zip(asked.parameters(), fresh.parameters(), strict=True))


@EACH
def test_state_that_was_taken_over_goes_on_bit_for_bit(kind: str) -> None:
    (donor, its), (model, optimizer) = made(kind), made(kind)
    train(donor, its, 0, 3)
    take_over(model, optimizer, donor, its)
    for one, side in ((donor, its), (model, optimizer)):
        train(one, side, 3, 3)
        assert (side.step_count, side.update_count) == (6, 0 if kind == "signs" else 6)
    assert are_equal(model, donor)
    moments = zip(optimizer.named_moments().values(), its.named_moments().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in moments)


@EACH
def test_forgotten_moments_are_those_of_a_fresh_optimizer_at_the_same_rate(kind: str) -> None:
    (model, optimizer), (fresh, begun) = made(kind), made(kind)
    train(model, optimizer, 0, 3)
    rate = optimizer.lr
    optimizer.forget_moments()
    assert (optimizer.step_count, optimizer.update_count, optimizer.lr) == (3, 0, rate)
    model.load_state_dict(fresh.state_dict())
    begun.seek(3)
    for one, side in ((model, optimizer), (fresh, begun)):
        train(one, side, 3, 2)
    assert are_equal(model, fresh)


def test_lr_is_that_of_the_next_step() -> None:
    model = Tiny()
    optimizer = optimizer_of(model)
    rates: list[float] = []
    for step in range(4):
        rates.append(optimizer.lr)
        train(model, optimizer, step, 1)
    assert rates == pytest.approx([0.05, 0.1, 0.1, 0.1 * 17 / 18])
    assert optimizer.step_count == optimizer.update_count == 4


def test_zero_grad_drops_gradients() -> None:
    model = Tiny()
    model.matrix.grad = torch.ones(4, 3)
    optimizer_of(model).zero_grad()
    assert model.matrix.grad is None


def test_seek_moves_the_schedule_but_not_the_age_of_the_moments() -> None:
    model = Tiny()
    optimizer = optimizer_of(model)
    optimizer.seek(11)
    assert optimizer.lr == pytest.approx(0.1 * 9 / 18)
    before = model.norm.detach().clone()
    train(model, optimizer, 0, 1)
    assert (optimizer.step_count, optimizer.update_count) == (12, 1)
    moved = (model.norm.detach() - before).abs()  # a fresh Adam moves each value by the learning rate
    assert all(math.isclose(value, 0.05, rel_tol=1e-4) for value in moved.tolist())


def test_kernels_of_adamw_round_in_orders_of_their_own() -> None:
    """Why nodes that share one step (DDP) must compute on one kind of device: each kind has its own kernel."""
    one, other = (nn.Linear(64, 64) for _ in range(2))
    other.load_state_dict(one.state_dict())
    train(one, InnerOptimizer(one, OPTIM, total_steps=20, slice_exact=False), 0, 5)
    train(other, InnerOptimizer(other, OPTIM, total_steps=20, slice_exact=True), 0, 5)
    assert torch.allclose(one.weight, other.weight, rtol=1e-3) and not torch.equal(one.weight, other.weight)


@pytest.mark.parametrize("rule", ["adamw", "sign"])
def test_vectors_are_decayed_where_that_is_asked_for(rule: StepRule) -> None:
    moved: dict[bool, Tensor] = {}
    for decays in (False, True):
        model = Tiny()
        adamw = OPTIM.adamw.model_copy(update={"decay_vectors": decays})
        optimizer = InnerOptimizer(model, OPTIM.model_copy(update={"adamw": adamw}), total_steps=20, rule=rule)
        before, lr = model.norm.detach().clone(), optimizer.lr
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        moved[decays] = before - model.norm.detach()
    torch.testing.assert_close(moved[True] - moved[False], lr * adamw.weight_decay * before, rtol=1e-3, atol=1e-7)


def test_step_by_signs_decays_matrices_and_moves_every_value_by_the_learning_rate() -> None:
    model = Tiny()
    optimizer = InnerOptimizer(model, OPTIM, total_steps=20, rule="sign")
    before, lr = {name: p.detach().clone() for name, p in model.named_parameters()}, optimizer.lr
    signs = {name: torch.tensor([1.0, -1.0, 0.0]).expand_as(p) for name, p in before.items()}
    for name, parameter in model.named_parameters():
        parameter.grad = 1e-20 * signs[name]
    optimizer.step()
    for name, parameter in model.named_parameters():
        kept = 1.0 - lr * (OPTIM.adamw.weight_decay if name == "matrix" else 0.0)
        assert torch.equal(parameter.detach(), before[name] * kept - lr * signs[name])
    assert (optimizer.step_count, optimizer.update_count) == (1, 0)


def test_rule_of_signs_has_no_moments() -> None:
    optimizer = InnerOptimizer(Tiny(), OPTIM, total_steps=20, rule="sign")
    assert (optimizer.moments(), optimizer.named_moments(), optimizer.moment_names) == ({}, {}, ())


@pytest.mark.parametrize("slices", [1, 3])
def test_steps_by_signs_do_not_depend_on_slices(slices: int) -> None:
    generator = torch.Generator().manual_seed(0)
    theta, update = torch.randn(1000, generator=generator), torch.randn(1000, generator=generator)
    expected = theta - 0.003 * update.sign()
    for part, q in zip(theta.chunk(slices), update.chunk(slices), strict=True):
        sign_step(part, q, lr=0.003)
    assert torch.equal(theta, expected)


@pytest.mark.parametrize(("then", "now", "jumps"), [(6, 6, False), (6, 12, True), (12, 6, True)])
def test_a_rate_that_jumps_at_resume_is_told(
    then: int, now: int, jumps: bool, caplog: pytest.LogCaptureFixture
) -> None:
    optim = OptimConfig.model_validate({"warmup_steps": 0})
    before, after = (InnerOptimizer(nn.Linear(2, 2), optim, total_steps=steps) for steps in (then, now))
    before.seek(5)
    after.seek(5)
    with caplog.at_level(logging.WARNING):
        after.restore(json.loads(json.dumps(before.counters())), None)
    told = [record.__dict__["fields"] for record in caplog.records if "the learning rate jumps" in record.message]
    assert [(one["step"], one["was"], one["is"]) for one in told] == ([(5, before.lr, after.lr)] if jumps else [])
    after.restore({"step_count": 5, "update_count": 3}, None)  # as earlier versions saved it
    assert after.update_count == 3
