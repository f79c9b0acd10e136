"""Ring orders by measured links, and link tables that are stable under measurement noise. Pure.

Rates are in Mbit/s, in one direction.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

import numpy as np

from zeroband.elastic.membership.records import LinkRates, Ready
from zeroband.elastic.membership.topology import CHANGE_FACTOR, RELAY_COST, UNKNOWN, LinkTable, is_within_noise

Rates = np.ndarray
"""Mbit/s (members, members) from one member to another."""

EXACT_UP_TO = 16
"""Up to this many members the best ring is found exactly; above, by local search."""


def plan_links(
    members: Sequence[str],
    seen: Sequence[tuple[Ready, LinkRates]],
    before: LinkTable,
    *,
    sites: Sequence[int] = (),
    dial_out_only: Collection[str] = (),
) -> LinkTable:
    """Return the link table of a plan: the previous one, updated where a rate changed by more than noise.

    `seen`: what each member measured. `before`: table of the same members, or LinkTable(). `sites`: place of each
    member's speaker; empty: no sites.
    """
    ready, links = [record for record, _ in seen], [measured for _, measured in seen]
    took_ms = [record.took_ms for record in ready]
    rates = steady_rates([record.rate for record in ready], before.rates)
    dial_out_only_places = tuple(place for place, member in enumerate(members) if member in dial_out_only)
    wide = sorted(set(sites)) or list(range(len(members)))
    table = _relayed(_table(members, [measured.mbit for measured in links]), dial_out_only_places)[np.ix_(wide, wide)]
    places = {place: number for number, place in enumerate(wide)}
    order_before = [places[place] for place in before.order if place in places]
    order = steady_order(table, order_before if len(order_before) == len(wide) else ())
    known = table[table > UNKNOWN]
    used = [table[step] for step in _steps(order or range(len(wide))) if table[step] > UNKNOWN]
    return LinkTable(
        rates=rates,
        order=tuple(wide[number] for number in order),
        slowest_link=_steady(int(known.min()) if known.size else UNKNOWN, before.slowest_link),
        slowest_in_ring=_steady(int(min(used, default=UNKNOWN)), before.slowest_in_ring),
        rtt_ms=_steady(max((measured.rtt_ms for measured in links), default=UNKNOWN), before.rtt_ms),
        took_ms=max(took_ms, default=UNKNOWN) if all(took_ms) else UNKNOWN,
        dial_out_only=dial_out_only_places,
    )


def _table(members: Sequence[str], links: Sequence[Mapping[str, int]]) -> Rates:
    """Return rates (members, members) from one to another; an unmeasured direction takes that of the opposite one."""
    places = {member: place for place, member in enumerate(members)}
    table = np.full((len(members), len(members)), float(UNKNOWN))
    for place, seen in enumerate(links):
        for member, rate in seen.items():
            if member in places and places[member] != place:
                table[place, places[member]] = rate
    return np.where(table > UNKNOWN, table, table.T)


def _relayed(table: Rates, dial_out_only: Sequence[int]) -> Rates:
    """Estimate unknown rates between two dial-out-only members, which may need a relay.

    Relayed traffic crosses the relay's link twice, on top of the relay's own, and other pairs may share it. So rings
    avoid such pairs if possible. Measured rates already include this; hole-punched pairs need no relay.
    """
    if len(dial_out_only) < 2 or not table.any():
        return table
    pairs = np.ix_(dial_out_only, dial_out_only)
    found = table.copy()
    found[pairs] = np.where(table > UNKNOWN, table, np.maximum(_filled(table) / RELAY_COST, 1.0))[pairs]
    found[dial_out_only, dial_out_only] = UNKNOWN
    return found


def _steady(measured: int, before: int) -> int:
    return before if is_within_noise(measured, before) else measured


def _steps(order: Sequence[int]) -> list[tuple[int, int]]:
    """Return the links of a ring."""
    return list(zip(order, [*order[1:], order[0]], strict=True)) if len(order) > 1 else []


def steady_rates(measured: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    """Return the previous rates, unless one changed by more than noise. Empty: unknown."""
    if len(before) == len(measured) and all(is_within_noise(a, b) for a, b in zip(measured, before, strict=True)):
        return tuple(before)
    return tuple(measured) if any(measured) else ()


def steady_order(table: Rates, before: Sequence[int]) -> tuple[int, ...]:
    """Return the previous ring order, unless another is faster by more than noise. Empty: as listed.

    `table`: rates (members, members) from one to another, or UNKNOWN.
    """
    members = len(table)
    as_listed = tuple(range(members))
    if members <= 3 or not table.any():
        return ()
    rates, old = _filled(table), tuple(before) or as_listed
    new = ring_order(table)
    chosen = new if slowest(rates, new) >= CHANGE_FACTOR * slowest(rates, old) else old
    return () if chosen == as_listed else chosen


def ring_order(table: Rates) -> tuple[int, ...]:
    """Order members so that the slowest link from one to the next, around the ring, is as fast as possible.

    Exactly so up to EXACT_UP_TO members, nearly above.

    `table`: rates (members, members) from one to another; UNKNOWN ones count as the median of the others.
    """
    return _searched(np.ascontiguousarray(table).tobytes(), len(table))


@lru_cache(maxsize=4)  # link tables rarely change from round to round
def _searched(table: bytes, members: int) -> tuple[int, ...]:
    if members <= 3:
        return tuple(range(members))
    search = _exact_ring if members <= EXACT_UP_TO else _improved_ring
    return search(_filled(np.frombuffer(table).reshape(members, members)))


def _filled(table: Rates) -> Rates:
    """Replace unknown rates by the median."""
    known = np.sort(table[table > UNKNOWN])
    return np.where(table > UNKNOWN, table, known[len(known) // 2] if known.size else 1.0)


def slowest(rates: np.ndarray, order: Sequence[int]) -> float:
    """Return the rate of a ring's slowest link."""
    return float(min(rates[a, b] for a, b in _steps(order)))


