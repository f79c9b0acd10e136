"""Any element-wise torch optimizer as the outer step, as in OpenDiLoCo, with state that is equal on all nodes.

The optimizer steps slices of the flat state, with its moments in buffers there, so a joiner fetches them and the
journal replays them. Every operation rounds once, as in all outer steps. At join, nodes compare the result of a few
trial steps to make sure that all get the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroband.config.outer import DilocoConfig
from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.membership.records import RoundPlan
from zeroband.elastic.rounds.interfaces import OuterParts
from zeroband.errors import ConfigError
from zeroband.kernels.one_rounding import OneRounding
from zeroband.outer.algorithm import PARAMS, Algorithm
from zeroband.state.digest import digest_of

UPDATES = "outer_updates"
"""Key in a verdict's record: the outer optimizer's steps on each fragment."""

_CHUNK = 1 << 20
"""Elements handled at a time, so that the temporaries stay in the cache."""
_TRIAL_STEPS = 8
"""RAdam takes another branch from its sixth step on."""
_TRIAL_CUTS = (0, 1, 100, 257)


class TorchOuterOptimizer:
    """Steps slices of the outer state by a torch optimizer. `build`: builds it for a list of parameters.

    `what`: name of the argument that gave it, for errors.

    Raises ConfigError if a step is not element-wise, or if its state is more than tensors of a parameter's shape and
    numbers that depend on the step count only.
    """

    ways = ("foreach", "fused", "capturable", "differentiable")
    """Options of torch's optimizers that change how a step is computed, not its result. All are off."""

    def __init__(self, build: Callable[[Any], Optimizer], *, what: str = "outer_optimizer") -> None:
        self._build = build
        self._what = what
        self._begin_clock()
        self._name = type(self._clock).__name__
        self.options = self._options_of()
        """Settings of the optimizer, by name."""
        straight, values = self._step_straight()
        self.state_names = tuple(sorted(n for n, held in straight.items() if _is_like(held, values)))
        """Names of the moments: tensors of a parameter's shape."""
        self._require_known(straight)
        self.digest = self._require_element_wise(straight, values)
        """Digest of some trial steps from fixed values: equal on nodes that compute all steps with the same bits."""

    def __str__(self) -> str:
        return f"{self._name}({', '.join(f'{name}={value}' for name, value in sorted(self.options.items()))})"

    def apply(self, params: Tensor, state: Mapping[str, Tensor], gradient: Tensor, *, step: int) -> None:
        """Take the `step`-th step, from 1, in place. All (n,) float32 on CPU; `state`: by `state_names`."""
        if not params.numel():
            return
        numbers = self.numbers_after(step - 1)
        names = list(state)
        for chunk in zip(
            params.split(_CHUNK), gradient.split(_CHUNK), *(state[n].split(_CHUNK) for n in names), strict=True
        ):
            optimizer, parameter = self._over(chunk[0])
            held = dict(zip(names, chunk[2:], strict=True))
            if step > 1:
                optimizer.state[parameter] = {**_copied(numbers), **held}
            _step(optimizer, parameter, chunk[1])
            for name, buffer in held.items():
                after = optimizer.state[parameter].get(name)
                if after is not None and after is not buffer:
                    buffer.copy_(after)

    # -- one optimizer -------------------------------------------------------------------------------------------

    def _over(self, values: Tensor) -> tuple[Optimizer, nn.Parameter]:
        """Build a new one that steps these values in place."""
        parameter = nn.Parameter(values)
        optimizer = self._build([parameter])
        for group in optimizer.param_groups:
            group.update({way: False for way in self.ways if way in group})
        return optimizer, parameter

    def _begin_clock(self) -> None:
        """Restart the optimizer of a single value, whose counters equal those of all values."""
        self._clock, self._tick = self._over(torch.zeros(1))
        self._ticks = 0

    def numbers_after(self, steps: int) -> dict[str, Any]:
        """Copies of the optimizer's state, other than moments, after `steps` steps."""
        if steps < self._ticks:
            self._begin_clock()
        while self._ticks < steps:
            _step(self._clock, self._tick, torch.zeros(1))
            self._ticks += 1
        held = self._clock.state[self._tick].items()
        return _copied({name: number for name, number in held if not _is_like(number, self._tick)})

    # -- what it must be -----------------------------------------------------------------------------------------

    def _options_of(self) -> dict[str, Any]:
        if len(self._clock.param_groups) != 1:
            raise ConfigError(f"{self._what} {self._name} makes its own parameter groups; all parameters take one step")
        (group,) = self._clock.param_groups
        return {name: value for name, value in group.items() if name not in ("params", *self.ways)}

    def _step_straight(self) -> tuple[dict[str, Any], Tensor]:
        """Take trial steps on a vector as a user would; returns the optimizer's state and the vector after them."""
        values, gradients = _trial()
        try:
            optimizer, parameter = self._over(values)
            for gradient in gradients:
                _step(optimizer, parameter, gradient)
        except Exception as error:
            raise ConfigError(
                f"{self._what} {self._name} does not step a vector by its gradient ({error!s:.200}); the outer "
                "state is flat: give an element-wise optimizer such as torch.optim.SGD, Adam or AdamW"
            ) from error
        return dict(optimizer.state[parameter]), values

    def _require_known(self, state: Mapping[str, Any]) -> None:
        """Require that all state other than moments depends on the number of steps only."""
        numbers = self.numbers_after(_TRIAL_STEPS)
        for name in sorted(state.keys() - set(self.state_names)):
            held = state[name]
            is_number = held is None or isinstance(held, int | float) or (isinstance(held, Tensor) and not held.ndim)
            if not is_number or bool(held != numbers.get(name)):
                raise ConfigError(
                    f"{self._what} {self._name} keeps {name!r}, which is neither a float32 tensor of a parameter's "
                    "shape nor a number that follows from the count of steps, so a joiner could not be given it; give "
                    "an element-wise optimizer such as torch.optim.SGD, Adam or AdamW"
                )

    def _require_element_wise(self, straight: Mapping[str, Any], wanted: Tensor) -> str:
        """Require that stepping slices with their moments equals stepping the whole; returns the result's digest."""
        values, gradients = _trial()
        state = {name: torch.zeros_like(values) for name in self.state_names}
        for step, gradient in enumerate(gradients, start=1):
            for start, stop in itertools.pairwise(_TRIAL_CUTS):
                part = {name: buffer[start:stop] for name, buffer in state.items()}
                self.apply(values[start:stop], part, gradient[start:stop], step=step)
        same = torch.equal(values, wanted) and all(torch.equal(held, straight[n]) for n, held in state.items())
        if not same:
            raise ConfigError(
                f"{self._what} {self._name} is not element-wise: slices of a vector step otherwise than the "
                "whole, so ranks and nodes would disagree; give one such as torch.optim.SGD, Adam or AdamW"
            )
        return digest_of(values, *state.values())


