"""Torch's optimizers as the outer step: one state on all nodes, on all processors, or none at all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroband.config.outer import CustomConfig
from zeroband.errors import ConfigError
from zeroband.outer.torch_optimizer import UPDATES, TorchOuterOptimizer
from zeroband.state.digest import digest_of

OPTIM = torch.optim
TAKEN: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": partial(OPTIM.SGD, lr=0.7, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "adam": partial(OPTIM.Adam, lr=0.1, fused=True),
    "adamw": partial(OPTIM.AdamW, lr=0.1, amsgrad=True),
    "rmsprop": partial(OPTIM.RMSprop, momentum=0.9, centered=True),
    "adagrad": partial(OPTIM.Adagrad, initial_accumulator_value=0.1),
    "nadam": OPTIM.NAdam,
    "radam": OPTIM.RAdam,
    "adamax": OPTIM.Adamax,
    "adadelta": OPTIM.Adadelta,
    "asgd": OPTIM.ASGD,
    "rprop": OPTIM.Rprop,
}
ADAMW = """
from functools import partial
import torch
from zeroband.outer.torch_optimizer import TorchDiLoCo, TorchOuterOptimizer

class Mine(TorchDiLoCo):
    def __init__(self, parts, config, settings):
        super().__init__(parts, config, TorchOuterOptimizer(partial(torch.optim.AdamW, lr=0.1)))

ALGORITHM = Mine
"""
StartRun = Callable[..., Any]
Noise = Callable[..., Tensor]


def gradients(count: int, numel: int = 1000) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(numel, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("name", TAKEN)
def test_steps_from_buffers_are_those_of_the_optimizer_itself(name: str) -> None:
    outer, (start, *given) = TorchOuterOptimizer(TAKEN[name]), gradients(8)
    parameter = nn.Parameter(start.clone())
    torchs = TAKEN[name]([parameter])
    held, state = start.clone(), {one: torch.zeros(1000) for one in outer.state_names}
    for step, gradient in enumerate(given, start=1):
        parameter.grad = gradient.clone()
        torchs.step()  # by kernels that may fuse
        outer.apply(held, state, gradient, step=step)
    torch.testing.assert_close(held, parameter.detach(), rtol=0, atol=1e-5)
    assert not torch.equal(held, start)


def test_digest_tells_settings_apart() -> None:
    assert len({TorchOuterOptimizer(partial(OPTIM.Adam, lr=lr)).digest for lr in (0.1, 0.1000001)}) == 2


class Counting(OPTIM.SGD):
    """Keeps something that its steps depend on where nobody finds it."""

    def step(self, closure: Any = None) -> Any:
        self.count = getattr(self, "count", 0) + 1
        self.param_groups[0]["lr"] = 1.0 / self.count
        return super().step(closure)


class Sums(OPTIM.SGD):
    """Keeps a number of the gradient's."""

    def step(self, closure: Any = None) -> Any:
        (parameter,) = self.param_groups[0]["params"]
        self.state[parameter]["norm"] = parameter.grad.norm()
        return super().step(closure)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (OPTIM.Adafactor, "Adafactor is not element-wise"),
        (OPTIM.LBFGS, "LBFGS does not step a vector by its gradient"),
        (OPTIM.SparseAdam, "SparseAdam does not step a vector"),
        (Counting, "Counting is not element-wise"),
        (Sums, "Sums keeps 'norm'"),
    ],
)
def test_what_a_joiner_could_not_be_given_is_refused(build: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        TorchOuterOptimizer(build)


@pytest.fixture
def adamw(tmp_path: Path) -> CustomConfig:
    path = tmp_path / "adamw.py"
    path.write_text(ADAMW)
    return CustomConfig(type="custom", algorithm=str(path), inner_steps=2, fragments=2)


def test_nodes_and_a_joiner_hold_one_state_and_rounds_without_weight_are_no_steps(
    start_run: StartRun, noise: Noise, adamw: CustomConfig
) -> None:
    whole = adamw.model_copy(update={"fragments": 1, "inner_steps": 1})
    run = start_run(whole, "a", "b")
    theta, nan = nn.Parameter(run["a"].params.clone()), torch.full((22,), float("nan"))
    torchs = OPTIM.AdamW([theta], lr=0.1)
    run.round(a=nan, b=nan)  # the first step is still to come
    for number in (1, 2):
        update = noise(number)
        before = theta.detach().clone()
        theta.grad = (before - (before + update)) * 0.5 + (before - (before + update)) * 0.5
        torchs.step()
        run.round(a=update, b=update)
    torch.testing.assert_close(run["a"].params, theta.detach(), rtol=0, atol=1e-6)
    copy = run["a"].outer.copy_state()
    assert tuple(copy.sections) == ("params", "outer_exp_avg", "outer_exp_avg_sq")
    assert copy.record[UPDATES] == [2]
    run.add("c").outer.adopt(copy.round, copy.record, copy.sections)
    reports = run.round_with_joiner("c", a=noise(3), b=noise(4))
    after = run["c"].outer.copy_state()
    assert {report.state_digest for report in reports.values()} == {digest_of(*after.sections.values())}
    assert len(reports) == 3


class TwoLayers(nn.Module):
    """22 parameters, 11 in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(11, 1, bias=False) for _ in range(2)])


def test_each_fragment_counts_its_own_steps(start_run: StartRun, noise: Noise, adamw: CustomConfig) -> None:
    run = start_run(adamw, "a", model=TwoLayers)
    for number in range(3):
        run.round(a=noise(number))
    assert run["a"].outer.record[UPDATES] == [2, 1]
