"""The user's optimizer, scheduler and parameters as the inner optimizer of a run. Knows no other node."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from zeroband.errors import ConfigError
from zeroband.node.sharding import NamedParameters, fingerprint_of, is_sharded

Params = Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]] | Iterable[dict[str, Any]]
"""As for torch's optimizers: parameters, optionally with names, or groups of them."""

OptimizerFactory = Callable[[Any], Optimizer]
"""An optimizer class, or a `functools.partial` of one, called with the parameters."""

SchedulerFactory = Callable[[Optimizer], LRScheduler]
"""A scheduler class, or a `functools.partial` of one, called with the inner optimizer."""

_COMPILED, _DDP = "_orig_mod.", "module."
"""Prefixes that torch.compile and DistributedDataParallel add to names."""


def default_inner(params: Any) -> Optimizer:
    """Return AdamW with the trainer's defaults."""
    return torch.optim.AdamW(params, lr=4e-4, betas=(0.9, 0.95), weight_decay=0.1)


def build_optimizer(inner: Optimizer | OptimizerFactory, params: Params | None) -> Optimizer:
    """Return the inner optimizer over the parameters; `params` None: those of the instance. Raises ConfigError."""
    if isinstance(inner, Optimizer):
        _require_same(inner, params)
        return inner
    if params is None:
        raise ConfigError("params is missing: give model.named_parameters(), or an inner_optimizer that has them")
    if isinstance(params, Tensor):
        raise ConfigError("params is one tensor; give an iterable of them, such as model.named_parameters()")
    given = list(params)
    if not given or all(isinstance(one, dict) and not list(one.get("params", ())) for one in given):
        raise ConfigError("params holds no parameters; an iterator like model.parameters() can be used once only")
    try:
        return inner(given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"inner_optimizer does not take params: {error}") from error


def _require_same(inner: Optimizer, params: Params | None) -> None:
    if params is None:
        return
    held = {id(parameter) for group in inner.param_groups for parameter in group["params"]}
    given = {id(parameter) for parameter in _plain(params)}
    if held != given:
        raise ConfigError(
            f"inner_optimizer steps {len(held)} parameters, {len(held & given)} of the {len(given)} in params; leave "
            "params out, or give a class or functools.partial as inner_optimizer"
        )


def _plain(params: Params) -> Iterable[Tensor]:
    for one in params:
        if isinstance(one, dict):
            yield from _plain(one["params"])
        else:
            yield one[1] if isinstance(one, tuple) else one


class ScheduledOptimizer:
    """The inner optimizer with its scheduler, which can move to any inner step. Raises ConfigError.

    Without a scheduler it counts steps, and leaves the options to the user.
    """

    def __init__(self, optimizer: Optimizer, schedule: SchedulerFactory | None) -> None:
        self.optimizer = optimizer
        self._build_schedule = schedule
        self._options = _options_of(optimizer)
        self.schedule = None if schedule is None else schedule(optimizer)
        if isinstance(self.schedule, ReduceLROnPlateau):
            raise ConfigError(
                "lr_scheduler is ReduceLROnPlateau, which follows one node's losses, so a node that joins late cannot "
                "find its place in it; take a schedule that follows the steps"
            )
        self.step_count = 0
        """Inner steps of the schedule so far."""

    def advance(self) -> None:
        """Advance the schedule after an inner step."""
        self.step_count += 1
        if self.schedule is not None:
            self.schedule.step()

    def seek(self, step: int) -> None:
        """Move the schedule to this inner step, as if all earlier ones had been made here."""
        if self._build_schedule is None:
            self.step_count = step
        elif step < self.step_count:
            self._rewind(self._build_schedule)
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="Detected call of `lr_scheduler.step"
            )  # other nodes made these steps
            while self.step_count < step:
                self.advance()

    def _rewind(self, build_schedule: SchedulerFactory) -> None:
        """Rebuild the scheduler: many are recursive, and cannot jump back to a step."""
        for group, options in zip(self.optimizer.param_groups, self._options, strict=True):
            for name in group.keys() - options.keys() - {"params"}:
                del group[name]
            group.update({name: _copied(value) for name, value in options.items()})
        self.step_count, self.schedule = 0, build_schedule(self.optimizer)

    def forget_moments(self) -> None:
        """Drop the optimizer's state; its next step creates it again."""
        self.optimizer.state.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state."""
        return self.optimizer.state_dict()

    def load_moments(self, state: Mapping[int, Any]) -> None:
        """Load the state of each parameter by index; keep options and schedule."""
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": dict(state)})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the moments, and the options unless there is a scheduler, which keeps its step."""
        self.optimizer.load_state_dict(dict(state))
        if self._build_schedule is not None:
            step = self.step_count
            self._rewind(self._build_schedule)
            self.seek(step)


def move_schedulers(optimizer: Optimizer, step: int) -> None:
    """Move the user's schedulers over an optimizer to this inner step.

    torch has no reference from an optimizer to its schedulers, so this searches all objects. Skips schedulers that have
    already moved, parts of other schedulers, and those that follow losses.
    """
    if not hasattr(optimizer.step, "_wrapped_by_lr_sched"):  # every scheduler wraps its optimizer's step
        return
    found = [one for one in gc.get_objects() if issubclass(type(one), LRScheduler) and one.optimizer is optimizer]
    parts = {id(part) for one in found for part in getattr(one, "_schedulers", ())}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        for one in found:
            if id(one) not in parts and not isinstance(one, ReduceLROnPlateau) and one.last_epoch == 0:
                for _ in range(step):
                    one.step()


def _options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Copy the groups without their parameters."""
    return [
        {name: _copied(value) for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


# -- the parameters ---------------------------------------------------------------------------------------------------


def parameters_of(groups: Sequence[Mapping[str, Any]], *, ranks: int) -> NamedParameters:
    """Return the trained parameters of an optimizer's groups, named by index if they have no names.

    `ranks`: of this node. Raises ConfigError if they cannot be averaged.
    """
    named = {name: parameter for name, parameter in _named(groups).items() if parameter.requires_grad}
    if not named:
        raise ConfigError("params holds no parameter that has requires_grad, so there is nothing to train")
    for name, parameter in named.items():
        _require_fit(name, parameter)
    _require_one_form(named, ranks)
    return NamedParameters(named)


def frozen_items(groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return what nodes must agree on of frozen parameters, which are never exchanged. Called by all ranks."""
    frozen = [(name, parameter) for name, parameter in _named(groups).items() if not parameter.requires_grad]
    return {"frozen parameters": fingerprint_of(frozen)} if frozen else {}


def _named(groups: Sequence[Mapping[str, Any]]) -> dict[str, nn.Parameter]:
    named: dict[str, nn.Parameter] = {}
    for number, group in enumerate(groups):
        names = group.get("param_names") or [f"{number}.{place:06d}" for place in range(len(group["params"]))]
        for name, parameter in zip(names, group["params"], strict=True):
            name = str(name).replace(_COMPILED, "")  # peers may differ in compilation
            if name in named:
                raise ConfigError(f"two parameters are called {name!r}; give model.named_parameters() of one model")
            named[name] = parameter
    if all(name.startswith(_DDP) for name in named):
        named = {name.removeprefix(_DDP): parameter for name, parameter in named.items()}
    _require_once(named)
    return named


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
    """Require parameters that are all whole on every rank, or all sharded by FSDP2 over all ranks."""
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
