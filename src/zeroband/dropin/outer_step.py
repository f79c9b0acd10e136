"""The outer optimizer that a user asks for in torch's words: settings of the exact SGD, or torch's own, proven."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from zeroband.config.outer import OuterSGDConfig
from zeroband.dropin.inner import OptimizerFactory
from zeroband.errors import ConfigError
from zeroband.outer.torch_optimizer import TorchOuterOptimizer

_DILOCO = {"dampening": 0, "weight_decay": 0, "maximize": False}
"""Options of torch's SGD that DiLoCo's own outer step does not have, and what they must be for it."""

OuterStep = OuterSGDConfig | TorchOuterOptimizer


def outer_step_of(asked: Optimizer | OptimizerFactory | None) -> OuterStep:
    """The outer step that `asked` stands for; None: the SGD of DiLoCo.

    An SGD that `outer.optimizer.OuterSGD` can do becomes its settings; all else steps as a `TorchOuterOptimizer`.
    Raises ConfigError where it cannot be an outer step.
    """
    if asked is None:
        return OuterSGDConfig()
    try:
        optimizer = asked if isinstance(asked, Optimizer) else asked([nn.Parameter(torch.zeros(1))])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"outer_optimizer does not take parameters that are vectors: {error}") from error
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    if any(group != groups[0] for group in groups):
        raise ConfigError("outer_optimizer has groups with different settings; all parameters take one outer step")
    if isinstance(optimizer, SGD) and all(groups[0][option] == value for option, value in _DILOCO.items()):
        return _config_of(groups[0])
    if isinstance(asked, Optimizer):
        name = type(asked).__name__
        raise ConfigError(
            f"outer_optimizer is an instance of {name}, and the outer parameters are the run's: give the class, or "
            f"functools.partial({name}, ...)"
        )
    return TorchOuterOptimizer(asked)


def _config_of(group: dict[str, Any]) -> OuterSGDConfig:
    lr, momentum = float(group["lr"]), float(group["momentum"])
    if not (lr > 0 and 0 <= momentum < 1):
        raise ConfigError(f"outer_optimizer has lr={lr:g}, momentum={momentum:g}; set lr > 0 and 0 <= momentum < 1")
    return OuterSGDConfig(lr=lr, momentum=momentum, nesterov=bool(group["nesterov"]))
