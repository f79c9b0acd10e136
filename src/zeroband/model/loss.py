"""The training loss as sums over targets; the caller divides by the targets of the whole step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

IGNORE_INDEX = -100
"""Targets with this value are ignored."""

LOGITS_BYTES = 1 << 28
"""Limit of float32 logits in memory; with gradients, four times as much is used."""


class TokenLoss(NamedTuple):
    """Sums over the targets of a micro-batch: float32 scalars on the logits' device, not synchronised."""

    objective: Tensor
    """Cross entropy plus z-loss; multiply by `gradient_scale` before backward."""
    cross_entropy: Tensor
    """Cross entropy in nats, detached, for reports."""
    targets: Tensor
    """Number of targets, int64."""
    per_target: Tensor | None = None
    """(n,) cross entropy of each target in nats, detached; 0 for ignored ones. None if not requested."""


LogitsLoss = Callable[..., TokenLoss]
"""`next_token_loss`, possibly compiled."""


def next_token_loss(logits: Tensor, targets: Tensor, *, z_loss: float = 0.0, by_target: bool = False) -> TokenLoss:
    """Sum the cross entropy of the targets in float32.

    Adds z_loss * log(Z)^2 per target, where Z is the softmax's denominator (PaLM, arXiv:2204.02311, section 5).
    `by_target`: also return `per_target`; sums and gradient keep their bits.
    Shapes: logits (..., v) of any float type, targets (...) int64, or IGNORE_INDEX.
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
    """Compute `next_token_loss` of the logits x @ weight.T with at most LOGITS_BYTES of them in memory.

    Larger logits are split into parts, whose gradients are computed in the forward pass and only scaled in the backward
    pass, so nothing is computed twice. The weight's gradient then accumulates in the weight's type.
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
    """Sum the losses of each source in a fixed order; a NaN stays within its source.

    Shapes: per_target (b * t,), sources (b,) int64 on any device: index of each row's source; returns (count,).
    """
    rows = per_target.view(len(sources), -1).sum(1)  # (b,)
    numbers = torch.arange(count, device=rows.device)[:, None]
    return torch.where(sources.to(rows.device, non_blocking=True) == numbers, rows, 0.0).sum(1)


def gradient_scale(targets_in_step: int, world_size: int) -> float:
    """Return the factor on each `objective` that makes the node's gradient the mean over all targets of the step.

    It undoes FSDP2's average over ranks, so neither the number of ranks nor micro-batches changes the gradient, even
    with unequal numbers of targets. `targets_in_step`: of the whole node; 0 gives a gradient of 0.
    """
    return world_size / targets_in_step if targets_in_step else 0.0