def _exact_ring(rates: np.ndarray) -> tuple[int, ...]:
    """Find the best bottleneck by bisection over the occurring rates, with a Hamiltonian-cycle test for each."""
    thresholds = np.unique(rates[~np.eye(len(rates), dtype=bool)])
    low, high = 0, len(thresholds) - 1  # at the lowest threshold all links are usable
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
    """Find a Hamiltonian cycle of the usable links by dynamic programming over subsets (Held-Karp), if there is one."""
    others = len(usable) - 1
    ends = np.zeros(
        1 << others, np.uint32
    )  # per subset: bit mask of the members at which a path from 0 through it can end
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
    """Backtrack a cycle from the table of reachable ends."""
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


def _improved_ring(rates: Rates) -> tuple[int, ...]:
    """Build a ring greedily by fastest links, then remove its slowest link by 2-opt reversals while that helps."""
    members = len(rates)
    order, left = [0], np.ones(members, bool)
    left[0] = False
    while len(order) < members:
        following = int(np.argmax(np.where(left, rates[order[-1]], -1.0)))
        order.append(following)
        left[following] = False
    ring = np.array(order)
    for _ in range(members * members):  # each reversal leaves fewer links of the slowest rate
        links = rates[ring, np.roll(ring, -1)]
        worst = int(links.argmin())
        ring = np.roll(ring, -worst - 1)  # the slowest link is now the one from the last to the first
        turned = _without_last_link(rates, ring, links[worst])
        if turned is None:
            break
        ring = turned
    start = int(np.flatnonzero(ring == 0)[0])
    return tuple(int(place) for place in np.roll(ring, -start))


def _without_last_link(rates: Rates, ring: np.ndarray, slowest_rate: float) -> np.ndarray | None:
    """Reverse a prefix of the ring so that all new links are faster than this rate; None: impossible.

    Reversing the first j + 1 members gives the links: last to j, from j down to the first, the first to j + 1.
    """
    backwards = rates[ring[1:], ring[:-1]]  # from each member to its predecessor
    inside = np.minimum.accumulate(np.concatenate([[np.inf], backwards]))[:-1]  # of the first j + 1 members
    ends = np.minimum(rates[ring[-1], ring[:-1]], rates[ring[0], ring[1:]])
    gained = np.minimum(inside, ends)
    best = int(gained[:-1].argmax()) if len(gained) > 1 else 0
    if gained[best] <= slowest_rate:
        return None
    return np.concatenate([ring[: best + 1][::-1], ring[best + 1 :]])
