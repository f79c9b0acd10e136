"""The training loss, as sums over tokens: whoever knows how many tokens the whole step has divides once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORE_INDEX = -100
"""A target with this value does not count."""


@dataclass(frozen=True)
class TokenLoss:
    """Sums over the targets of one micro-batch, float32 scalars on the logits' device; nothing is read back yet."""

    objective: Tensor
    """Cross entropy plus z-loss, to run backward from after multiplying with `gradient_scale`."""
    cross_entropy: Tensor
    """Cross entropy in nats, detached: what is reported."""
    targets: Tensor
    """How many targets counted, int64."""


def next_token_loss(logits: Tensor, targets: Tensor, *, z_loss: float = 0.0) -> TokenLoss:
    """Cross entropy of each target under the softmax of its logits, summed in float32.

    Adds z_loss * log(Z)^2 for each target, Z being the softmax's denominator (PaLM, arXiv:2204.02311, section 5).
    Shapes: logits (b, t, v) of any float type, targets (b, t) int64 with IGNORE_INDEX where nothing is to be learned.
    """
    flat_logits = logits.flatten(0, 1).float()  # (b t, v)
    flat_targets = targets.flatten()  # (b t,)
    cross_entropy = F.cross_entropy(flat_logits, flat_targets, ignore_index=IGNORE_INDEX, reduction="sum")
    counted = flat_targets != IGNORE_INDEX
    objective = cross_entropy
    if z_loss:
        log_partition = torch.logsumexp(flat_logits, dim=-1).masked_fill(~counted, 0.0)
        objective = objective + z_loss * log_partition.square().sum()
    return TokenLoss(objective, cross_entropy.detach(), counted.sum())


def gradient_scale(targets_in_step: int, world_size: int) -> float:
    """Factor on each micro-batch's `objective` that makes the node's gradient the mean over all targets of the step.

    FSDP2 averages gradients over the ranks, which divides by `world_size`; this undoes it. So neither the number of
    ranks nor the cut into micro-batches changes the gradient, even where ranks have unequal numbers of targets.
    `targets_in_step` counts the whole node: all its ranks and micro-batches of this inner step.
    """
    if targets_in_step < 1:
        raise ValueError(f"targets_in_step={targets_in_step}: an inner step needs at least one target")
    return world_size / targets_in_step
