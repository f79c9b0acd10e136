"""Long series in bounded memory; values may arrive in any order. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Self, TypeVar

BUCKETS = 512
"""Maximum number of step ranges of a curve; beyond it, neighbours are merged."""

T = TypeVar("T")


class Moments(Generic[T]):
    """A value over time: the `most` newest ones and at most twice as many of all, evenly spaced."""

    def __init__(self, most: int) -> None:
        self._newest: deque[tuple[float, T]] = deque(maxlen=most)
        self._spaced: list[tuple[float, T]] = []
        self._most_spaced, self._stride, self._seen = 2 * most, 1, 0

    def add(self, at_s: float, value: T, *, apart_s: float = 0.0) -> None:
        """Add a value; it replaces the newest if that is closer than `apart_s` to the one before."""
        if len(self._newest) > 1 and 0 <= at_s - self._newest[-2][0] < apart_s:
            self._newest[-1] = (at_s, value)
            return
        self._newest.append((at_s, value))
        if self._seen % self._stride == 0 and len(self._spaced) == self._most_spaced:
            del self._spaced[1::2]
            self._stride *= 2
        if self._seen % self._stride == 0:
            self._spaced.append((at_s, value))
        self._seen += 1

    def at(self, at_s: float | None) -> T | None:
        """Return the newest value at or before a time, or the newest of all."""
        if at_s is None:
            return self._newest[-1][1] if self._newest else None
        for kept in (self._newest, self._spaced):
            for known_s, value in reversed(kept):
                if known_s <= at_s:
                    return value
        return None


@dataclass(slots=True)
class Range:
    """A range of consecutive numbers, both ends included."""

    first: int
    last: int

    def merge(self, other: Any) -> None:
        """Merge a neighbour of the same type."""
        self.first, self.last = min(self.first, other.first), max(self.last, other.last)


S = TypeVar("S", bound=Range)


class RangeSeries(Generic[S]):
    """A sequence in at most `most` ranges of equal width; beyond it, the width doubles."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._width = 1
        self._by_index: dict[int, S] = {}

    def at(self, number: int, make: Callable[[], S]) -> S:
        """Return the range that contains a number; `make` creates an empty one."""
        while number // self._width not in self._by_index and len(self._by_index) >= self._most:
            self._widen()
        found = self._by_index.get(number // self._width)
        if found is None:
            found = self._by_index[number // self._width] = make()
        found.first, found.last = min(found.first, number), max(found.last, number)
        return found

    def add(self, new: S) -> None:
        """Add a range, merged into an existing one where they overlap."""
        found = self.at(new.last, lambda: new)
        if found is not new:
            found.merge(new)

    def _widen(self) -> None:
        self._width *= 2
        narrow, self._by_index = self._by_index, {}
        for part in narrow.values():
            known = self._by_index.setdefault(part.first // self._width, part)
            if known is not part:
                known.merge(part)

    def __iter__(self) -> Iterator[S]:
        return iter([self._by_index[index] for index in sorted(self._by_index)])

    def __len__(self) -> int:
        return len(self._by_index)


@dataclass(slots=True)
class Bucket(Range):
    """Sums over all nodes' lines of some consecutive steps."""

    node_id: str
    """Node whose clock `at_s` is: that of the first line."""
    at_s: float
    tokens: int = 0
    """Tokens of the run after the bucket."""
    sent_bytes: int = 0
    """Bytes sent by all nodes in the bucket."""
    lines: int = 0
    steps_s: float = 0.0
    step_tokens: float = 0.0
    """Rate times duration, summed over lines."""
    mfu: float = 0.0
    mfu_lines: int = 0
    members: float = 0.0
    members_lines: int = 0
    loss: float = 0.0
    losses: int = 0
    """Number of finite losses."""
    nonfinite_losses: int = 0
    """Number of losses that are not finite."""
    low: float = math.inf
    high: float = -math.inf
    low_step: int = 0
    high_step: int = 0

    def add_loss(self, step: int, loss: float) -> None:
        if not math.isfinite(loss):
            self.nonfinite_losses += 1
            return
        self.loss += loss
        self.losses += 1
        if self.first == self.last == step:  # the mean of the nodes at one step
            self.low = self.high = self.loss / self.losses
            self.low_step = self.high_step = step
        else:
            self._note_extremes(loss, step, loss, step)

    def merge(self, other: Self) -> None:
        if other.first < self.first:
            self.node_id, self.at_s = other.node_id, other.at_s
        Range.merge(self, other)  # a class with slots has no super()
        self.tokens = max(self.tokens, other.tokens)
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self._note_extremes(other.low, other.low_step, other.high, other.high_step)

    def _note_extremes(self, low: float, low_step: int, high: float, high_step: int) -> None:
        if low < self.low:
            self.low, self.low_step = low, low_step
        if high > self.high:
            self.high, self.high_step = high, high_step

    def mean(self, key: Literal["tokens_per_s", "mfu", "nodes"]) -> float | None:
        """Return a mean over the steps.

        tokens_per_s: the mean rate of a node times the number of nodes that trained. nodes: the members; without
        [outer], the nodes that wrote a line.
        """
        lines_per_step = self.lines / (self.last - self.first + 1)
        match key:
            case "tokens_per_s":
                return self.step_tokens / self.steps_s * lines_per_step if self.steps_s else None
            case "mfu":
                return self.mfu / self.mfu_lines if self.mfu_lines else None
            case "nodes":
                return self.members / self.members_lines if self.members_lines else lines_per_step or None

    def points(self) -> tuple[float | None, ...]:
        """Return the loss as one point, or its lowest and highest in order of their steps."""
        if not self.losses:
            return (None,) if self.nonfinite_losses else ()
        if self.low == self.high:
            return (self.low,)
        return (self.low, self.high) if self.low_step <= self.high_step else (self.high, self.low)


_SUMS = (
    *("sent_bytes", "lines", "steps_s", "step_tokens", "mfu", "mfu_lines", "members", "members_lines"),
    *("loss", "losses", "nonfinite_losses"),
)
"""Fields that are added when buckets are merged."""


def thin(count: int, points: int) -> Sequence[int]:
    """Return at most `points` evenly spaced indices of `count` items, including the first and the last."""
    if count <= points:
        return range(count)
    if points < 2:
        return range(count - 1, count)
    return sorted({round(i * (count - 1) / (points - 1)) for i in range(points)})
