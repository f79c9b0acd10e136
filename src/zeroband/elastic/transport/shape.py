"""The shape of a reduction (shards, chunks, all-to-all or ring, predicted time), and routes of payloads. Pure.

All members must compute the same shape, so everything here depends only on data that they share. Imports no torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from zeroband.elastic.membership.sites import relay_of
from zeroband.elastic.membership.topology import UNKNOWN, LinkTable, shard_shares

if TYPE_CHECKING:
    from zeroband.kernels.codec import Codec

_ALIGNMENT = 256
"""Shards begin at multiples of this, so that no codec's block spans two shards."""

_MIN_CHUNK = 1 << 12
_MAX_PIECE, _MIN_PIECE = 1 << 18, 1 << 14

SIZING_GAIN = 1.25
"""Speed-up for which shards get unequal sizes; measured rates of equal links differ slightly."""

RING_GAIN = 1.25
"""Speed-up for which a ring is used: it rounds partial sums at each member, an all-to-all rounds each part once."""

MAX_CHUNK = 1 << 16
"""Most values per frame."""

CHUNKS_PER_SHARD = 16
"""Approximate number of frames per shard."""

DEFAULT_MBIT, DEFAULT_RTT_MS = 1000, 100
"""Assumed rate and round trip of unmeasured links."""

CONTENTION = 1.05
"""Slowdown of an all-to-all of more than two members: transfers that share an access link do not end together
(bench/all_reduce.py links)."""

MESSAGE_S = 5e-5
"""Processor time per message (bench/all_reduce.py messages)."""


@dataclass(frozen=True)
class Shape:
    """Layout of a reduction, equal on all members."""

    codec: Codec
    bounds: tuple[int, ...]
    """Shard s, owned by member s, is [bounds[s], bounds[s + 1]); only speakers of sites have non-empty ones."""
    shares: tuple[float, ...]
    """Coefficient of each member in the mean; they sum to 1, or are all 0."""
    order: tuple[int, ...]
    """Ring order of the speakers."""
    is_ring: bool
    chunk_numel: int
    chain: tuple[int, ...]
    """Next member towards the speaker of each member's site; a speaker's is itself."""
    largest: tuple[float, ...] = ()
    """Largest announced magnitude of each member's values, which bounds accepted ones; empty: unknown."""

    def partners(self, member: int) -> frozenset[int]:
        """Places of the members that this one exchanges bytes with."""
        near = frozenset(m for m, after in enumerate(self.chain) if m == member or after == member)
        near |= {self.chain[member]}
        if self.chain[member] != member:
            return near - {member}
        if not self.is_ring:
            return (near | frozenset(self.order)) - {member}
        at = self.order.index(member)
        return (near | {self.order[at - 1], self.order[(at + 1) % len(self.order)]}) - {member}


@dataclass(frozen=True)
class Route:
    """Routes of a gathering's payloads, as seen by one member. Members are given as places."""

    sources: tuple[int | None, ...]
    """Member from which each payload arrives here (the own one: itself); None: it does not arrive."""
    receivers: frozenset[int]
    """Members that this one sends its own payload to."""
    near: frozenset[int]
    """Other members of its site, to which it relays payloads from other sites."""

    def partners(self, member: int, lengths: Sequence[int]) -> frozenset[int]:
        """Places of the members that this one exchanges bytes with, for payloads of these lengths."""
        sent = [s for s, length in enumerate(lengths) if length and s != member]
        coming = {s: source for s in sent if (source := self.sources[s]) is not None}
        relays = any(source == sender and sender not in self.near for sender, source in coming.items())
        receivers = self.receivers if lengths[member] else frozenset[int]()
        return receivers | frozenset(coming.values()) | (self.near if relays else frozenset[int]())


def shape_of(
    numel: int,
    codec: Codec,
    shares: Sequence[float],
    network: LinkTable | None = None,
    sites: Sequence[int] = (),
    *,
    may_be_ring: bool = True,
) -> Shape:
    """Compute the shape of a reduction.

    `shares`: each member's coefficient; 0 sends nothing. `network`: link table. `sites`: place of each member's
    speaker; empty: no sites. `may_be_ring`: whether contributions may be summed on the way to the owner.
    """
    network, sites = network or LinkTable(), tuple(sites) or tuple(range(len(shares)))
    speakers, encoded_bytes = sorted(set(sites)), codec.encoded_size(numel)
    wide = replace(network, rates=tuple(network.rates[place] for place in speakers) if network.rates else ())
    owned = _shard_fractions(len(speakers), encoded_bytes, wide)
    borders = shard_bounds(numel, owned)
    bounds = tuple(borders[bisect_left(speakers, place)] for place in range(len(shares) + 1))
    longest = max(stop - start for start, stop in pairwise(bounds))
    all_to_all = all_to_all_s(owned, encoded_bytes, wide)
    return Shape(
        codec=codec,
        bounds=bounds,
        shares=tuple(shares),
        order=network.order or tuple(speakers),
        is_ring=may_be_ring and RING_GAIN * ring_s(len(speakers), encoded_bytes, wide) < all_to_all,
        chunk_numel=chunk_numel(longest),
        chain=chain_of(sites),
    )


