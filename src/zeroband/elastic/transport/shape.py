"""The shape of a reduction: who owns which part, in what pieces, all-to-all or around a ring. Routes of payloads. Pure.

All members must come to the same shape, so everything here follows from what all of them know.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise

from zeroband.elastic.membership.sites import relay_of
from zeroband.elastic.membership.topology import LinkTable, shard_shares
from zeroband.elastic.transport.engine import Route, Shape
from zeroband.elastic.transport.times import CHUNKS_PER_SHARD, MOST_CHUNK, all_to_all_s, ring_s
from zeroband.kernels.codec import Codec

_ALIGNMENT = 256
"""Shards begin at multiples, so that every block of every codec lies in one shard."""

_LEAST_CHUNK = 1 << 12
_MOST_PIECE, _LEAST_PIECE = 1 << 18, 1 << 14

WORTH_SIZING = 1.25
"""Shards differ in size where an all-to-all ends so much sooner by it: measured rates of equal links differ, too."""

WORTH_A_RING = 1.25
"""A ring is taken where it is so much faster: it rounds a partial sum at each member, an all-to-all every part once."""


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
    behind: Collection[int] = (),
    turn: int = 0,
) -> Route:
    """How payloads pass this member: at sites each goes to one member of every other site, which passes it on there.

    To one `receiver` all send directly. `sites`: place of the member that speaks for each one's site, as in an opening
    that has some; each its own where there are none. `behind`, `turn`: as for `relay_of`.
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
        return relay_of(sender, groups[sites[sender]], groups[speaker], behind, turn)

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
    return min(max(wanted, _LEAST_CHUNK), MOST_CHUNK)


def piece_bytes(length: int) -> int:
    """Bytes of a gathered payload that travel in one frame: several frames in each, over several streams."""
    return min(max(-(-length // CHUNKS_PER_SHARD), _LEAST_PIECE), _MOST_PIECE)
