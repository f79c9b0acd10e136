"""Topology: who should own how much, and who should follow whom in a ring, by what was measured. Pure.

Rates are in Mbit/s, in one direction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

EXACT_UP_TO = 16
"""So many members are ordered by looking at all rings; more by improving one."""

UNKNOWN = 0
"""Rate of a node or link that was not measured yet."""

WORTH = 1.25
"""A plan changes when a rate, or the slowest link of the ring, does so by this factor: measurements are noisy."""


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
    """What the members of an opening plan with: the same for all, and nearly as they see it."""

    rates: tuple[int, ...] = ()
    """Rate of each member's access link; empty: none is known."""
    order: tuple[int, ...] = ()
    """Order of the members in a ring, by their places; empty: as they are listed."""
    slowest_link: int = UNKNOWN
    """Between any two members."""
    slowest_in_ring: int = UNKNOWN
    rtt_ms: int = UNKNOWN
    """Between the two that are farthest from one another."""
    took_ms: int = UNKNOWN
    """Length of the last transfer, for the member that it took longest; 0 unless all had it."""


def plan(members: Sequence[str], seen: Sequence[LinkObservation], before: LinkTable) -> LinkTable:
    """What to plan with: what was planned with before, but for what has really changed.

    `seen`: by each of the members. `before`: of the same members, or LinkTable() where they are others.
    """
    rates = steady_rates([s.rate for s in seen], before.rates)
    links = _links(members, [s.links for s in seen])
    order = steady_order(len(members), links, before.order)
    known = {pair: rate for pair, rate in links.items() if rate != UNKNOWN}
    ring = order or tuple(range(len(members)))
    return LinkTable(
        rates=rates,
        order=order,
        slowest_link=_steady(min(known.values(), default=UNKNOWN), before.slowest_link),
        slowest_in_ring=_steady(min((known[p] for p in _steps(ring) if p in known), default=0), before.slowest_in_ring),
        rtt_ms=_steady(max((s.rtt_ms for s in seen), default=UNKNOWN), before.rtt_ms),
        took_ms=max((s.took_ms for s in seen), default=UNKNOWN) if all(s.took_ms for s in seen) else UNKNOWN,
    )


def _links(members: Sequence[str], links: Sequence[Mapping[str, int]]) -> dict[tuple[int, int], int]:
    """Rates by the places of both ends; a direction that was not measured is like the other one."""
    pairs = [(a, b) for a in range(len(members)) for b in range(len(members)) if a != b]
    seen = {(a, b): links[a].get(members[b], UNKNOWN) for a, b in pairs}
    return {(a, b): rate or seen[b, a] for (a, b), rate in seen.items()}


def _steady(measured: int, before: int) -> int:
    return before if _is_near(measured, before) else measured


def _steps(order: Sequence[int]) -> list[tuple[int, int]]:
    """The links that a ring uses."""
    return list(zip(order, [*order[1:], order[0]], strict=True)) if len(order) > 1 else []


