"""Which samples a node reads next, so that they can be fetched before. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from zeroband.data.ledger import Range, count, take


class Forecast:
    """What a node was dealt, and behind it what it will be if each assignment lies as far from the last as this one.

    `samples`: how far it reaches. A guess that is wrong costs what was fetched for it, and nothing else.
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._dealt: tuple[Range, ...] = ()
        self._last: Range | None = None
        self._shift = 0
        self._told: tuple[Range, ...] = ()

    @property
    def is_due(self) -> bool:
        """Whether `tell` would say what it has not said before, and it is time for it."""
        left = count(self._told)
        return left < self._samples // 2 and (self._shift > 0 or left < count(self._dealt))

    def assign(self, ranges: Sequence[Range]) -> None:
        """Take note of what the node is dealt; what was foreseen need not be told again."""
        before, self._dealt = self._last, tuple(ranges)
        self._last = self._dealt[-1] if self._dealt else before
        self._shift = 0 if before is None or self._last is None else max(0, self._last[0] - before[0])
        if _joined(take(self._told, count(self._dealt))[0]) != _joined(self._dealt):
            self._told = ()

    def read(self, samples: int) -> None:
        """Take note that so many samples were read."""
        self._dealt, self._told = take(self._dealt, samples)[1], take(self._told, samples)[1]

    def tell(self) -> tuple[Range, ...]:
        """Return what is read next, in this order."""
        ranges, (start, stop) = [*self._dealt], self._last or (0, 0)
        while self._shift and stop > start and count(ranges) < self._samples:
            start, stop = start + self._shift, stop + self._shift
            ranges.append((start, stop))
        self._told = take(ranges, self._samples)[0]
        return self._told


def _joined(ranges: Sequence[Range]) -> list[Range]:
    """The ranges, those that follow each other as one."""
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return joined
