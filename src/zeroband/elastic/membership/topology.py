"""The link table of a plan, and the size of each member's shard. Pure.

Rates are in Mbit/s, in one direction. Every process that reads records imports this file, so code with numpy is in
`rings`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroband.config.ranges import EachMember, Mbit, MemberPlace, Millis

UNKNOWN = 0
"""Rate of an unmeasured node or link."""

CHANGE_FACTOR = 1.25
"""Plans ignore changes of rates below this factor, since measurements are noisy."""

RELAY_COST = 3
"""Assumed slowdown of a relayed link."""


@dataclass(frozen=True)
class LinkTable:
    """Link rates of a plan: equal for all members, and close to their measurements."""

    rates: EachMember[Mbit] = ()
    """Rate of each member's access link; empty: unknown."""
    order: EachMember[MemberPlace] = ()
    """Ring order of the speakers, as places; empty: as listed."""
    slowest_link: Mbit = UNKNOWN
    """Between any two speakers."""
    slowest_in_ring: Mbit = UNKNOWN
    rtt_ms: Millis = UNKNOWN
    """Between the two members farthest apart."""
    took_ms: Millis = UNKNOWN
    """Duration of the last transfer on the slowest member; 0 unless all members were in it."""
    dial_out_only: EachMember[MemberPlace] = ()
    """Places of dial-out-only members; a link between two of them needs a relay."""


def is_within_noise(a: int, b: int) -> bool:
    """Whether two rates differ by no more than measurement noise."""
    return a == b or (min(a, b) > 0 and max(a, b) < CHANGE_FACTOR * min(a, b))


def shard_shares(rates: Sequence[float]) -> tuple[float, ...]:
    """Return the fraction of the state that each member should own, to minimise the time of an all-to-all.

    `rates`: of the members' access links; UNKNOWN counts as the median. Of M members, the owner of a fraction s sends
    and receives 1 + (M - 2) s states. Members too slow even for 1 state own nothing; the others finish at the same
    time.
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
    """Return the owners among more than two members, and their time for a state of one megabit."""
    members = len(rates)
    owners = sorted(range(members), key=lambda i: -rates[i])
    while (end := (members - 2 + len(owners)) / sum(rates[i] for i in owners)) * rates[owners[-1]] < 1:
        owners.pop()  # it would finish last even without a shard
    return owners, end


def all_to_all_time(rates: Sequence[float]) -> float:
    """Return the seconds for a state of one megabit with the shares of `shard_shares`. `rates`: all known.

    Members too slow for a shard still send and receive one state.
    """
    if len(rates) < 2:
        return 0.0
    return max(1 / min(rates), _owners(rates)[1] if len(rates) > 2 else 0.0)
