"""Deterministic top-k by absolute value, with ties going to the first; equal on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def largest(values: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest values by absolute value in each row, ascending.

    Shapes: values (c, n) float32, finite; returns (c, k) int64, k <= n. `torch.topk` breaks ties arbitrarily, so only
    its smallest value is used, as a threshold.
    """
    rows, n = values.shape
    if k == n or rows == 0:
        return torch.arange(k, device=values.device).expand(rows, k)
    sizes = values.abs()
    threshold = sizes.topk(k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    is_chosen = sizes >= threshold
    tied = (is_chosen.sum(dim=1) > k).nonzero().squeeze(1)  # rows with too many values at the threshold
    if len(tied):
        equal = sizes[tied] == threshold[tied]
        room = k - (is_chosen[tied] & ~equal).sum(dim=1, keepdim=True)
        is_chosen[tied] &= ~equal | (equal.cumsum(dim=1) <= room)
    return is_chosen.nonzero()[:, 1].view(rows, k)


def place(indices: Tensor, values: Tensor, n: int) -> Tensor:
    """Scatter values into rows of zeros. Shapes: both (c, k); returns (c, n) float32."""
    return values.new_zeros(len(values), n).scatter_(1, indices.long(), values)
