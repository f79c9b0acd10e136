"""The shape of a reduction: who owns which part, in what pieces, all-to-all or around a ring, and how long that takes.

Routes of payloads. Pure; loads no torch.

All members must come to the same shape, so everything here follows from what all of them know.
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
"""Shards begin at multiples, so that every block of every codec lies in one shard."""

_LEAST_CHUNK = 1 << 12
_MOST_PIECE, _LEAST_PIECE = 1 << 18, 1 << 14

WORTH_SIZING = 1.25
"""Shards differ in size where an all-to-all ends so much sooner by it: measured rates of equal links differ, too."""

WORTH_A_RING = 1.25
"""A ring is taken where it is so much faster: it rounds a partial sum at each member, an all-to-all every part once."""

MAX_CHUNK = 1 << 16
"""Values of one frame at most."""

CHUNKS_PER_SHARD = 16
"""Frames in which a shard travels, about."""

USUAL_MBIT, USUAL_RTT_MS = 1000, 100
"""Rate and round trip where nothing was measured."""

CROWDED = 1.05
"""Time of an all-to-all of more than two members over that of a ring that moves as much: transfers that share an access
link do not end together (bench/all_reduce.py links)."""

MESSAGE_S = 5e-5
"""Processor time for each message of a member (bench/all_reduce.py messages)."""


@dataclass(frozen=True)
class Shape:
    """How a reduction goes; the same on all members, but for `self`."""

    codec: Codec
    bounds: tuple[int, ...]
    """Shard s, owned by member s, is [bounds[s], bounds[s + 1]); only members that speak for a site own some."""
    shares: tuple[float, ...]
    """Share of each member in the mean; they add up to 1, or are all 0."""
    order: tuple[int, ...]
    """Order in a ring of the members that speak for a site."""
    is_ring: bool
    chunk_numel: int
    chain: tuple[int, ...]
    """The next member on each one's way to who speaks for its site, itself where it does."""
    largest: tuple[float, ...] = ()
    """Largest size of a value of each member's contribution, which bounds what is taken; empty: not known."""

    def partners(self, member: int) -> frozenset[int]:
        """Members with whom one exchanges bytes, by their places."""
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
    """How the payloads of a gathering pass one member. Members are told by their places."""

    sources: tuple[int | None, ...]
    """Who brings each member's payload here; this member its own; None: it does not come."""
    receivers: frozenset[int]
    """Who gets the own payload from here."""
    near: frozenset[int]
    """The others of its site: who get from here what members of other sites send here."""

    def partners(self, member: int, lengths: Sequence[int]) -> frozenset[int]:
        """Members with whom this one exchanges bytes, for payloads of these lengths."""
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
    """The shape for these members.

    `shares`: of each member's contribution in the result; 0 sends nothing. `network`: what they know of their links.
    `sites`: place of the member that speaks for each one's site; empty: each speaks for itself. `may_be_ring`: whether
    contributions may be added up on their way to the owner.
    """
    network, sites = network or LinkTable(), tuple(sites) or tuple(range(len(shares)))
    speakers, encoded_bytes = sorted(set(sites)), codec.encoded_size(numel)
    wide = replace(network, rates=tuple(network.rates[place] for place in speakers) if network.rates else ())
    owned = _owned(len(speakers), encoded_bytes, wide)
    borders = shard_bounds(numel, owned)
    bounds = tuple(borders[bisect_left(speakers, place)] for place in range(len(shares) + 1))
    longest = max(stop - start for start, stop in pairwise(bounds))
    all_to_all = all_to_all_s(owned, encoded_bytes, wide)
    return Shape(
        codec=codec,
        bounds=bounds,
        shares=tuple(shares),
        order=network.order or tuple(speakers),
        is_ring=may_be_ring and WORTH_A_RING * ring_s(len(speakers), encoded_bytes, wide) < all_to_all,
        chunk_numel=chunk_numel(longest),
        chain=chain_of(sites),
    )


def chain_of(sites: Sequence[int]) -> tuple[int, ...]:
    """The next member on each one's way to its speaker, by the places of their speakers.

    The others of a site stand one behind the other, in their order, so that each link inside it carries a state once.
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
    """How payloads pass this member: at sites each goes to one member of every other site, which passes it on there.

    To one `receiver` all send directly. `sites`: place of the member that speaks for each one's site, as in a plan
    that has some; each its own where there are none. `dial_out_only`, `turn`: as for `relay_of`.
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


def _owned(world: int, encoded_bytes: int, network: LinkTable) -> tuple[float, ...]:
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
    wanted = -(-shard_numel // CHUNKS_PER_SHARD // _ALIGNMENT) * _ALIGNMENT
    return min(max(wanted, _LEAST_CHUNK), MAX_CHUNK)


def piece_bytes(length: int) -> int:
    """Bytes of a gathered payload that travel in one frame: several frames in each, over several streams."""
    return min(max(-(-length // CHUNKS_PER_SHARD), _LEAST_PIECE), _MOST_PIECE)


# -- how long it takes, as far as the links are known ----------------------------------------------------------------


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
    return min(shard_bytes / CHUNKS_PER_SHARD, MAX_CHUNK) * 8 / 1e6 / rate


def _rates(world: int, network: LinkTable) -> list[int]:
    """Mbit/s of the access links; one that is not known counts as the median."""
    known = sorted(rate for rate in network.rates if rate > 0)
    usual = known[len(known) // 2] if known else USUAL_MBIT
    return [rate or usual for rate in network.rates or (UNKNOWN,) * world]


def _rtt_s(network: LinkTable) -> float:
    return (network.rtt_ms or USUAL_RTT_MS) / 1e3
