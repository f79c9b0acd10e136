"""What a user's own loop asks of a run: its configuration, and the outer optimizer in torch's words."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from zeroband.config.load import load_config
from zeroband.config.outer import CustomConfig, OuterSGDConfig
from zeroband.config.schema import RunConfig
from zeroband.config.shared import shared_items
from zeroband.dropin.inner import OptimizerFactory
from zeroband.errors import ConfigError
from zeroband.node.run_names import AUTO
from zeroband.outer.custom import load_algorithm
from zeroband.outer.torch_optimizer import TorchOuterOptimizer

_TRAINERS = ("data", "export", "model", "optim", "rollback", "train")
"""Sections that only the trainer has."""

_ARGUMENTS = {
    "outer.inner_steps": "give inner_steps",
    "outer.optimizer": "give outer_optimizer",
    "store.url": "give store",
}
"""Keys that have their own argument."""

LOCAL = "local"
"""What stands in the place of a store's address: a server of this process's own."""

_STORE, _TYPE = "ZERO_BAND_STORE__URL", "ZERO_BAND_OUTER__TYPE"

_EVERY_STEP = ("ddp", "demo")
"""Algorithms whose rounds are one inner step."""

ENDLESS_STEPS = 10**15
"""Inner steps of a run that was given no end."""


_DILOCO = {"dampening": 0, "weight_decay": 0, "maximize": False}
"""Options of torch's SGD that DiLoCo's own outer step does not have, and what they must be for it."""

OuterStep = OuterSGDConfig | TorchOuterOptimizer


def address_of(asked: str | Sequence[str] | None, environ: Mapping[str, str]) -> str:
    """The store's address, or those of several with blanks between: as asked for, of the environment, or LOCAL.

    Raises ConfigError where it is there and empty: a peer that went on with its own server would train alone.
    """
    if asked is not None and not isinstance(asked, str):
        asked = " ".join(asked)
    given = [("store", asked), (_STORE, environ.get(_STORE))]
    name, address = next(((name, value) for name, value in given if value is not None), ("store", LOCAL))
    if not address.strip():
        raise ConfigError(
            f"{name}={address!r} is no address of a Redis; give one such as redis://HOST:6379, or leave it out "
            f'(store="local" says the same) for a server of this process\'s own'
        )
    return address.strip()


def config_of(
    settings: Mapping[str, object],
    environ: Mapping[str, str],
    *,
    store_url: str,
    inner_steps: int | None,
    outer: OuterStep | None,
    total_steps: int | None,
) -> RunConfig:
    """What the trainer would read from its files. `settings`: keys and values over those of the environment.

    The run deals out inner steps in the place of samples, which are the user's business. Raises ConfigError.
    """
    for key in settings:
        _require_ours(key)
    flags = {
        "node.id": environ.get("ZERO_BAND_NODE__ID") or default_node_id(environ),
        **settings,
        "store.url": store_url,
        **_outer_flags(str(settings.get("outer.type") or environ.get(_TYPE) or "diloco"), inner_steps, outer),
        "train.total_steps": ENDLESS_STEPS if total_steps is None else total_steps,
        "train.batch_size": 1,
    }
    resumes = bool(flags.pop("resume", False))
    texts = {
        key: json.dumps(value) if isinstance(value, list | tuple | dict) else value for key, value in flags.items()
    }
    line = [f"--{key}={text}" for key, text in texts.items()]
    config = load_config([*line, "--resume"] if resumes else line, environ)
    if config.run.id == AUTO:
        raise ConfigError("run.id='auto' names the trainer's runs; give a loop of your own the run.id of its peers")
    return config


def _outer_flags(kind: str, inner_steps: int | None, step: OuterStep | None) -> dict[str, object]:
    """What the arguments say of [outer]."""
    flags: dict[str, object] = {"outer.type": kind}
    if kind in _EVERY_STEP and inner_steps not in (None, 1):
        raise ConfigError(
            f'inner_steps={inner_steps} with outer.type="{kind}", whose rounds are one step; leave it out'
        )
    if kind not in _EVERY_STEP and inner_steps is not None:
        flags["outer.inner_steps"] = inner_steps
    if kind != "diloco" and step is not None:
        raise ConfigError(f'outer_optimizer is given, but outer.type="{kind}" has its own outer step; leave it out')
    if kind == "diloco" and not isinstance(step, TorchOuterOptimizer):
        sgd = step or OuterSGDConfig()
        flags |= {f"outer.optimizer.{name}": getattr(sgd, name) for name in ("lr", "momentum", "nesterov")}
    return flags


def _require_ours(key: str) -> None:
    section = key.partition(".")[0]
    if section in _TRAINERS:
        raise ConfigError(f"settings has {key!r}: [{section}] is the trainer's; model and data are yours")
    for ours, way_out in _ARGUMENTS.items():
        if key == ours or key.startswith(f"{ours}."):
            raise ConfigError(f"settings has {key!r}: {way_out} to DiLoCoOptimizer instead")


def default_node_id(environ: Mapping[str, str]) -> str:
    """Names this node and no other on the machine; the same on all its ranks, and after torchrun restarts them."""
    launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in environ else os.getpid()
    return f"{socket.gethostname()[:48]}-{launcher}"


def shared_of(
    config: RunConfig, shapes: Mapping[str, str], total_steps: int | None, outer: OuterStep | None = None
) -> dict[str, str]:
    """What all nodes must agree on. `shapes`: of the parameters, by name. `outer`: the step that was asked for."""
    items = {key: value for key, value in shared_items(config).items() if key.partition(".")[0] not in _TRAINERS}
    if isinstance(outer, TorchOuterOptimizer):
        items = {key: value for key, value in items.items() if not key.startswith("outer.optimizer.")}
        items |= {"outer_optimizer": str(outer), "outer_optimizer (its bits on this machine)": outer.digest}
    if isinstance(config.outer, CustomConfig):
        items["outer.algorithm (file)"] = load_algorithm(config.outer).digest
    return {
        "trained by": "zeroband.DiLoCoOptimizer",
        "total_steps": str(total_steps),
        **{key: str(value) for key, value in items.items()},
        **shapes,
    }


# -- the outer optimizer ---------------------------------------------------------------------------------------------


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
