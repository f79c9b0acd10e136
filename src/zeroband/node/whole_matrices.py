"""Whole matrices from their shards, each on one local rank, and what was made of them back into shards.

FSDP2 cuts dim 0, so the shards of a matrix are blocks of its rows, in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, cat

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def map_whole(
    shards: Sequence[Tensor], rows: Sequence[int], mesh: DeviceMesh, apply: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Return this rank's shards of `apply(whole)`, which keeps shape and type, of one matrix for each rank at most.

    Shapes: shards (m_i, n_i), this rank's rows of a matrix of rows[i] rows in all; all of one type. Matrix i is whole
    on rank i alone, so no work is done twice. Called by all ranks together, for the same matrices.
    """
    rank, ranks, group = mesh.get_local_rank(), mesh.size(), mesh.get_group()
    assert len(shards) == len(rows) <= ranks, (len(shards), len(rows), ranks)
    is_owner = rank < len(shards)
    sent = [shard.numel() for shard in shards] + [0] * (ranks - len(shards))
    received = [0] * ranks
    if is_owner:
        received = [shards[rank].shape[1] * _rows_of(other, rows[rank], ranks) for other in range(ranks)]
    ours = cat([shard.reshape(-1) for shard in shards])
    whole = ours.new_empty(sum(received))
    dist.all_to_all_single(whole, ours, received, sent, group=group)  # pyright: ignore[reportUnknownMemberType]
    if is_owner:
        whole = apply(whole.view(rows[rank], -1)).reshape(-1)
    dist.all_to_all_single(ours, whole, sent, received, group=group)  # pyright: ignore[reportUnknownMemberType]
    parts = ours.split(sent)
    return [part.view(shard.shape) for part, shard in zip(parts, shards, strict=False)]


def _rows_of(rank: int, rows: int, ranks: int) -> int:
    """How many rows FSDP2 gives to a rank."""
    each = -(-rows // ranks)
    return min((rank + 1) * each, rows) - min(rank * each, rows)
