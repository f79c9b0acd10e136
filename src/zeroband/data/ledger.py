"""Assignment of samples to members. Immutable records, part of the run's agreed state.

Ranges of sample indices are assigned to members and settled by the outer step that used them. Samples that a lost or
slow member did not use return to the pool and are assigned first. There is one ledger per corpus: a single shared one,
or one per node with private data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from zeroband.config.ranges import Count, Id

Range = tuple[Count, Count]
"""Sample indices [start, stop) of a corpus."""

SHARED = ""
"""Name of the corpus that all nodes share."""


@dataclass(frozen=True)
class Ledger:
    """The state of a corpus at an outer step.

    Every index below `next` was contributed exactly once, or is in `assigned` or `returned`.
    """

    next: Count = 0
    """The first index never assigned."""
    returned: tuple[Range, ...] = ()
    """Assigned but not contributed; sorted, disjoint and not touching."""
    assigned: Mapping[Id, tuple[Range, ...]] = field(default_factory=dict[str, tuple[Range, ...]])
    """Ranges that each member reads in the next round, or still reads for an earlier one."""

    def __post_init__(self) -> None:
        bounds = [bound for span in self.returned for bound in span]
        if any(a >= b for a, b in zip([-1, *bounds], [*bounds, self.next + 1], strict=True)):
            raise ValueError(f"ranges of a ledger must ascend within 0..next without touching: {self!s:.500}")
        reached = 0
        for start, stop in sorted(self.owed):
            if not reached <= start < stop <= self.next:
                raise ValueError(f"samples {start}..{stop} are not within 0..next, or in two ranges: {self!s:.500}")
            reached = stop

    @property
    def owed(self) -> tuple[Range, ...]:
        """Assigned but not yet learned from in a committed round."""
        return (*self.returned, *(span for spans in self.assigned.values() for span in spans))

    @property
    def settled(self) -> tuple[Range, ...]:
        """Learned from or deliberately skipped; sorted and disjoint."""
        return holes(self.owed, self.next)

    def allocate(self, wanted: Mapping[str, int]) -> Ledger:
        """Append samples to members' assignments, in the order of `wanted`; returned samples go first."""
        reached, left, assigned = self.next, self.returned, {**self.assigned}
        for member, samples in wanted.items():
            taken, left = take(left, samples) if left else ((), ())
            if fresh := samples - count(taken):
                taken, reached = (*taken, (reached, reached + fresh)), reached + fresh
            assigned[member] = (*assigned.get(member, ()), *_merge(taken))
        return Ledger(reached, left, assigned)

    def claim(self, member: str, span: Range) -> Ledger:
        """Assign a range that a member claimed beyond `next`; samples in between go to the pool.

        Unchanged if the range no longer lies beyond `next`, or the member has an assignment.
        """
        start, stop = span
        if member in self.assigned or not self.next <= start < stop:
            return self
        skipped = ((self.next, start),) if start > self.next else ()
        return Ledger(stop, _merge([*self.returned, *skipped]), {**self.assigned, member: (span,)})

    def settle(self, used: Mapping[str, int], kept: Mapping[str, tuple[Range, ...]]) -> Ledger:
        """Close a round: samples that members neither used nor keep return to the pool.

        `used`: number of samples that each contributor used, from the start of its ranges. `kept`: the tail of the
        ranges of members that still train on them. Both may name members of other corpora.
        """
        left: list[Range] = []
        for member, spans in self.assigned.items():
            if rest := take(spans, used.get(member, 0))[1]:
                left += take(rest, count(rest) - count(kept.get(member, ())))[0]
        staying = {member: kept[member] for member in self.assigned if member in kept}
        return Ledger(self.next, _merge([*self.returned, *left]), staying)


def allocate(ledgers: Mapping[str, Ledger], wanted: Mapping[str, int], corpora: Mapping[str, str]) -> dict[str, Ledger]:
    """Assign samples to members in the order of `wanted`, which must be the epoch's; return the new ledgers.

    `corpora`: the corpus of each member.
    """
    of_corpus = dict[str, dict[str, int]]()
    for member, samples in wanted.items():
        if samples > 0:
            of_corpus.setdefault(corpora[member], {})[member] = samples
    dealt = {corpus: ledgers.get(corpus, Ledger()).allocate(each) for corpus, each in of_corpus.items()}
    return {**ledgers, **dealt}


def settle(
    ledgers: Mapping[str, Ledger], used: Mapping[str, int], kept: Mapping[str, tuple[Range, ...]]
) -> dict[str, Ledger]:
    """Close a round in all ledgers."""
    return {corpus: ledger.settle(used, kept) for corpus, ledger in ledgers.items()}


def count(ranges: Iterable[Range]) -> int:
    """Return the total length of the ranges."""
    return sum(stop - start for start, stop in ranges)


def take(ranges: Sequence[Range], n: int) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
    """Split the ranges after n indices; return both parts."""
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
    """Sort disjoint ranges and join touching ones."""
    merged: list[Range] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            assert start == merged[-1][1], f"samples {start}..{merged[-1][1]} are in two ranges"
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def holes(ranges: Iterable[Range], end: int) -> tuple[Range, ...]:
    """Return the parts of [0, end) outside the ranges."""
    found: list[Range] = []
    reached = 0
    for start, stop in sorted(ranges):
        if reached < min(start, end):
            found.append((reached, min(start, end)))
        reached = max(reached, stop)
    return (*found, (reached, end)) if reached < end else tuple(found)
