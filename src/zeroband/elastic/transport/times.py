"""How long a reduction takes: predictions from what is known of the links. Pure; no torch."""

from __future__ import annotations

from collections.abc import Sequence

from zeroband.elastic.membership.topology import UNKNOWN, LinkTable

MOST_CHUNK = 1 << 16
"""Values of one frame at most."""

CHUNKS_PER_SHARD = 16
"""A shard travels in about so many frames."""

USUAL_MBIT, USUAL_RTT_MS = 1000, 100
"""Rate and round trip where nothing was measured."""

CROWDED = 1.05
"""Time of an all-to-all of more than two members over that of a ring that moves as much: transfers that share an access
link do not end together (bench/all_reduce.py links)."""

MESSAGE_S = 5e-5
"""Processor time for each message of a member (bench/all_reduce.py messages)."""


def all_to_all_s(shares: Sequence[float], encoded_bytes: int, network: LinkTable) -> float:
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


def ring_s(world: int, encoded_bytes: int, network: LinkTable) -> float:
    """Predicted time: as many bytes, over two links for each member; the first piece passes everybody twice."""
    slowest = min(_rates(world, network))
    if network.slowest_in_ring:
        slowest = min(slowest, network.slowest_in_ring)
    transfer_s = 2 * (world - 1) / world * encoded_bytes * 8 / 1e6 / slowest
    return transfer_s + (world - 1) * (2 * _chunk_s(encoded_bytes / world, slowest) + _rtt_s(network) + 2 * MESSAGE_S)


def _chunk_s(shard_bytes: float, rate: float) -> float:
    """Seconds for which a chunk is on its way; those of large shards are taken to have a byte for each value."""
    return min(shard_bytes / CHUNKS_PER_SHARD, MOST_CHUNK) * 8 / 1e6 / rate


def _rates(world: int, network: LinkTable) -> list[int]:
    """Mbit/s of the access links; one that is not known counts as the median."""
    known = sorted(rate for rate in network.rates if rate > 0)
    usual = known[len(known) // 2] if known else USUAL_MBIT
    return [rate or usual for rate in network.rates or (UNKNOWN,) * world]


def _rtt_s(network: LinkTable) -> float:
    return (network.rtt_ms or USUAL_RTT_MS) / 1e3
