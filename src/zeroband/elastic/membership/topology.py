"""Links as the members of a plan plan with them, and who should own how much of the state. Pure.

Rates are in Mbit/s, in one direction. Every process that reads records loads this file: what needs numpy is in `rings`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zeroband.config.ranges import EachMember, Mbit, MemberPlace, Millis

UNKNOWN = 0
"""Rate of a node or link that was not measured yet."""

WORTH = 1.25
"""A plan changes when a rate, or the slowest link of the ring, does so by this factor: measurements are noisy."""

RELAYED = 3
"""A link over a relay counts as so many times slower than it is alone."""


@dataclass(frozen=True)
class LinkObservation:
    """What a member knows of its way to the others."""

    rate: int = UNKNOWN
    """Rate of its access link, in each direction."""
    links: Mapping[str, int] = field(default_factory=dict[str, int])
    """To other members, by name."""
    rtt_ms: int = UNKNOWN
    """To the farthest one."""
    took_ms: int = UNKNOWN
    """Length of its last transfer."""


@dataclass(frozen=True)
class LinkTable:
    """What the members of a plan plan with: the same for all, and nearly as they see it."""

    rates: EachMember[Mbit] = ()
    """Rate of each member's access link; empty: none is known."""
    order: EachMember[MemberPlace] = ()
    """Order in a ring of the members that speak for a site, by their places; empty: as they are listed."""
    slowest_link: Mbit = UNKNOWN
    """Between any two that do."""
    slowest_in_ring: Mbit = UNKNOWN
    rtt_ms: Millis = UNKNOWN
    """Between the two that are farthest from one another."""
    took_ms: Millis = UNKNOWN
    """Length of the last transfer, for the member that it took longest; 0 unless all had it."""
    dial_out_only: EachMember[MemberPlace] = ()
    """Members that others cannot dial, by their places: two of these are joined by a relay, and any other dials."""


def is_near(a: int, b: int) -> bool:
    """Whether of two rates one is no news beside the other."""
    return a == b or (min(a, b) > 0 and max(a, b) < WORTH * min(a, b))


def shard_shares(rates: Sequence[float]) -> tuple[float, ...]:
    """What part of the state each member should own, so that an all-to-all ends as early as possible.

    `rates`: of each member's access link in each direction; UNKNOWN ones count as the median of the others.
    Of M members, one that owns the part s sends and receives 1 + (M - 2) s states; so those who are too slow even for
    that own nothing, and the others finish at the same time.
    """
    members = len(rates)
    known = sorted(rate for rate in rates if rate > 0)
    if members <= 2 or not known:
        return (1 / members,) * members if members else ()
    filled = [rate if rate > 0 else known[len(known) // 2] for rate in rates]
    owners, end = _owners(filled)
    shares = [0.0] * members
    for i in owners:
        shares[i] = (filled[i] * end - 1) / (members - 2)
    return tuple(shares)


def _owners(rates: Sequence[float]) -> tuple[list[int], float]:
    """Who owns a shard, of more than two members, and the time in which those have moved a state of one megabit."""
    members = len(rates)
    owners = sorted(range(members), key=lambda i: -rates[i])
    while (end := (members - 2 + len(owners)) / sum(rates[i] for i in owners)) * rates[owners[-1]] < 1:
        owners.pop()  # so slow that it is the last one even without a shard
    return owners, end


def all_to_all_time(rates: Sequence[float]) -> float:
    """Seconds for a state of one megabit, with such access links and the shares of `shard_shares`.

    Who is too slow for a shard still sends a state and receives one. `rates`: all known.
    """
    if len(rates) < 2:
        return 0.0
    return max(1 / min(rates), _owners(rates)[1] if len(rates) > 2 else 0.0)
