"""Who reads which samples, and which are still owed. Pure; the agreed record of a run is made of its values.

Samples are handed out in ranges of the sample index of a corpus and settled with the outer step that used them: what a
lost member held, or a slow one did not come to, goes back to the pool and is the first to be handed out again. Each
corpus has a ledger: the one that all nodes share, or, where data is private, that of each node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from zeroband.config.ranges import Count, Id

Range = tuple[Count, Count]
"""Sample indices of a corpus (start, stop), half open."""

SHARED = ""
"""Name of the corpus that all nodes of a run share."""


@dataclass(frozen=True)
class Ledger:
    """The state of a corpus at a boundary between two outer steps.

    Every index below `next` was contributed exactly once, or is in `assigned`, or in `returned`.
    """

    next: Count = 0
    """The first sample index that was never handed out."""
    returned: tuple[Range, ...] = ()
    """Handed out to members that did not contribute; sorted, disjoint and not touching."""
    assigned: Mapping[Id, tuple[Range, ...]] = field(default_factory=dict[str, tuple[Range, ...]])
    """What each member reads in the next round, or still does from an earlier."""

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
        """Handed out and not learned from, as far as committed rounds tell."""
        return (*self.returned, *(span for spans in self.assigned.values() for span in spans))

    @property
    def settled(self) -> tuple[Range, ...]:
        """Learned from, or skipped on purpose; sorted and disjoint."""
        return holes(self.owed, self.next)

    def allocate(self, wanted: Mapping[str, int]) -> Ledger:
        """Give members these numbers of samples behind those that they have, in their order, returned ones first."""
        reached, left, assigned = self.next, self.returned, {**self.assigned}
        for member, samples in wanted.items():
            taken, left = take(left, samples) if left else ((), ())
            if fresh := samples - count(taken):
                taken, reached = (*taken, (reached, reached + fresh)), reached + fresh
            assigned[member] = (*assigned.get(member, ()), *_merge(taken))
        return Ledger(reached, left, assigned)

    def claim(self, member: str, span: Range) -> Ledger:
        """Deal a member the samples that it claimed behind all dealt ones; those in between go to the pool.

        Unchanged if the samples are not behind all dealt ones any more, or the member holds others.
        """
        start, stop = span
        if member in self.assigned or not self.next <= start < stop:
            return self
        skipped = ((self.next, start),) if start > self.next else ()
        return Ledger(stop, _merge([*self.returned, *skipped]), {**self.assigned, member: (span,)})

    def settle(self, used: Mapping[str, int], kept: Mapping[str, tuple[Range, ...]]) -> Ledger:
        """Close a round: what its members neither used of their ranges nor keep goes back to the pool.

        `used`: samples of those that contributed, the first ones of their ranges. `kept`: the last ones of the ranges
        of members that still train on them. Both may name members that read other corpora.
        """
        left: list[Range] = []
        for member, spans in self.assigned.items():
            if rest := take(spans, used.get(member, 0))[1]:
                left += take(rest, count(rest) - count(kept.get(member, ())))[0]
        staying = {member: kept[member] for member in self.assigned if member in kept}
        return Ledger(self.next, _merge([*self.returned, *left]), staying)


def allocate(ledgers: Mapping[str, Ledger], wanted: Mapping[str, int], corpora: Mapping[str, str]) -> dict[str, Ledger]:
    """Give each member the samples that it wants of its corpus, in the order of the members; the next ledgers.

    The order must be the same on all nodes: the epoch's. `corpora`: of each member.
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
