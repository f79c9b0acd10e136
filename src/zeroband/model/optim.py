"""The inner optimizer and its learning-rate schedule: AdamW over local shards, optionally Muon for matrices, or signs.

Its state is two counters and the moments: two per parameter of AdamW, one per parameter of Muon. It calls the function
behind torch.optim.AdamW, because the class loads torch's compiler at its first step, which takes seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from zeroband.config.optim import (
    AdamWConfig,
    CosineSchedule,
    LinearSchedule,
    OptimConfig,
    StateDtype,
    WarmupStableDecaySchedule,
)
from zeroband.kernels.one_rounding import OneRounding
from zeroband.model.muon import muon_parameters, muon_step
from zeroband.node.sharding import Parameters, is_sharded, local_part
from zeroband.observe.log import get_logger

_log = get_logger(__name__)

_SAME_RATE = 0.001
"""Relative change of the learning rate at resume that is not reported."""

_FUSED_DEVICES = ("cpu", "cuda")
_SLICE_EXACT_DEVICES = ("cuda",)
_ADAMW_MOMENTS = ("exp_avg", "exp_avg_sq")
_MUON_MOMENTS = ("momentum_buffer", "exp_avg_sq")
"""The first name differs from AdamW's, so that the states are not confused."""

_CHUNK = 1 << 20
"""Elements processed together, so that temporaries stay in the cache."""

_LOW_BIT_BLOCK, _LEAST_LOW_BIT = 256, 4096
"""Values with one scale, and the least values of a shard with low-bit moments."""

_LOW_BIT_CHUNK = 1 << 20
"""Values stepped together, a multiple of a block; bounds the temporaries where they are not compiled away."""

StepRule = Literal["adamw", "sign"]
"""Update rule; `sign` is stateless and takes gradients prepared by DeMo."""


def learning_rate(step: int, *, optim: OptimConfig, total_steps: int, peak: float | None = None) -> float:
    """Return the learning rate of inner step `step`, counted from 0. `peak`: AdamW's by default.

    Warmup is linear from peak / warmup_steps at step 0 to the peak at step warmup_steps - 1. Then `cosine` and `linear`
    decay to final_ratio * peak at total_steps; `wsd` holds the peak and decays linearly over the last
    decay_ratio * total_steps steps. From total_steps on it is constant.
    """
    peak, warmup = optim.adamw.lr if peak is None else peak, optim.warmup_steps
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
    """Return the progress from `start` to `stop`, within 0 .. 1."""
    return 1.0 if step >= stop else max(0.0, (step - start) / (stop - start))


def sign_step(params: Tensor, update: Tensor, *, lr: float) -> None:
    """Subtract lr times the sign of the update, in place; any one-dimensional slice.

    Each operation rounds once, so the bits do not depend on devices and slices.
    """
    for theta, q in zip(params.split(_CHUNK), update.split(_CHUNK), strict=True):
        theta.sub_(q.sign().mul_(lr))


