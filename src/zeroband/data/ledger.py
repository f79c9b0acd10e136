"""Who reads which samples, and which are still owed. Pure; the agreed record of a run is made of its values.

Samples are handed out in ranges of the global sample index and settled with the outer step that used them: what a lost
member held, or a slow one did not come to, goes back to the pool and is the first to be handed out again. So every
index below `next` was contributed exactly once, or is assigned, or is in `returned`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Range = tuple[int, int]
"""Global sample indices (start, stop), half open."""


NOTHING: Mapping[str, tuple[Range, ...]] = {}


@dataclass(frozen=True)
class Ledger:
    """The state of the data of a run at a boundary between two outer steps."""

    next: int = 0
    """The first global sample index that was never handed out."""
    returned: tuple[Range, ...] = ()
    """Handed out to members that did not contribute; sorted, disjoint and not touching."""

    def __post_init__(self) -> None:
        bounds = [bound for span in self.returned for bound in span]
        if any(a >= b for a, b in zip([-1, *bounds], [*bounds, self.next + 1], strict=True)):
            raise ValueError(f"ranges of a ledger must ascend within 0..next without touching: {self}")

    def allocate(self, wanted: Mapping[str, int]) -> tuple[dict[str, tuple[Range, ...]], Ledger]:
        """Give each member the samples that it wants, returned ones first, in the order of the members.

        The order must be the same on all nodes: the epoch's. Gives the ranges of each member, and the next ledger.
        """
        assigned: dict[str, tuple[Range, ...]] = {}
        ledger = self
        for member, samples in wanted.items():
            if samples > 0:
                assigned[member], ledger = ledger._take(samples)
        return assigned, ledger

    def settle(
        self,
        assigned: Mapping[str, tuple[Range, ...]],
        used: Mapping[str, int],
        kept: Mapping[str, tuple[Range, ...]] = NOTHING,
    ) -> Ledger:
        """Close a round: what its members neither used of their ranges nor keep goes back to the pool.

        `used`: samples of those that contributed, the first ones of their ranges. `kept`: the last ones of the ranges
        of members that still train on them.
        """
        strangers = set(used) - set(assigned)
        assert not strangers, f"contributed without an assignment: {sorted(strangers)}"
        left: list[Range] = []
        for member, spans in assigned.items():
            rest = take(spans, used.get(member, 0))[1]
            left += take(rest, count(rest) - count(kept.get(member, ())))[0]
        return Ledger(self.next, _merge([*self.returned, *left]))

    def _take(self, n: int) -> tuple[tuple[Range, ...], Ledger]:
        taken, left = take(self.returned, n)
        fresh = n - count(taken)
        if fresh:
            taken = (*taken, (self.next, self.next + fresh))
        return _merge(taken), Ledger(self.next + fresh, left)


def count(ranges: Iterable[Range]) -> int:
    """How many indices the ranges hold."""
    return sum(stop - start for start, stop in ranges)


def take(ranges: Sequence[Range], n: int) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
    """The first n indices of the ranges, or all when there are fewer, and the rest."""
    first: list[Range] = []
    rest: list[Range] = []
    for start, stop in ranges:
        cut = min(stop, start + n)
        n -= cut - start
        if cut > start:
            first.append((start, cut))
        if cut < stop:
            rest.append((cut, stop))
    return tuple(first), tuple(rest)


def _merge(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Sort disjoint ranges and join those that touch."""
    merged: list[Range] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            assert start == merged[-1][1], f"samples {start}..{merged[-1][1]} are in two ranges"
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def holes(ranges: Iterable[Range], end: int) -> tuple[Range, ...]:
    """What the ranges leave of 0..end."""
    found: list[Range] = []
    reached = 0
    for start, stop in sorted(ranges):
        if reached < min(start, end):
            found.append((reached, min(start, end)))
        reached = max(reached, stop)
    return (*found, (reached, end)) if reached < end else tuple(found)
