"""The configuration of a user's own loop, and the outer optimizer in torch's terms."""

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
from zeroband.node.names import AUTO
from zeroband.outer.custom import load_algorithm
from zeroband.outer.torch_optimizer import TorchOuterOptimizer

_TRAINERS = ("data", "export", "model", "optim", "rollback", "train")
"""Sections of the trainer only."""

_ARGUMENTS = {
    "outer.inner_steps": "give inner_steps",
    "outer.optimizer": "give outer_optimizer",
    "store.url": "give store",
}
"""Keys with arguments of their own."""

LOCAL = "local"
"""Store address for a server in this process."""

_STORE, _TYPE = "ZERO_BAND_STORE__URL", "ZERO_BAND_OUTER__TYPE"

_EVERY_STEP = ("ddp", "demo")
"""Algorithms whose rounds are one inner step."""

ENDLESS_STEPS = 10**15
"""Inner steps of an endless run."""


_DILOCO = {"dampening": 0, "weight_decay": 0, "maximize": False}
"""Options of torch's SGD that DiLoCo's outer step lacks, with their required values."""

OuterStep = OuterSGDConfig | TorchOuterOptimizer


def address_of(asked: str | Sequence[str] | None, environ: Mapping[str, str]) -> str:
    """Return the store's address, or several separated by blanks: the argument, the environment's, or LOCAL.

    Raises ConfigError for an empty one: a peer with its own server would train alone.
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
    """Build the configuration that the trainer would read from its files.

    `settings`: override the environment. The run deals out inner steps instead of samples, since the data is the
    user's. Raises ConfigError.
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
        raise ConfigError("run.id='auto' is for the trainer; give a custom loop the run.id of its peers")
    return config


def _outer_flags(kind: str, inner_steps: int | None, step: OuterStep | None) -> dict[str, object]:
    """Return the [outer] keys that the arguments set."""
    flags: dict[str, object] = {"outer.type": kind}
    if kind in _EVERY_STEP and inner_steps not in (None, 1):
        raise ConfigError(f'inner_steps={inner_steps} with outer.type="{kind}", whose rounds are one step; remove it')
    if kind not in _EVERY_STEP and inner_steps is not None:
        flags["outer.inner_steps"] = inner_steps
    if kind != "diloco" and step is not None:
        raise ConfigError(f'outer_optimizer is given, but outer.type="{kind}" has its own outer step; remove it')
    if kind == "diloco" and not isinstance(step, TorchOuterOptimizer):
        sgd = step or OuterSGDConfig()
        flags |= {f"outer.optimizer.{name}": getattr(sgd, name) for name in ("lr", "momentum", "nesterov")}
    return flags


def _require_ours(key: str) -> None:
    section = key.partition(".")[0]
    if section in _TRAINERS:
        raise ConfigError(
            f"settings has {key!r}: [{section}] configures the trainer; a custom loop has its own model and data"
        )
    for ours, way_out in _ARGUMENTS.items():
        if key == ours or key.startswith(f"{ours}."):
            raise ConfigError(f"settings has {key!r}: {way_out} to DiLoCoOptimizer instead")


def default_node_id(environ: Mapping[str, str]) -> str:
    """Return an id that is unique on the machine, equal on all ranks of the node and after restarts by torchrun."""
    launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in environ else os.getpid()
    return f"{socket.gethostname()[:48]}-{launcher}"


def shared_of(
    config: RunConfig, shapes: Mapping[str, str], total_steps: int | None, outer: OuterStep | None = None
) -> dict[str, str]:
    """Return what all nodes must agree on. `shapes`: of the parameters, by name. `outer`: the requested outer step."""
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


def outer_step_of(asked: Optimizer | OptimizerFactory) -> OuterStep:
    """Return the outer step by a torch optimizer.

    An SGD that `outer.optimizer.OuterSGD` supports becomes its settings; any other optimizer a `TorchOuterOptimizer`.
    Raises ConfigError if it cannot be an outer step.
    """
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