class InnerOptimizer:
    """The update rule and its learning-rate schedule.

    AdamW, with Muon for matrices if `optim.muon` is set; or DeMo's theta <- theta (1 - lr weight_decay) - lr
    sign(gradient) (arXiv:2411.19870), which has no moments. Weight decay is decoupled; vectors (norms) decay only with
    `decay_vectors`.

    `module`: the module whose blocks hold Muon's matrices; by default `model`. It must not be on the meta device:
    moments are allocated at once, so that another node's can be copied into them before the first step.
    `slice_exact`: make the bits independent of sharding, threads and processors, which rules out the fused CPU kernel;
    slower, and for moments in float32. `compiled`: compile steps with other moments.
    """

    def __init__(
        self,
        model: Parameters,
        optim: OptimConfig,
        *,
        total_steps: int,
        module: nn.Module | None = None,
        slice_exact: bool = False,
        rule: StepRule = "adamw",
        compiled: bool = False,
    ) -> None:
        self._names = dict(model.named_parameters())
        self._optim = optim
        self._total_steps = total_steps
        self._rule: StepRule = rule
        self._is_exact = slice_exact
        is_muon = optim.muon is not None and rule == "adamw"
        whole = module or cast(nn.Module, model)
        of_muon = {id(matrix) for matrix in muon_parameters(whole).values()} if is_muon else set[int]()
        self._matrices = {name: one for name, one in self._names.items() if id(one) in of_muon}
        self.moment_names: tuple[str, ...] = (_MUON_MOMENTS if is_muon else _ADAMW_MOMENTS) if rule == "adamw" else ()
        """Names of the moments; Muon's parameters have only the first."""
        is_low = optim.state_dtype != "float32" and rule == "adamw"
        self._low_bit = LowBitAdamW(optim.adamw, compiled=compiled) if is_low else None
        devices = _SLICE_EXACT_DEVICES if slice_exact else _FUSED_DEVICES
        self._is_fused = rule == "adamw" and all(p.device.type in devices for p in self._names.values())
        self._step_count = 0
        self._states = {
            name: {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                **self._fresh_moments(name, parameter),
            }
            for name, parameter in self._names.items()
        }

    def _fresh_moments(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        if name in self._matrices:
            return {self.moment_names[0]: torch.zeros_like(parameter)}
        if self._is_low_bit(name):
            dtype, (first, second) = self._optim.state_dtype, self.moment_names
            return {
                first: low_bit_zeros(parameter, dtype, signed=True),
                second: low_bit_zeros(parameter, dtype, signed=False),
            }
        return {moment: torch.zeros_like(parameter) for moment in self.moment_names}

    def _is_low_bit(self, name: str) -> bool:
        return self._low_bit is not None and name not in self._matrices and fits_blocks(self._names[name])

    @property
    def step_count(self) -> int:
        """Position in the schedule in inner steps, including those before this node joined."""
        return self._step_count

    @property
    def update_count(self) -> int:
        """Updates of the moments, for Adam's bias correction."""
        return int(self._states[next(iter(self._names))]["step"].item())

    @property
    def lr(self) -> float:
        """Learning rate of the next `step()`."""
        return learning_rate(self._step_count, optim=self._optim, total_steps=self._total_steps)

    @property
    def lr_muon(self) -> float | None:
        """Learning rate of Muon's matrices in the next `step()`; None if it is AdamW's."""
        peak = self._optim.muon.lr if self._optim.muon is not None else None
        if peak is None:
            return None
        return learning_rate(self._step_count, optim=self._optim, total_steps=self._total_steps, peak=peak)

    def step(self, found_inf: Tensor | None = None) -> None:
        """Update the parameters from their gradients and advance by one inner step.

        Parameters without gradients are unchanged, and all are if `found_inf`, () float32 on the parameters' device,
        is 1; fused kernels read it without synchronising.
        """
        if found_inf is not None and (self._low_bit is not None or not self._is_fused):
            if found_inf.item():
                self.zero_grad()
            found_inf = None
        update = partial(self._update, found_inf=found_inf) if self._rule == "adamw" else self._step_by_signs
        config = self._optim.adamw
        of_vectors = config.weight_decay if config.decay_vectors else 0.0
        others = {name: p for name, p in self._names.items() if name not in self._matrices}
        with torch.no_grad(), OneRounding() if self._is_exact else contextlib.nullcontext():
            self._step_matrices(found_inf)
            update([name for name, p in others.items() if p.ndim >= 2], config.weight_decay)
            update([name for name, p in others.items() if p.ndim < 2], of_vectors)
        self._step_count += 1

    def _step_matrices(self, found_inf: Tensor | None) -> None:
        config, lr = self._optim.muon, self.lr_muon
        if config is None or not self._matrices:
            return
        muon_step(
            self._matrices,
            {name: self._states[name][self.moment_names[0]] for name in self._matrices},
            config,
            lr=self.lr if lr is None else lr,
            weight_decay=self._optim.adamw.weight_decay if config.weight_decay is None else config.weight_decay,
            is_exact=self._is_exact,
            found_inf=found_inf,
        )
        for name, parameter in self._matrices.items():
            if parameter.grad is not None:
                self._states[name]["step"] += 1 if found_inf is None else 1 - found_inf

    def _update(self, names: Iterable[str], weight_decay: float, *, found_inf: Tensor | None) -> None:
        gradients = {name: gradient for name in names if (gradient := self._names[name].grad) is not None}
        if self._low_bit is not None:
            for name in [name for name in gradients if self._is_low_bit(name)]:
                self._step_low_bit(self._low_bit, name, gradients.pop(name), weight_decay)
        states = [self._states[name] for name in gradients]
        config = self._optim.adamw
        adamw(
            [local_part(self._names[name]) for name in gradients],
            [local_part(gradient) for gradient in gradients.values()],
            [local_part(state[self.moment_names[0]]) for state in states],
            [local_part(state[self.moment_names[1]]) for state in states],
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

    def _step_low_bit(self, update: LowBitAdamW, name: str, gradient: Tensor, weight_decay: float) -> None:
        state = self._states[name]
        state["step"] += 1
        moments = [local_part(state[moment]) for moment in self.moment_names]
        shard = local_part(self._names[name].data)
        update.step(shard, local_part(gradient), moments, state["step"], self.lr, weight_decay)

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
        """Continue the schedule at inner step `step`. `update_count`: updates of moments copied from another node."""
        self._step_count = step
        if update_count is not None:
            for state in self._states.values():
                state["step"].fill_(update_count)

    def forget_moments(self) -> None:
        """Reset the moments after a non-finite gradient; the schedule continues."""
        for moment in map(local_part, self.named_moments().values()):
            moment.copy_(torch.zeros(moment.shape, device=moment.device))  # int8 moments have no zero_
        self.seek(self._step_count, update_count=0)

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return this rank's shards by moment and parameter, sharing memory."""
        return {
            moment: {name: local_part(state[moment]) for name, state in self._states.items() if moment in state}
            for moment in self.moment_names
        }

    def named_moments(self) -> dict[str, Tensor]:
        """Return the moments as `exp_avg.PARAMETER` and so on, sharded like the parameters, sharing memory.

        With `optim.state_dtype`, `copy_` and `dequantize` convert them from and to float32.
        """
        states = self._states.items()
        return {f"{moment}.{name}": s[moment] for moment in self.moment_names for name, s in states if moment in s}

    def counters(self) -> dict[str, Any]:
        """Return position in the schedule, learning rate, and updates of the moments."""
        counts = {"step_count": self._step_count, "update_count": self.update_count}
        return {**counts, "moments": self.moment_names, "lr": self.lr}

    def pack(self) -> None:
        """Do nothing: there is no state besides counters and moments."""

    def restore(self, counters: Mapping[str, Any], packed: bytes | None) -> bool:
        """Restore the update count of moments read before; the position in the schedule is the run's."""
        step, before = int(counters["step_count"]), counters.get("lr")
        now = learning_rate(step, optim=self._optim, total_steps=self._total_steps)
        if isinstance(before, float) and not math.isclose(before, now, rel_tol=_SAME_RATE):
            fields = {"step": step, "was": before, "is": now, "total_steps": self._total_steps}
            _log.warning("the learning rate jumps: train.total_steps or [optim] changed", extra={"fields": fields})
        self.seek(self._step_count, update_count=int(counters["update_count"]))
        return True


# -- moments in bfloat16, or in int8 with a scale for each 256 values (arXiv:2110.02861), by torchao ------------------
# It calls the function behind torchao's AdamW8bit on local shards, since FSDP2 moves shards and the class knows them by
# address, and imports torchao when called, which takes seconds.


def fits_blocks(parameter: Tensor) -> bool:
    """Whether this rank's shard consists of whole blocks and is not small; torchao leaves others in float32."""
    numel = local_part(parameter).numel()
    return numel >= _LEAST_LOW_BIT and numel % _LOW_BIT_BLOCK == 0


def low_bit_zeros(parameter: Tensor, dtype: StateDtype, *, signed: bool) -> Tensor:
    """Return a moment, sharded like its parameter; `copy_` rounds float32 into it, `dequantize` reads it."""
    if dtype != "int8":
        return torch.zeros_like(parameter, dtype=getattr(torch, dtype), requires_grad=False)
    torchao: Any = importlib.import_module("torchao.optim.subclass_8bit")  # has no types
    shard = local_part(parameter)
    moment = torchao.OptimState8bit.zeros(shard.shape, signed, _LOW_BIT_BLOCK, shard.device)
    if not is_sharded(parameter):
        return moment
    from torch.distributed.tensor import DTensor  # loaded already

    mesh, placements, shape = parameter.device_mesh, parameter.placements, parameter.shape
    return DTensor.from_local(moment, mesh, placements, run_check=False, shape=shape, stride=parameter.stride())


class LowBitAdamW:
    """torchao's update of one parameter, in float32 whatever the type of the moments.

    `compiled`: fused by torch.compile, in one graph for each length; otherwise by chunks, which is slower.
    """

    def __init__(self, config: AdamWConfig, *, compiled: bool, chunk: int = _LOW_BIT_CHUNK) -> None:
        torchao: Any = importlib.import_module("torchao.optim.adam")  # has no types
        self._rule = torchao.single_param_adam
        self._config = config
        self._is_compiled, self._chunk = compiled, chunk
        if compiled:
            self._rule = torch.compile(self._rule, fullgraph=True, dynamic=False)

    def step(
        self, parameter: Tensor, gradient: Tensor, moments: Sequence[Tensor], count: Tensor, lr: float, decay: float
    ) -> None:
        """Update local shards in place. `moments`: from `low_bit_zeros`. `count`: () float32, this step included."""
        flat = [tensor.reshape(-1) for tensor in (parameter, gradient, *moments)]
        size = parameter.numel() if self._is_compiled else self._chunk
        (beta1, beta2), eps, rate = self._config.betas, self._config.eps, torch.tensor(lr)
        with self._any_lengths():
            for start in range(0, parameter.numel(), size):
                p, g, first, second = (tensor[start : min(start + size, parameter.numel())] for tensor in flat)
                self._rule(p, g, count, first, second, None, rate, beta1, beta2, decay, eps, True, False)

    def _any_lengths(self) -> contextlib.AbstractContextManager[Any]:
        """Lift torch's limit of graphs: a model may have more lengths of shards, which are few and do not change."""
        if not self._is_compiled:
            return contextlib.nullcontext()
        return torch._dynamo.utils.disable_cache_limit()  # pyright: ignore[reportPrivateUsage]
