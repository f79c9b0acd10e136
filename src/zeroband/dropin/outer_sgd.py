"""The outer optimizer that a user asks for in torch's words, as the settings of the exact one. Pure."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from zeroband.config.outer import OuterSGDConfig
from zeroband.dropin.inner import OptimizerFactory
from zeroband.errors import ConfigError

_UNSUPPORTED = {"dampening": 0, "weight_decay": 0, "maximize": False}
"""Options of torch's SGD that the outer step does not have, and what they must be."""


def outer_sgd_of(asked: Optimizer | OptimizerFactory | None) -> OuterSGDConfig:
    """The settings of the outer step. It is taken by `outer.optimizer.OuterSGD`, whose bits are equal on all nodes.

    `asked`: torch's SGD as a class, a `functools.partial` or an instance; None: the defaults, those of DiLoCo.
    Raises ConfigError where it is another optimizer, or has options that the outer step has not.
    """
    if asked is None:
        return OuterSGDConfig()
    optimizer = asked if isinstance(asked, Optimizer) else asked([nn.Parameter(torch.zeros(1))])
    if not isinstance(optimizer, SGD):
        raise ConfigError(
            f"outer_optimizer is {type(optimizer).__name__}; the outer step must give the same bits on every machine, "
            "and there is such an SGD only: give functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, "
            "nesterov=True), or leave it out"
        )
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    if any(group != groups[0] for group in groups):
        raise ConfigError("outer_optimizer has groups with different settings; all parameters take one outer step")
    return _config_of(groups[0])


def _config_of(group: dict[str, Any]) -> OuterSGDConfig:
    for option, needed in _UNSUPPORTED.items():
        if group[option] != needed:
            raise ConfigError(f"outer_optimizer has {option}={group[option]!r}; the outer step needs {needed!r}")
    lr, momentum = float(group["lr"]), float(group["momentum"])
    if not (lr > 0 and 0 <= momentum < 1):
        raise ConfigError(f"outer_optimizer has lr={lr:g}, momentum={momentum:g}; set lr > 0 and 0 <= momentum < 1")
    return OuterSGDConfig(lr=lr, momentum=momentum, nesterov=bool(group["nesterov"]))