def _step(optimizer: Optimizer, parameter: nn.Parameter, gradient: Tensor) -> None:
    """Take one step. The gradient is copied because optimizers may keep or change it."""
    parameter.grad = gradient.clone()
    with OneRounding():
        optimizer.step()
    parameter.grad = None


def _trial() -> tuple[Tensor, list[Tensor]]:
    """Trial values and gradients, exact in float32, so that every machine starts with the same bits."""
    places = torch.arange(_TRIAL_CUTS[-1])
    gradients = [((places * 7919 + step * 104729) % 2003 - 1001) / 4096 for step in range(_TRIAL_STEPS)]
    return (places * 31 % 509 - 254) / 128, gradients


def _is_like(held: Any, values: Tensor) -> bool:
    return isinstance(held, Tensor) and held.shape == values.shape and held.dtype == torch.float32


def _copied(numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {name: number.clone() if isinstance(number, Tensor) else number for name, number in numbers.items()}


class TorchDiLoCo(Algorithm):
    """DiLoCo with a torch optimizer as its outer step. Outer state: the parameters and its moments."""

    def __init__(self, parts: OuterParts, config: DilocoConfig, optimizer: TorchOuterOptimizer) -> None:
        super().__init__(parts, config)
        self._optimizer = optimizer
        self._moments = {f"outer_{name}": name for name in optimizer.state_names}
        self.sections = (PARAMS, *self._moments)

    def step(self, outer: Mapping[str, Tensor], result: Tensor, *, outer_step: int) -> None:
        state = {name: outer[section] for section, name in self._moments.items()}
        self._optimizer.apply(outer[PARAMS], state, result, step=outer_step)

    # -- step count: a round without contributions is no step -----------------------------------------------------

    def step_number(self, record: Mapping[str, Any], fragments: int) -> int:
        return record[UPDATES][(Progress.from_record(record["progress"]).outer_step - 1) % fragments]

    def _updates(self, before: Mapping[str, Any]) -> list[int]:
        return list(before.get(UPDATES) or [0] * len(self.parts.fragments))

    def describe(self, plan: RoundPlan, result: Tensor, before: Mapping[str, Any]) -> Mapping[str, Any]:
        updates = self._updates(before)
        fragment_index = Progress.from_record(before["progress"]).outer_step % len(updates)
        updates[fragment_index] += plan.total_weight > 0
        return {UPDATES: updates}

    def describe_founding(self, before: Mapping[str, Any]) -> Mapping[str, Any]:
        return {UPDATES: self._updates(before)}
