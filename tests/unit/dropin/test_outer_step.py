"""The outer optimizer in torch's words: DiLoCo's SGD as settings, all else as itself, or refused with the reason."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from zeroband.config.outer import OuterSGDConfig
from zeroband.dropin.settings import outer_step_of
from zeroband.errors import ConfigError
from zeroband.outer.torch_optimizer import TorchOuterOptimizer


def params(count: int = 1) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2)) for _ in range(count)]


def test_default_is_the_one_of_diloco() -> None:
    assert outer_step_of(None) == OuterSGDConfig(lr=0.7, momentum=0.9, nesterov=True)


def test_settings_of_torchs_sgd_are_taken_over() -> None:
    partially = partial(torch.optim.SGD, lr=0.3, momentum=0.8, nesterov=True)
    assert outer_step_of(partially) == OuterSGDConfig(lr=0.3, momentum=0.8, nesterov=True)
    ready = torch.optim.SGD(params(), lr=1.0)
    assert outer_step_of(ready) == OuterSGDConfig(lr=1.0, momentum=0.0, nesterov=False)


@pytest.mark.parametrize(
    "asked",
    [torch.optim.Adam, *(partial(torch.optim.SGD, lr=0.7, **option) for option in ({"weight_decay": 0.5},))],
)
def test_other_optimizers_step_as_they_are(asked: Any) -> None:
    assert isinstance(outer_step_of(asked), TorchOuterOptimizer)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (torch.optim.Adam(params()), "instance of Adam, and the outer parameters are the run's"),
        (torch.optim.Muon, "does not take parameters that are vectors"),
        (partial(torch.optim.SGD, lr=0.7, momentum=1.5), "momentum=1.5"),
        (partial(torch.optim.SGD, lr=0.0), "lr=0"),
        (
            torch.optim.SGD([{"params": params()}, {"params": params(), "lr": 0.1}], lr=0.7),
            "groups with different settings",
        ),
    ],
)
def test_what_the_outer_step_cannot_be_is_refused_by_name(asked: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        outer_step_of(asked)
