"""The training loss, as sums over tokens: the caller, who knows the tokens of the whole step, divides once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

IGNORE_INDEX = -100
"""A target with this value does not count."""

LOGITS_BYTES = 1 << 28
"""Float32 logits are never more than this at a time: with their gradients four times as much lies in memory."""


class TokenLoss(NamedTuple):
    """Sums over the targets of one micro-batch, float32 scalars on the logits' device; nothing is read back yet."""

    objective: Tensor
    """Cross entropy plus z-loss, to run backward from after multiplying with `gradient_scale`."""
    cross_entropy: Tensor
    """Cross entropy in nats, detached: what is reported."""
    targets: Tensor
    """How many targets counted, int64."""
    per_target: Tensor | None = None
    """(n,) cross entropy of each target in nats, detached; 0 where it does not count. None: not asked for."""


LogitsLoss = Callable[..., TokenLoss]
"""`next_token_loss`, as it is or compiled."""


def next_token_loss(logits: Tensor, targets: Tensor, *, z_loss: float = 0.0, by_target: bool = False) -> TokenLoss:
    """Cross entropy of each target under the softmax of its logits, summed in float32.

    Adds z_loss * log(Z)^2 for each target, Z being the softmax's denominator (PaLM, arXiv:2204.02311, section 5).
    `by_target`: gives `per_target` as well, which changes no bit of the sums and of the gradient.
    Shapes: logits (..., v) of any float type, targets (...) int64 with IGNORE_INDEX where nothing is to be learned.
    """
    flat_logits = logits.flatten(0, -2).float()  # (n, v)
    flat_targets = targets.flatten()  # (n,)
    log_p = F.log_softmax(flat_logits, dim=-1)  # (n, v)
    cross_entropy = F.nll_loss(log_p, flat_targets, ignore_index=IGNORE_INDEX, reduction="sum")
    counted = flat_targets != IGNORE_INDEX
    objective = cross_entropy
    if z_loss:
        log_partition = torch.logsumexp(flat_logits, dim=-1).masked_fill(~counted, 0.0)
        objective = objective + z_loss * log_partition.square().sum()
    per_target = None
    if by_target:
        per_target = F.nll_loss(log_p.detach(), flat_targets, ignore_index=IGNORE_INDEX, reduction="none")
    return TokenLoss(objective, cross_entropy.detach(), counted.sum(), per_target)


def linear_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    z_loss: float = 0.0,
    by_target: bool = False,
    logits_loss: LogitsLoss = next_token_loss,
) -> TokenLoss:
    """`next_token_loss` of the logits x @ weight.T, of which never more than LOGITS_BYTES exist at a time.

    Where they are more, each part's gradient is taken at once, in the forward pass, and the backward pass only scales
    it: nothing is computed twice. The weight's gradient is then summed in the weight's type, part after part.
    Shapes: x (b, t, d), weight (v, d), targets (b, t) int64.
    """
    rows, flat_targets = x.flatten(0, 1), targets.flatten()
    parts = -(-rows.shape[0] * weight.shape[0] * 4 // LOGITS_BYTES)
    if parts <= 1:
        return logits_loss(F.linear(rows, weight), flat_targets, z_loss=z_loss, by_target=by_target)
    in_part = partial(logits_loss, z_loss=z_loss, by_target=by_target)
    return TokenLoss(*_LossInParts.apply(rows, weight, flat_targets, in_part, parts, torch.is_grad_enabled()))


class _LossInParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        loss_of: Callable[[Tensor, Tensor], TokenLoss],
        parts: int,
        is_training: bool,
    ) -> tuple[Tensor | None, ...]:
        of_x, of_weight = (torch.zeros_like(t) if is_training else None for t in (x, weight))
        sums = [torch.zeros((), dtype=torch.float32, device=x.device) for _ in range(2)]
        counted = torch.zeros((), dtype=torch.int64, device=x.device)
        each: list[Tensor] = []
        size = -(-x.shape[0] // parts)
        for start in range(0, x.shape[0], size):
            rows = slice(start, start + size)
            logits = F.linear(x[rows], weight).requires_grad_(is_training)
            with torch.set_grad_enabled(is_training):
                loss = loss_of(logits, targets[rows])
            if of_x is not None and of_weight is not None:
                (of_logits,) = torch.autograd.grad(loss.objective, logits)
                torch.mm(of_logits, weight, out=of_x[rows])
                of_weight.addmm_(of_logits.T, x[rows])
            sums[0] += loss.objective.detach()
            sums[1] += loss.cross_entropy
            counted += loss.targets
            if loss.per_target is not None:
                each.append(loss.per_target)
        ctx.gradients = of_x, of_weight
        per_target = torch.cat(each) if each else None
        ctx.mark_non_differentiable(sums[1], counted, *([] if per_target is None else [per_target]))
        return sums[0], sums[1], counted, per_target

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]: torch names what the decorator does not
        ctx: Any, scale: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        of_x, of_weight = (gradient.mul_(scale) for gradient in ctx.gradients)
        ctx.gradients = None
        return of_x, of_weight, None, None, None, None


def sums_by_source(per_target: Tensor, sources: Tensor, count: int) -> Tensor:
    """Sum up the targets of each source, in one order, whatever the device: no source's NaN gets into another's sum.

    Shapes: per_target (b * t,), sources (b,) int64 on any device, the number of the source of each row; gives (count,).
    """
    rows = per_target.view(len(sources), -1).sum(1)  # (b,)
    numbers = torch.arange(count, device=rows.device)[:, None]
    return torch.where(sources.to(rows.device, non_blocking=True) == numbers, rows, 0.0).sum(1)


def gradient_scale(targets_in_step: int, world_size: int) -> float:
    """Factor on each micro-batch's `objective` that makes the node's gradient the mean over all targets of the step.

    FSDP2 averages gradients over the ranks, which divides by `world_size`; this undoes it. So neither the number of
    ranks nor the cut into micro-batches changes the gradient, even where ranks have unequal numbers of targets.
    `targets_in_step` counts the whole node: all its ranks and micro-batches of this inner step. Without any, all losses
    are sums of nothing, and the gradient is 0.
    """
    return world_size / targets_in_step if targets_in_step else 0.0
