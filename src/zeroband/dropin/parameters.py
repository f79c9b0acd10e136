"""The parameters of a user's model: their names, and what is wrong with them. Knows no other node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeroband.errors import ConfigError
from zeroband.node.sharding import NamedParameters, fingerprint_of, is_sharded

_COMPILED, _DDP = "_orig_mod.", "module."
"""What torch.compile and DistributedDataParallel put before the names of a model."""


def parameters_of(groups: Sequence[Mapping[str, Any]], *, ranks: int) -> NamedParameters:
    """Take those of an optimizer's groups that are trained. Without names of their own they are called by their places.

    `ranks`: of this node. Raises ConfigError where they cannot be averaged.
    """
    named = {name: parameter for name, parameter in _named(groups).items() if parameter.requires_grad}
    if not named:
        raise ConfigError("params holds no parameter that has requires_grad, so there is nothing to train")
    for name, parameter in named.items():
        _require_fit(name, parameter)
    _require_one_form(named, ranks)
    return NamedParameters(named)


def frozen_items(groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What nodes must agree on of the parameters that are not trained, and so never travel. Called by all ranks."""
    frozen = [(name, parameter) for name, parameter in _named(groups).items() if not parameter.requires_grad]
    return {"frozen parameters": fingerprint_of(frozen)} if frozen else {}


def _named(groups: Sequence[Mapping[str, Any]]) -> dict[str, nn.Parameter]:
    places = [(number, place) for number, group in enumerate(groups) for place in range(len(group["params"]))]
    named: dict[str, nn.Parameter] = {}
    for number, place in places:
        group = groups[number]
        name = _bare(str(group["param_names"][place])) if "param_names" in group else f"{number}.{place:06d}"
        if name in named:
            raise ConfigError(f"two parameters are called {name!r}; give model.named_parameters() of one model")
        named[name] = group["params"][place]
    if all(name.startswith(_DDP) for name in named):
        named = {name.removeprefix(_DDP): parameter for name, parameter in named.items()}
    _require_once(named)
    return named


def _bare(name: str) -> str:
    """The name without what torch.compile puts into it: peers that compile, and those that do not, train together."""
    return name.replace(_COMPILED, "")


def _require_once(named: Mapping[str, Tensor]) -> None:
    seen: dict[int, str] = {}
    for name, parameter in named.items():
        if id(parameter) in seen:
            raise ConfigError(f"parameters {seen[id(parameter)]} and {name} are one tensor; give it once")
        seen[id(parameter)] = name


def _require_fit(name: str, parameter: Tensor) -> None:
    if parameter.dtype != torch.float32:
        raise ConfigError(
            f"parameter {name} is {parameter.dtype}, and the outer state is float32: keep the parameters in float32 "
            "and compute in another type with torch.autocast, or leave this one out of params"
        )
    if parameter.is_meta:
        raise ConfigError(f"parameter {name} is on the meta device; give the model its values first")
    if not is_sharded(parameter) and not parameter.is_contiguous():
        raise ConfigError(f"parameter {name} is not contiguous; set its data to parameter.data.contiguous() first")


def _require_one_form(named: Mapping[str, nn.Parameter], ranks: int) -> None:
    """Require that all are whole on every rank of the node, or all are cut by FSDP2 over all of its ranks."""
    sharded = {name: parameter for name, parameter in named.items() if is_sharded(parameter)}
    if not sharded:
        return
    whole = next((name for name in named if name not in sharded), None)
    if whole is not None:
        raise ConfigError(f"parameter {whole} is whole and {next(iter(sharded))} sharded; shard all of them with FSDP2")
    for name, parameter in sharded.items():
        if parameter.device_mesh.size() != ranks or not all(p.is_shard(0) for p in parameter.placements):
            raise ConfigError(
                f"parameter {name} has placements {parameter.placements} on {parameter.device_mesh.size()} of {ranks} "
                "ranks; shard its first dimension over all ranks of the node, as fully_shard does"
            )