def steady_rates(measured: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    """The rates to plan with: those from before, unless one of them has really changed.

    `before`: empty where nothing is known, or as many; so is what is returned.
    """
    if len(before) == len(measured) and all(_is_near(a, b) for a, b in zip(measured, before, strict=True)):
        return tuple(before)
    return tuple(measured) if any(measured) else ()


def steady_order(members: int, links: Mapping[tuple[int, int], float], before: Sequence[int]) -> tuple[int, ...]:
    """The ring to plan with: the one from before, unless another one is really faster.

    `links`: rate from one member to another, by their places. `before`: empty where the members follow one another as
    listed, or their places; so is what is returned.
    """
    as_listed = tuple(range(members))
    if members <= 3 or not any(links.values()):
        return ()
    table, old = _table(links, members), tuple(before) or as_listed
    new = ring_order(links, members)
    chosen = new if slowest(table, new) >= WORTH * slowest(table, old) else old
    return () if chosen == as_listed else chosen


def _is_near(a: int, b: int) -> bool:
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
    owners = sorted(range(members), key=lambda i: -filled[i])
    while (end := (members - 2 + len(owners)) / sum(filled[i] for i in owners)) * filled[owners[-1]] < 1:
        owners.pop()  # so slow that it is the last one even without a shard
    shares = [0.0] * members
    for i in owners:
        shares[i] = (filled[i] * end - 1) / (members - 2)
    return tuple(shares)


def ring_order(links: Mapping[tuple[int, int], float], members: int) -> tuple[int, ...]:
    """Order members so that the slowest link from one to the next, around the ring, is as fast as possible.

    Exactly so up to EXACT_UP_TO members, nearly above.

    `links`: rate from one member to another, by their places; one that is missing or UNKNOWN counts as the median.
    """
    if members <= 3:
        return tuple(range(members))
    search = _exact_ring if members <= EXACT_UP_TO else _improved_ring
    return search(_table(links, members))


def _table(links: Mapping[tuple[int, int], float], members: int) -> np.ndarray:
    """Rates (members, members) with the gaps filled."""
    known = sorted(rate for rate in links.values() if rate > 0)
    usual = known[len(known) // 2] if known else 1.0
    return np.array([[links.get((a, b), UNKNOWN) or usual for b in range(members)] for a in range(members)])


def slowest(rates: np.ndarray, order: Sequence[int]) -> float:
    """The rate of the slowest link that a ring uses."""
    return float(min(rates[a, b] for a, b in _steps(order)))


def _exact_ring(rates: np.ndarray) -> tuple[int, ...]:
    """The best bottleneck by bisection over the rates that occur; one set of reachable ends for each set of members."""
    thresholds = np.unique(rates[~np.eye(len(rates), dtype=bool)])
    low, high = 0, len(thresholds) - 1  # the lowest always has a ring
    best = _ring_of(rates >= thresholds[0])
    assert best is not None
    while low < high:
        middle = (low + high + 1) // 2
        found = _ring_of(rates >= thresholds[middle])
        if found is None:
            high = middle - 1
        else:
            low, best = middle, found
    return best


def _ring_of(usable: np.ndarray) -> tuple[int, ...] | None:
    """A ring over all members that uses only these links; it begins with member 0."""
    others = len(usable) - 1
    ends = np.zeros(1 << others, np.uint32)  # of each set of others: which can be the last of a path from 0 through it
    before = [sum(1 << a for a in range(others) if usable[a + 1, b + 1]) for b in range(others)]
    sets = np.arange(1 << others, dtype=np.uint32)
    sizes = sum((sets >> bit) & 1 for bit in range(others))
    for b in range(others):
        ends[1 << b] = (1 << b) if usable[0, b + 1] else 0
    for size in range(1, others):
        layer = sets[sizes == size]
        for b in range(others):
            grown = layer[((layer >> b) & 1 == 0) & ((ends[layer] & before[b]) != 0)]
            ends[grown | (1 << b)] |= 1 << b
    return _trace(usable, ends, before)


def _trace(usable: np.ndarray, ends: np.ndarray, before: Sequence[int]) -> tuple[int, ...] | None:
    """Read a ring backwards out of the reachable ends."""
    others = len(usable) - 1
    left = (1 << others) - 1
    last = [b for b in range(others) if int(ends[left]) >> b & 1 and usable[b + 1, 0]]
    if not last:
        return None
    at, path = last[0], [last[0]]
    while left != 1 << at:
        left ^= 1 << at
        candidates = int(ends[left]) & before[at]
        at = candidates.bit_length() - 1
        path.append(at)
    return (0, *(b + 1 for b in reversed(path)))


def _improved_ring(rates: np.ndarray) -> tuple[int, ...]:
    """Always to the nearest that is left, then pieces turned around as long as the slowest links get faster."""
    members = len(rates)
    order, left = [0], set(range(1, members))
    while left:
        following = max(sorted(left), key=lambda b: rates[order[-1], b])
        order.append(following)
        left.remove(following)
    best, is_better = _quality(rates, order), True
    while is_better:
        is_better = False
        for i in range(1, members - 1):
            for j in range(i + 1, members):
                turned = [*order[:i], *reversed(order[i : j + 1]), *order[j + 1 :]]
                quality = _quality(rates, turned)
                if quality > best:
                    order, best, is_better = turned, quality, True
    return tuple(order)


def _quality(rates: np.ndarray, order: Sequence[int]) -> tuple[float, ...]:
    """The slowest link first, then the next one: equal bottlenecks are told apart."""
    return tuple(sorted(float(rates[a, b]) for a, b in _steps(order))[:4])
