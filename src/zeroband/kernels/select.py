"""Which values of a chunk are sent: those of the largest size; of equal ones the first. The same on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def largest(values: Tensor, k: int) -> Tensor:
    """Places of the k values of largest size in each row, ascending.

    Shapes: values (c, n) float32, finite; gives (c, k) int64, k <= n. `torch.topk` leaves open which of equal values it
    takes, so only the size of the smallest one that it takes is believed.
    """
    rows, n = values.shape
    if k == n or rows == 0:
        return torch.arange(k, device=values.device).expand(rows, k)
    sizes = values.abs()
    border = sizes.topk(k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    is_chosen = sizes >= border
    crowded = (is_chosen.sum(dim=1) > k).nonzero().squeeze(1)  # more values of the border's size than there is room for
    if len(crowded):
        equal = sizes[crowded] == border[crowded]
        room = k - (is_chosen[crowded] & ~equal).sum(dim=1, keepdim=True)
        is_chosen[crowded] &= ~equal | (equal.cumsum(dim=1) <= room)
    return is_chosen.nonzero()[:, 1].view(rows, k)


def place(indices: Tensor, values: Tensor, n: int) -> Tensor:
    """Rows of zeros with these values at these places. Shapes: both (c, k); gives (c, n) float32."""
    return values.new_zeros(len(values), n).scatter_(1, indices.long(), values)
