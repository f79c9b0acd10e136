"""The user's optimizer and schedule, put to any inner step."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, ReduceLROnPlateau, SequentialLR

from zeroband.dropin.inner import ScheduledOptimizer, build_optimizer, move_schedulers
from zeroband.errors import ConfigError

RECURSIVE = partial(CosineAnnealingLR, T_max=20)
ALSO_BETAS = partial(OneCycleLR, max_lr=0.5, total_steps=20)


def scheduled(schedule: Any = RECURSIVE) -> ScheduledOptimizer:
    return ScheduledOptimizer(torch.optim.AdamW([nn.Parameter(torch.ones(3))], lr=0.1), schedule)


def options(inner: ScheduledOptimizer) -> dict[str, Any]:
    return {name: value for name, value in inner.optimizer.param_groups[0].items() if name != "params"}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # there are no steps here
@pytest.mark.parametrize("schedule", [RECURSIVE, ALSO_BETAS])
@pytest.mark.parametrize("before", [0, 3, 12])
def test_seek_leads_to_where_the_steps_would_have_led(schedule: Any, before: int) -> None:
    stepped, sought = scheduled(schedule), scheduled(schedule)
    for _ in range(7):
        stepped.advance()
    for _ in range(before):
        sought.advance()
    sought.seek(7)
    assert sought.step_count == 7
    assert options(sought) == options(stepped)
    stepped.advance()
    sought.advance()
    assert options(sought) == options(stepped) != options(scheduled(schedule))


@pytest.mark.filterwarnings("error")
def test_seek_does_not_warn_of_steps_that_others_made() -> None:
    scheduled().seek(5)


def test_without_a_schedule_steps_are_counted() -> None:
    inner = scheduled(None)
    inner.seek(9)
    inner.advance()
    assert (inner.step_count, inner.schedule) == (10, None)


@pytest.mark.parametrize("schedule", [RECURSIVE, ALSO_BETAS])
def test_schedule_of_the_users_own_goes_on_after_a_fence(schedule: Any) -> None:
    inner, alone = scheduled(None), scheduled(None)
    own, wanted = schedule(inner.optimizer), schedule(alone.optimizer)
    for step in range(12):
        if step == 8:
            inner.seek(5)
        for optimizer, its in ((inner.optimizer, own), (alone.optimizer, wanted)):
            optimizer.step()
            its.step()
        inner.advance()
    assert inner.step_count == 5 + 4
    assert options(inner) == options(alone)


def test_states_carry_the_place_of_a_schedule_of_the_users_own() -> None:
    ended, resumed = scheduled(None), scheduled(None)
    before, after = RECURSIVE(ended.optimizer), RECURSIVE(resumed.optimizer)
    for _ in range(9):
        ended.optimizer.step()
        before.step()
    resumed.load_state_dict(ended.state_dict())
    after.load_state_dict(before.state_dict())
    assert options(resumed) == options(ended) != options(scheduled(None))


def warm(optimizer: torch.optim.Optimizer) -> SequentialLR:
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=3), RECURSIVE(optimizer)], milestones=[3])


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step", "ignore:The epoch parameter")
@pytest.mark.parametrize("schedule", [RECURSIVE, ALSO_BETAS, warm])
def test_schedule_of_the_users_own_is_brought_to_the_runs_place_once(schedule: Any) -> None:
    stepped, late, resumed = scheduled(None), scheduled(None), scheduled(None)
    wanted, own, there = (schedule(inner.optimizer) for inner in (stepped, late, resumed))
    for _ in range(7):
        wanted.step()
    move_schedulers(late.optimizer, 7)
    assert own.last_epoch == 7
    assert options(late) == options(stepped) != options(scheduled(None))
    there.step()
    move_schedulers(resumed.optimizer, 7)  # it has a place of its own, such as that of a state that was loaded
    assert there.last_epoch == 1


def test_moments_are_forgotten_and_made_anew() -> None:
    inner = scheduled()
    (parameter,) = inner.optimizer.param_groups[0]["params"]
    parameter.grad = torch.full_like(parameter, float("nan"))
    inner.optimizer.step()
    inner.forget_moments()
    with torch.no_grad():
        parameter.fill_(1.0)
    parameter.grad = torch.ones_like(parameter)
    inner.optimizer.step()
    assert inner.optimizer.state[parameter]["step"] == 1
    assert parameter.isfinite().all()


def test_loaded_moments_leave_the_learning_rate_at_the_runs_step() -> None:
    early, late = scheduled(), scheduled()
    early.optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    early.optimizer.step()
    early.advance()
    late.seek(12)
    wanted = options(late)
    late.load_state_dict(early.state_dict())
    assert options(late) == wanted
    assert [state["step"] for state in late.optimizer.state.values()] == [1]


def test_schedule_that_follows_losses_is_refused() -> None:
    with pytest.raises(ConfigError, match="ReduceLROnPlateau"):
        scheduled(ReduceLROnPlateau)


def test_optimizer_is_built_over_the_parameters_or_taken_as_it_is() -> None:
    model = nn.Linear(2, 2)
    built = build_optimizer(partial(torch.optim.SGD, lr=0.5), model.named_parameters())
    assert built.param_groups[0]["lr"] == 0.5
    assert build_optimizer(built, None) is build_optimizer(built, model.parameters()) is built


def spent() -> Any:
    parameters = nn.Linear(1, 1).parameters()
    list(parameters)
    return parameters


ONE = nn.Parameter(torch.zeros(1))
SGD = partial(torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize(
    ("inner", "params", "says"),
    [
        (SGD, None, "params is missing"),
        (SGD, [], "no parameters"),
        (SGD, [{"params": []}], "no parameters"),
        (SGD, spent(), "once only"),
        (SGD, ONE, "params is one tensor"),
        (SGD, [{"params": [ONE]}, {"params": [ONE]}], "more than one parameter group"),
        (SGD([ONE]), nn.Linear(1, 1).parameters(), "steps 1 parameters, 0 of the 2 in params"),
    ],
)
def test_parameters_that_are_none_are_refused(inner: Any, params: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build_optimizer(inner, params)
