"""The inner optimizer of a node: AdamW over the local shards, or steps by signs, and the schedule of its learning rate.

Knows nothing of other nodes. Its whole state is two counters and, with AdamW, two moments for each parameter. It calls
the function behind torch.optim.AdamW: the class loads torch's compiler at its first step, seconds that most nodes have
no use for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from zeroband.config.optim import CosineSchedule, LinearSchedule, OptimConfig, WarmupStableDecaySchedule
from zeroband.errors import ConfigError
from zeroband.node.sharding import local_part

_FUSED_DEVICES = ("cpu", "cuda")
_SLICE_EXACT_DEVICES = ("cuda",)
_MOMENTS = ("exp_avg", "exp_avg_sq")
_CHUNK = 1 << 20
"""Elements handled at a time, so that the temporary stays in the cache."""

StepRule = Literal["adamw", "sign"]
"""How gradients become a step; `sign` has no state, and what lies in the gradients was made for it by DeMo."""


def learning_rate(step: int, *, optim: OptimConfig, total_steps: int) -> float:
    """Learning rate of inner step `step`, counted from 0.

    Grows linearly from peak / warmup_steps at step 0 to the peak at step warmup_steps - 1. Then `cosine` and `linear`
    fall from the peak at warmup_steps to final_ratio * peak at total_steps, and `wsd` holds the peak until its last
    decay_ratio * total_steps steps and falls linearly over those. From total_steps on it stays at the end value.
    """
    peak, warmup = optim.adamw.lr, optim.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    schedule = optim.schedule
    match schedule:
        case CosineSchedule():
            falling = 0.5 * (1 + math.cos(math.pi * _progress(step, warmup, total_steps)))
        case LinearSchedule():
            falling = 1 - _progress(step, warmup, total_steps)
        case WarmupStableDecaySchedule():
            decay_from = max(warmup, total_steps * (1 - schedule.decay_ratio))
            falling = 1 - _progress(step, decay_from, total_steps)
    return peak * (schedule.final_ratio + (1 - schedule.final_ratio) * falling)


def _progress(step: int, start: float, stop: float) -> float:
    """Share of the way from `start` to `stop`, within 0 .. 1."""
    return 1.0 if step >= stop else max(0.0, (step - start) / (stop - start))


def sign_step(params: Tensor, update: Tensor, *, lr: float) -> None:
    """Step by the sign of an update, in place; any slice of one dimension. Where the update is 0 nothing moves.

    One rounding for each operation, so that the bits do not depend on devices and slices.
    """
    for theta, q in zip(params.split(_CHUNK), update.split(_CHUNK), strict=True):
        theta.sub_(q.sign().mul_(lr))


class InnerOptimizer:
    """The update rule and its learning-rate schedule as one stateful part.

    AdamW, or DeMo's theta <- theta (1 - lr weight_decay) - lr sign(gradient) (arXiv:2411.19870), which has no moments.

    The decay is decoupled, and of vectors (norms) only with `decay_vectors`. Uses torch's fused kernel where the device
    has one. `slice_exact`: the bits must not depend on how a parameter is cut into shards,
    which those of the fused CPU kernel do; slower.
    The model must hold its values (not be on the meta device): the moments are made at once, so that another node's
    can be written into them before the first step.
    """

    def __init__(
        self,
        model: nn.Module,
        optim: OptimConfig,
        *,
        total_steps: int,
        slice_exact: bool = False,
        rule: StepRule = "adamw",
    ) -> None:
        self._names = dict(model.named_parameters())
        self._optim = optim
        self._total_steps = total_steps
        self._rule: StepRule = rule
        self.moment_names: tuple[str, ...] = _MOMENTS if rule == "adamw" else ()
        """Names of the moments of each parameter."""
        devices = _SLICE_EXACT_DEVICES if slice_exact else _FUSED_DEVICES
        self._is_fused = rule == "adamw" and all(p.device.type in devices for p in self._names.values())
        self._step_count = 0
        self._states = {
            name: {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                **{moment: torch.zeros_like(parameter) for moment in self.moment_names},
            }
            for name, parameter in self._names.items()
        }

    @property
    def step_count(self) -> int:
        """Inner steps behind us on the schedule, those before this node joined included."""
        return self._step_count

    @property
    def update_count(self) -> int:
        """Updates that the moments have seen, for Adam's correction of their bias."""
        return int(self._states[next(iter(self._names))]["step"].item())

    @property
    def lr(self) -> float:
        """Learning rate of the next `step()`."""
        return learning_rate(self._step_count, optim=self._optim, total_steps=self._total_steps)

    def step(self, found_inf: Tensor | None = None) -> None:
        """Update the parameters from their gradients and move on by one inner step.

        Without gradients parameters and moments stay as they are, and so they do where `found_inf`, () float32 on the
        parameters' device, is 1: that is read on the device if the kernel is fused.
        """
        if found_inf is not None and not self._is_fused:
            if found_inf.item():
                self.zero_grad()
            found_inf = None
        update = partial(self._update, found_inf=found_inf) if self._rule == "adamw" else self._step_by_signs
        config = self._optim.adamw
        of_vectors = config.weight_decay if config.decay_vectors else 0.0
        with torch.no_grad():
            update([name for name, p in self._names.items() if p.ndim >= 2], config.weight_decay)
            update([name for name, p in self._names.items() if p.ndim < 2], of_vectors)
        self._step_count += 1

    def _update(self, names: Iterable[str], weight_decay: float, *, found_inf: Tensor | None) -> None:
        gradients = {name: gradient for name in names if (gradient := self._names[name].grad) is not None}
        states = [self._states[name] for name in gradients]
        config = self._optim.adamw
        adamw(
            [local_part(self._names[name]) for name in gradients],
            [local_part(gradient) for gradient in gradients.values()],
            [local_part(state["exp_avg"]) for state in states],
            [local_part(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=self._is_fused,
            found_inf=found_inf,
            amsgrad=False,
            beta1=config.betas[0],
            beta2=config.betas[1],
            lr=self.lr,
            weight_decay=weight_decay,
            eps=config.eps,
            maximize=False,
        )

    def _step_by_signs(self, names: Iterable[str], weight_decay: float) -> None:
        for name in names:
            gradient = self._names[name].grad
            if gradient is not None:
                theta = local_part(self._names[name].data).view(-1)
                theta.mul_(1.0 - self.lr * weight_decay)
                sign_step(theta, local_part(gradient).reshape(-1), lr=self.lr)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter in self._names.values():
            parameter.grad = None

    def seek(self, step: int, *, update_count: int | None = None) -> None:
        """Continue the schedule at inner step `step`, for a node that joins late.

        Without `update_count` the moments keep their age, so fresh ones are corrected as fresh; give it together with
        moments copied from a node that made so many updates.
        """
        self._step_count = step
        if update_count is not None:
            for state in self._states.values():
                state["step"].fill_(update_count)

    def forget_moments(self) -> None:
        """Start the moments anew, at the same place of the schedule: after a gradient that was not finite."""
        for moments in self.moments().values():
            for moment in moments:
                moment.zero_()
        self.seek(self._step_count, update_count=0)

    def moments(self) -> dict[str, tuple[Tensor, Tensor]]:
        """First and second moment of this rank's shard by parameter name; writing into them sets them."""
        return {
            name: (local_part(state["exp_avg"]), local_part(state["exp_avg_sq"]))
            for name, state in self._states.items()
            if self.moment_names
        }

    def named_moments(self) -> dict[str, Tensor]:
        """`exp_avg.PARAMETER` and `exp_avg_sq.PARAMETER`, sharded as the parameters; writing into them sets them."""
        states = self._states.items()
        return {f"{moment}.{name}": state[moment] for moment in self.moment_names for name, state in states}

    def counters(self) -> dict[str, Any]:
        """How far it is: inner steps on the schedule, updates that the moments have seen."""
        return {"step_count": self._step_count, "update_count": self.update_count}

    def pack(self) -> None:
        """Do nothing: counters and moments are all."""

    def restore(self, counters: Mapping[str, Any], packed: bytes | None) -> bool:
        """Take the age of moments that were read before; the place of the schedule is the run's."""
        self.seek(self._step_count, update_count=int(counters["update_count"]))
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: {"step_count", "update_count", "moments": {name: (first, second)}}, not copied."""
        return {"step_count": self._step_count, "update_count": self.update_count, "moments": self.moments()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state of the same model and sharding; the next steps are those that its owner would have made.

        Raises: ConfigError naming the first parameter that differs, before anything has changed.
        """
        theirs = cast(Mapping[str, tuple[Tensor, Tensor]], state["moments"])
        ours = self.moments()
        for name in sorted(ours.keys() | theirs.keys()):
            our_shape, their_shape = _shape(ours, name), _shape(theirs, name)
            if our_shape != their_shape:
                raise ConfigError(
                    f"optimizer state of another model or sharding: {name} has shape {their_shape}, needs {our_shape}"
                )
        for name, moments in ours.items():
            for target, source in zip(moments, theirs[name], strict=True):
                target.copy_(source)
        self.seek(state["step_count"], update_count=state["update_count"])


def _shape(moments: Mapping[str, tuple[Tensor, Tensor]], name: str) -> tuple[int, ...] | None:
    return tuple(moments[name][0].shape) if name in moments else None
