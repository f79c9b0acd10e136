"""AdamW with its schedule: the update itself, the state's round trip, late joiners."""

import json
import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zeroband.config.optim import AdamWConfig, LinearSchedule, OptimConfig
from zeroband.errors import ConfigError
from zeroband.model.optim import InnerOptimizer, StepRule, sign_step

OPTIM = OptimConfig(adamw=AdamWConfig(lr=0.1), schedule=LinearSchedule(type="linear"), warmup_steps=2)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(4, 3, generator=generator))
        self.norm = nn.Parameter(torch.randn(3, generator=generator))


def optimizer_of(model: nn.Module, optim: OptimConfig = OPTIM) -> InnerOptimizer:
    return InnerOptimizer(model, optim, total_steps=20)


def train(model: nn.Module, optimizer: InnerOptimizer | torch.optim.Optimizer, first: int, steps: int) -> None:
    """Steps on gradients that depend on the step's number alone."""
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad()


def copied(state: dict[str, Any]) -> dict[str, Any]:
    moments = {moment: {name: m.clone() for name, m in of.items()} for moment, of in state["moments"].items()}
    return {**state, "moments": moments}


def test_step_equals_adamw_written_out() -> None:
    model = Tiny()
    expected = {name: p.detach().clone().double() for name, p in model.named_parameters()}
    first = {name: torch.zeros_like(p) for name, p in expected.items()}
    second = {name: torch.zeros_like(p) for name, p in expected.items()}
    config = OPTIM.adamw
    optimizer = optimizer_of(model)
    for step in range(5):
        lr = optimizer.lr
        generator = torch.Generator().manual_seed(step)
        for name, parameter in expected.items():
            gradient = torch.randn(parameter.shape, generator=generator).double()
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
        train(theirs, reference, step, 1)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_parameter_without_gradient_stays_as_it_is() -> None:
    model = Tiny()
    optimizer, before = optimizer_of(model), model.matrix.detach().clone()
    model.norm.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(model.matrix, before) and not torch.equal(model.norm, Tiny().norm)


@pytest.mark.parametrize(
    "kind", [{}, {"slice_exact": True}, {"rule": "sign"}], ids=["fused", "slice by slice", "signs"]
)
def test_step_whose_gradient_is_not_finite_moves_the_schedule_alone(kind: dict[str, Any]) -> None:
    model = Tiny()
    optimizer = InnerOptimizer(model, OPTIM, total_steps=20, **kind)
    train(model, optimizer, 0, 1)
    before = [value.detach().clone() for value in (*model.parameters(), *optimizer.named_moments().values())]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    updates = optimizer.update_count
    optimizer.step(found_inf=torch.ones(()))
    after = [*model.parameters(), *optimizer.named_moments().values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert (optimizer.step_count, optimizer.update_count) == (2, updates)


@pytest.mark.parametrize("slice_exact", [False, True])
def test_finite_gradient_makes_the_same_step_whether_or_not_that_is_asked(slice_exact: bool) -> None:
    asked, plain = Tiny(), Tiny()
    for model, found_inf in ((asked, torch.zeros(())), (plain, None)):
        optimizer = InnerOptimizer(model, OPTIM, total_steps=20, slice_exact=slice_exact)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(found_inf)
        assert optimizer.update_count == 1
    assert all(torch.equal(a, b) for a, b in zip(asked.parameters(), plain.parameters(), strict=True))
    assert not torch.equal(asked.matrix, Tiny().matrix)


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


def test_loaded_state_continues_bit_for_bit() -> None:
    model = Tiny()
    optimizer = optimizer_of(model)
    train(model, optimizer, 0, 3)
    weights, state = {k: v.clone() for k, v in model.state_dict().items()}, copied(optimizer.state_dict())
    train(model, optimizer, 3, 3)

    resumed = Tiny()
    resumed.load_state_dict(weights)
    resumed_optimizer = optimizer_of(resumed)
    resumed_optimizer.load_state_dict(state)
    train(resumed, resumed_optimizer, 3, 3)

    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))
    ours, theirs = optimizer.state_dict(), resumed_optimizer.state_dict()
    assert (ours["step_count"], ours["update_count"]) == (theirs["step_count"], theirs["update_count"]) == (6, 6)
    for moment, shards in ours["moments"].items():
        assert all(torch.equal(shard, theirs["moments"][moment][name]) for name, shard in shards.items())


def test_load_copies_and_does_not_alias() -> None:
    model, donor = Tiny(), Tiny()
    donor_optimizer, optimizer = optimizer_of(donor), optimizer_of(model)
    train(donor, donor_optimizer, 0, 1)
    optimizer.load_state_dict(donor_optimizer.state_dict())
    before = optimizer.moments()["exp_avg"]["matrix"].clone()
    train(donor, donor_optimizer, 1, 1)
    assert torch.equal(optimizer.moments()["exp_avg"]["matrix"], before)


def test_load_refuses_another_model_and_changes_nothing() -> None:
    optimizer = optimizer_of(Tiny())
    state = copied(optimizer.state_dict())
    state["moments"]["exp_avg"] = {"norm": torch.ones(5), "matrix": torch.ones(4, 3)}
    with pytest.raises(ConfigError, match=r"exp_avg.norm has shape \(5,\), needs \(3,\)"):
        optimizer.load_state_dict(state)
    assert optimizer.moments()["exp_avg"]["matrix"].count_nonzero() == 0
    del state["moments"]["exp_avg"]["norm"]
    with pytest.raises(ConfigError, match=r"exp_avg.norm has shape None"):
        optimizer.load_state_dict(state)


def test_moments_exist_before_the_first_step_and_are_live() -> None:
    model, donor = Tiny(), Tiny()
    donor_optimizer, optimizer = optimizer_of(donor), optimizer_of(model)
    train(donor, donor_optimizer, 0, 3)
    model.load_state_dict(donor.state_dict())
    for name, moment in donor_optimizer.named_moments().items():
        optimizer.named_moments()[name].copy_(moment)
    optimizer.seek(3, update_count=3)
    for side, side_optimizer in ((donor, donor_optimizer), (model, optimizer)):
        train(side, side_optimizer, 3, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), donor.parameters(), strict=True))


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


def test_forget_moments_continues_as_a_fresh_adam_at_the_same_rate() -> None:
    model = Tiny()
    optimizer = optimizer_of(model)
    train(model, optimizer, 0, 5)
    rate = optimizer.lr
    optimizer.forget_moments()
    assert (optimizer.step_count, optimizer.update_count, optimizer.lr) == (5, 0, rate)
    before = model.norm.detach().clone()
    train(model, optimizer, 5, 1)
    moved = (model.norm.detach() - before).abs()
    assert all(math.isclose(value, rate, rel_tol=1e-4) for value in moved.tolist())


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


def test_rule_without_moments_keeps_its_place_on_the_schedule_alone() -> None:
    optimizer = InnerOptimizer(Tiny(), OPTIM, total_steps=20, rule="sign")
    assert (optimizer.moments(), optimizer.named_moments(), optimizer.moment_names) == ({}, {}, ())
    optimizer.seek(7)
    again = InnerOptimizer(Tiny(), OPTIM, total_steps=20, rule="sign")
    again.load_state_dict(optimizer.state_dict())
    again.forget_moments()
    assert (again.step_count, again.lr) == (7, optimizer.lr)


def test_parameters_without_a_gradient_are_not_decayed() -> None:
    model = Tiny()
    before = model.matrix.detach().clone()
    InnerOptimizer(model, OPTIM, total_steps=20, rule="sign").step()
    assert torch.equal(model.matrix, before)


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
