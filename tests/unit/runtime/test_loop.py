"""The trainer's loop, with parts that only stand for the real ones."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

from zeroband.config.optim import OptimConfig
from zeroband.model.optim import InnerOptimizer
from zeroband.runtime import loop
from zeroband.runtime.checkpointing import NoCheckpoints
from zeroband.runtime.report import SilentReport

TrainOn = Callable[..., InnerOptimizer]


PASSED = loop.PassResult(nats=torch.tensor([20.0]), tokens=10, data_s=0.0, data_pass=0)


def a_node(**parts: Any) -> MagicMock:
    """A node of one rank that nobody asked to leave."""
    node = MagicMock(**parts)
    node.loader.remaining, node.config.train.batch_size = 40, 4
    node.departure.is_hurried, node.local.world_size, node.faults.extra_s.return_value = False, 1, 0.0
    return node


@pytest.fixture
def model() -> nn.Linear:
    return nn.Linear(3, 2)


@pytest.fixture
def train_on(model: nn.Linear, monkeypatch: pytest.MonkeyPatch) -> TrainOn:
    """train_on(hooks, gradients, clip_norm): inner steps by gradients of these values, 10 tokens each."""

    def train_on(hooks: MagicMock, gradients: list[float], clip_norm: float | None = 1.0) -> InnerOptimizer:
        optim, left = OptimConfig(clip_norm=clip_norm), list(gradients)
        inner = InnerOptimizer(model, optim, total_steps=10)
        node = a_node(model=model, parameters=model, inner=inner)
        node.config.optim = optim

        def pass_backward(*_: object) -> loop.PassResult:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            model.weight.grad[0, 0] = left.pop(0)  # pyright: ignore[reportOptionalSubscript]
            node.loader.remaining = 40 if left else 0
            return PASSED

        monkeypatch.setattr(loop, "forward_backward", pass_backward)
        hooks.inner_step, hooks.progress, hooks.round = 0, SimpleNamespace(is_complete=False), 0
        hooks.is_time_over.return_value = False
        loop.train_round(loop.Training(node, MagicMock(outer=hooks), MagicMock(), NoCheckpoints(), SilentReport()))
        return inner

    return train_on


def held(model: nn.Module, inner: InnerOptimizer) -> list[Tensor]:
    return [*model.parameters(), *inner.named_moments().values()]


def test_inner_steps_end_where_a_round_that_travelled_completes_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = MagicMock(progress=SimpleNamespace(is_complete=False))
    hooks.is_time_over.return_value, hooks.sync_gradients.return_value = False, None

    def sync(step: int, *_: Any, ends_round: bool) -> tuple[()]:
        assert step < 3 and not ends_round
        hooks.progress = SimpleNamespace(is_complete=step == 2)
        return ()

    hooks.inner_step, hooks.sync_parameters = 0, MagicMock(side_effect=sync)
    monkeypatch.setattr(loop, "forward_backward", lambda *_: PASSED)
    loop.train_round(loop.Training(a_node(), MagicMock(outer=hooks), MagicMock(), NoCheckpoints(), SilentReport()))
    assert hooks.sync_parameters.call_count == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("clip_norm", [1.0, None])
def test_gradient_of_this_node_that_is_not_finite_moves_the_schedule_alone(
    model: nn.Linear, train_on: TrainOn, caplog: pytest.LogCaptureFixture, bad: float, clip_norm: float | None
) -> None:
    hooks, start = MagicMock(), {name: value.clone() for name, value in model.state_dict().items()}
    hooks.sync_gradients.return_value = None
    inner = train_on(hooks, [0.5, bad], clip_norm)
    after_both = [value.detach().clone() for value in held(model, inner)]
    assert (inner.step_count, inner.update_count) == (2, 1)
    assert [call.args for call in hooks.learned.call_args_list] == [(10, 2.0), (0, 2.0)]
    assert [record.message for record in caplog.records] == [
        "the gradient of an inner step is not finite, so it is left out"
    ]
    model.load_state_dict(start)
    inner = train_on(hooks, [0.5], clip_norm)
    assert all(torch.equal(a, b) for a, b in zip(after_both, held(model, inner), strict=True))


@pytest.mark.parametrize(
    ("hooks", "norm"),
    [(MagicMock(has_own_steps=False), float("nan")), (MagicMock(has_own_steps=False), None)],
    ids=["norm of all nodes", "step of all nodes"],
)
def test_step_that_all_nodes_make_is_made_in_any_case(
    model: nn.Linear, train_on: TrainOn, hooks: MagicMock, norm: float | None
) -> None:
    hooks.sync_gradients.return_value = norm
    inner = train_on(hooks, [float("nan")])
    assert inner.update_count == 1 and model.weight[0, 0].isnan()
