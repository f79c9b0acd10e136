"""The shape of a reduction: who owns which part, in what pieces it travels, all-to-all or around a ring. Pure.

All members must come to the same shape, so everything here follows from what all of them know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from zeroband.kernels.codec import Codec
from zeroband.plane.engine import Shape

_ALIGNMENT = 256
"""Shards begin at multiples, so that every block of every codec lies in one shard."""

_MOST_CHUNK, _LEAST_CHUNK = 1 << 16, 1 << 12
_CHUNKS_PER_SHARD = 16


@dataclass(frozen=True)
class LinkCosts:
    """What the cost model knows of the network: the slowest member's rate and the longest way."""

    bytes_per_s: float = 125e6
    """In each direction, of the slowest member."""
    rtt_s: float = 0.1
    message_s: float = 2e-4
    """Of CPU for each connection that has something to say."""


def shape_of(
    numel: int,
    codec: Codec,
    weights: Sequence[int],
    *,
    shard_shares: Sequence[float] = (),
    order: Sequence[int] = (),
    costs: LinkCosts | None = None,
) -> Shape:
    """The shape for these members.

    `weights`: of each member's contribution; 0 sends nothing. `shard_shares`: what part each member owns; empty: equal
    parts. `order`: of the members in a ring; empty: as they are listed.
    """
    world, total = len(weights), sum(weights)
    bounds = shard_bounds(numel, shard_shares or [1.0] * world)
    longest = max(stop - start for start, stop in pairwise(bounds))
    return Shape(
        codec=codec,
        bounds=bounds,
        shares=tuple(weight / total if total else 0.0 for weight in weights),
        order=tuple(order or range(world)),
        is_ring=ring_s(world, codec.encoded_size(numel), costs) < all_to_all_s(world, codec.encoded_size(numel), costs),
        chunk_numel=chunk_numel(longest),
    )


def shard_bounds(numel: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Borders of one shard for each member, in proportion to these shares, at whole blocks."""
    total, before, bounds = sum(shares), 0.0, [0]
    for share in shares[:-1]:
        before += share
        border = round(numel * before / total / _ALIGNMENT) * _ALIGNMENT
        bounds.append(min(max(border, bounds[-1]), numel))
    return (*bounds, numel)


def chunk_numel(shard_numel: int) -> int:
    """Values that travel in one frame: several frames in each shard, so that its pieces overtake one another's work."""
    wanted = -(-shard_numel // _CHUNKS_PER_SHARD // _ALIGNMENT) * _ALIGNMENT
    return min(max(wanted, _LEAST_CHUNK), _MOST_CHUNK)


def all_to_all_s(world: int, encoded_bytes: int, costs: LinkCosts | None = None) -> float:
    """Predicted time: every byte leaves its node twice but for the own shard; one way there and one back; each node
    speaks to all others."""
    costs = costs or LinkCosts()
    transfer_s = 2 * (world - 1) / world * encoded_bytes / costs.bytes_per_s
    return transfer_s + costs.rtt_s + (world - 1) ** 2 * costs.message_s


def ring_s(world: int, encoded_bytes: int, costs: LinkCosts | None = None) -> float:
    """Predicted time: as many bytes, over two links for each node; the first piece passes everybody twice."""
    costs = costs or LinkCosts()
    transfer_s = 2 * (world - 1) / world * encoded_bytes / costs.bytes_per_s
    return transfer_s + (world - 1) * (costs.rtt_s + 2 * costs.message_s)
