"""The links that a plan is made with, and how much of the state each member should own. Pure.

Rates are in Mbit/s, in one direction. Every process that reads records loads this file: code with numpy is in `rings`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zeroband.config.ranges import EachMember, Mbit, MemberPlace, Millis

UNKNOWN = 0
"""Rate of a node or link that is not measured yet."""

CHANGE_FACTOR = 1.25
"""A plan changes when a rate, or the slowest link of the ring, changes by this factor: measurements are noisy."""

RELAY_COST = 3
"""Factor by which a relayed link counts as slower than a direct one."""


@dataclass(frozen=True)
class LinkObservation:
    """A member's measurements of its links."""

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
    """Link rates in a plan: the same for all members, and close to what they measured."""

    rates: EachMember[Mbit] = ()
    """Rate of each member's access link; empty: none is known."""
    order: EachMember[MemberPlace] = ()
    """Ring order of the speakers, by their places; empty: as listed."""
    slowest_link: Mbit = UNKNOWN
    """Between any two speakers."""
    slowest_in_ring: Mbit = UNKNOWN
    rtt_ms: Millis = UNKNOWN
    """Between the two members farthest apart."""
    took_ms: Millis = UNKNOWN
    """Length of the last transfer on the slowest member; 0 unless all members had it."""
    dial_out_only: EachMember[MemberPlace] = ()
    """Places of members that others cannot dial: a relay joins two of these; any other member is dialled."""


def is_within_noise(a: int, b: int) -> bool:
    """Whether two rates differ by less than noise."""
    return a == b or (min(a, b) > 0 and max(a, b) < CHANGE_FACTOR * min(a, b))


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