def chain_of(sites: Sequence[int]) -> tuple[int, ...]:
    """Return the next member towards each one's speaker, from the speakers' places.

    The members of a site form one chain, so each link inside the site carries the state only once.
    """
    chain, last = list(sites), dict[int, int]()
    for place, speaker in reversed(list(enumerate(sites))):
        if place != speaker:
            chain[place] = last.get(speaker, speaker)
            last[speaker] = place
    return tuple(chain)


def route_of(
    member: int,
    sites: Sequence[int],
    *,
    receiver: int | None = None,
    dial_out_only: Collection[int] = (),
    turn: int = 0,
) -> Route:
    """Return the routes of payloads at this member. A payload goes to one member of each other site, which relays it.

    With a `receiver`, all members send to it directly. `sites`: place of each member's speaker, its own without sites.
    `dial_out_only`, `turn`: as for `relay_of`.
    """
    world = len(sites)
    if receiver is not None:
        sources = tuple(range(world)) if member == receiver else (None,) * world
        return Route(sources, frozenset({receiver} - {member}), frozenset())
    groups: dict[int, list[int]] = {}
    for place, speaker in enumerate(sites):
        groups.setdefault(speaker, []).append(place)
    own = groups[sites[member]]

    def relay(sender: int, speaker: int) -> int:
        return relay_of(sender, groups[sites[sender]], groups[speaker], dial_out_only, turn)

    def source_of(sender: int) -> int:
        found = sender if sender in own else relay(sender, sites[member])
        return sender if found == member else found

    near = frozenset(own) - {member}
    relays = frozenset(relay(member, speaker) for speaker in groups if speaker != sites[member])
    return Route(tuple(map(source_of, range(world))), near | relays, near)


def _shard_fractions(world: int, encoded_bytes: int, network: LinkTable) -> tuple[float, ...]:
    """Return the fraction of the state that each member owns."""
    equal, sized = (1 / world,) * world, shard_shares(network.rates)
    is_worth_it = sized and SIZING_GAIN * all_to_all_s(sized, encoded_bytes, network) <= all_to_all_s(
        equal, encoded_bytes, network
    )
    return sized if is_worth_it else equal


def shard_bounds(numel: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Return the bounds of the members' shards, in proportion to these shares, at whole blocks."""
    total, before, bounds = sum(shares), 0.0, [0]
    for share in shares[:-1]:
        before += share
        border = round(numel * before / total / _ALIGNMENT) * _ALIGNMENT
        bounds.append(min(max(border, bounds[-1]), numel))
    return (*bounds, numel)


def chunk_numel(shard_numel: int) -> int:
    """Return the values per frame: several frames per shard, so that transfer and computation overlap."""
    wanted = -(-shard_numel // CHUNKS_PER_SHARD // _ALIGNMENT) * _ALIGNMENT
    return min(max(wanted, _MIN_CHUNK), MAX_CHUNK)


def piece_bytes(length: int) -> int:
    """Return the bytes per frame of a gathered payload: several frames, to use several streams."""
    return min(max(-(-length // CHUNKS_PER_SHARD), _MIN_PIECE), _MAX_PIECE)


# -- predicted times --------------------------------------------------------------------------------------------------


def all_to_all_s(shares: Sequence[float], encoded_bytes: int, network: LinkTable) -> float:
    """Predict the seconds of an all-to-all: until the slowest access link, or link between two members, is done.

    `shares`: fraction of the state that each member owns. Each member sends every other one its part, and the mean of
    the own part. All of it can be in flight at once, except for the means of the last chunk.
    """
    world = len(shares)
    through_access = max(
        (1 + (world - 2) * share) / rate for share, rate in zip(shares, _rates(world, network), strict=True)
    )
    between_two = sum(sorted(shares)[-2:]) / network.slowest_link if network.slowest_link else 0.0
    transfer_s = max(through_access * (CONTENTION if world > 2 else 1), between_two) * encoded_bytes * 8 / 1e6
    chunks_s = (world - 1) * _chunk_s(max(shares) * encoded_bytes, min(_rates(world, network)))
    return transfer_s + chunks_s + _rtt_s(network) + 2 * (world - 1) * MESSAGE_S


def ring_s(world: int, encoded_bytes: int, network: LinkTable) -> float:
    """Predict the seconds of a ring: as many bytes over two links per member; the first chunk makes two rounds."""
    slowest = min(_rates(world, network))
    if network.slowest_in_ring:
        slowest = min(slowest, network.slowest_in_ring)
    transfer_s = 2 * (world - 1) / world * encoded_bytes * 8 / 1e6 / slowest
    return transfer_s + (world - 1) * (2 * _chunk_s(encoded_bytes / world, slowest) + _rtt_s(network) + 2 * MESSAGE_S)


def _chunk_s(shard_bytes: float, rate: float) -> float:
    """Transfer time of a chunk in seconds, assuming one byte per value for the largest ones."""
    return min(shard_bytes / CHUNKS_PER_SHARD, MAX_CHUNK) * 8 / 1e6 / rate


def _rates(world: int, network: LinkTable) -> list[int]:
    """Rates of the access links in Mbit/s; unknown ones count as the median."""
    known = sorted(rate for rate in network.rates if rate > 0)
    usual = known[len(known) // 2] if known else DEFAULT_MBIT
    return [rate or usual for rate in network.rates or (UNKNOWN,) * world]


def _rtt_s(network: LinkTable) -> float:
    return (network.rtt_ms or DEFAULT_RTT_MS) / 1e3
