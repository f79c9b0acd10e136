"""The shape of a reduction: who owns which part, in what pieces it travels, all-to-all or around a ring. Pure.

All members must come to the same shape, so everything here follows from what all of them know.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from zeroband.kernels.codec import Codec
from zeroband.plane.engine import Shape
from zeroband.plane.topology import UNKNOWN, Network, shard_shares

_ALIGNMENT = 256
"""Shards begin at multiples, so that every block of every codec lies in one shard."""

_MOST_CHUNK, _LEAST_CHUNK = 1 << 16, 1 << 12
_CHUNKS_PER_SHARD = 16
_MOST_PIECE, _LEAST_PIECE = 1 << 18, 1 << 14


USUAL_MBIT, USUAL_RTT_MS = 1000, 100
"""Where nothing was measured."""

CROWDED = 1.05
"""Time of an all-to-all of more than two members over that of a ring that moves as much: transfers that share an access
link do not end together (bench/all_reduce.py links)."""

MESSAGE_S = 5e-5
"""Of processor time for each message of a member (bench/all_reduce.py messages)."""

WORTH_SIZING = 1.25
"""Shards differ in size where an all-to-all ends so much sooner by it: measured rates of equal links differ, too."""

WORTH_A_RING = 1.25
"""A ring is taken where it is so much faster: it rounds a partial sum at each member, an all-to-all every part once."""


def shape_of(numel: int, codec: Codec, shares: Sequence[float], network: Network | None = None) -> Shape:
    """The shape for these members.

    `shares`: of each member's contribution in the result; 0 sends nothing. `network`: what they know of their links.
    """
    network = network or Network()
    world, encoded_bytes = len(shares), codec.encoded_size(numel)
    owned = _owned(world, encoded_bytes, network)
    bounds = shard_bounds(numel, owned)
    longest = max(stop - start for start, stop in pairwise(bounds))
    return Shape(
        codec=codec,
        bounds=bounds,
        shares=tuple(shares),
        order=network.order or tuple(range(world)),
        is_ring=WORTH_A_RING * ring_s(world, encoded_bytes, network) < all_to_all_s(owned, encoded_bytes, network),
        chunk_numel=chunk_numel(longest),
    )


def _owned(world: int, encoded_bytes: int, network: Network) -> tuple[float, ...]:
    """What part of the state each member owns."""
    equal, sized = (1 / world,) * world, shard_shares(network.rates)
    is_worth_it = sized and WORTH_SIZING * all_to_all_s(sized, encoded_bytes, network) <= all_to_all_s(
        equal, encoded_bytes, network
    )
    return sized if is_worth_it else equal


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


def piece_bytes(length: int) -> int:
    """Bytes of a gathered payload that travel in one frame: several frames in each, over several streams."""
    return min(max(-(-length // _CHUNKS_PER_SHARD), _LEAST_PIECE), _MOST_PIECE)


def all_to_all_s(shares: Sequence[float], encoded_bytes: int, network: Network) -> float:
    """Predicted time: until the last access link and the slowest link between two members have carried their part.

    `shares`: what part of the state each member owns. Every member sends the others their parts and its own part's mean
    to each; all of it may be under way at once, but for the mean of the last chunk, whose parts come first.
    """
    world = len(shares)
    through_access = max(
        (1 + (world - 2) * share) / rate for share, rate in zip(shares, _rates(world, network), strict=True)
    )
    between_two = sum(sorted(shares)[-2:]) / network.slowest_link if network.slowest_link else 0.0
    transfer_s = max(through_access * (CROWDED if world > 2 else 1), between_two) * encoded_bytes * 8 / 1e6
    chunks_s = (world - 1) * _chunk_s(max(shares) * encoded_bytes, min(_rates(world, network)))
    return transfer_s + chunks_s + _rtt_s(network) + 2 * (world - 1) * MESSAGE_S


def ring_s(world: int, encoded_bytes: int, network: Network) -> float:
    """Predicted time: as many bytes, over two links for each member; the first piece passes everybody twice."""
    slowest = min(_rates(world, network))
    if network.slowest_in_ring:
        slowest = min(slowest, network.slowest_in_ring)
    transfer_s = 2 * (world - 1) / world * encoded_bytes * 8 / 1e6 / slowest
    return transfer_s + (world - 1) * (2 * _chunk_s(encoded_bytes / world, slowest) + _rtt_s(network) + 2 * MESSAGE_S)


def _chunk_s(shard_bytes: float, rate: float) -> float:
    """For which a chunk is on its way; those of large shards are taken to have a byte for each value."""
    return min(shard_bytes / _CHUNKS_PER_SHARD, _MOST_CHUNK) * 8 / 1e6 / rate


def _rates(world: int, network: Network) -> list[int]:
    """Mbit/s of the access links; one that is not known counts as the median."""
    known = sorted(rate for rate in network.rates if rate > 0)
    usual = known[len(known) // 2] if known else USUAL_MBIT
    return [rate or usual for rate in network.rates or (UNKNOWN,) * world]


def _rtt_s(network: Network) -> float:
    return (network.rtt_ms or USUAL_RTT_MS) / 1e3
