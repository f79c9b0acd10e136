"""Curves of a whole run in bounded memory, whatever order its nodes' lines come in. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

BUCKETS = 512
"""Most stretches of steps of a curve; when there are more, neighbours become one."""


@dataclass(slots=True)
class Bucket:
    """What the lines of some neighbouring steps said, by all nodes."""

    first_step: int
    last_step: int
    node_id: str
    """Whose clock `at_s` is: that of the first line that came."""
    at_s: float
    tokens: int = 0
    """Tokens of the whole run after it."""
    sent_bytes: int = 0
    """Sent by all nodes in it."""
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
    """Finite ones."""
    odd_losses: int = 0
    """Others: not a number, or infinite."""
    low: float = math.inf
    high: float = -math.inf
    low_step: int = 0
    high_step: int = 0

    def add_loss(self, step: int, loss: float) -> None:
        if not math.isfinite(loss):
            self.odd_losses += 1
            return
        self.loss += loss
        self.losses += 1
        if self.first_step == self.last_step == step:  # the mean of the nodes at one step
            self.low = self.high = self.loss / self.losses
            self.low_step = self.high_step = step
        else:
            self._note_extremes(loss, step, loss, step)

    def merge(self, other: Bucket) -> None:
        """Take over a neighbour's."""
        if other.first_step < self.first_step:
            self.node_id, self.at_s = other.node_id, other.at_s
        self.first_step, self.last_step = (
            min(self.first_step, other.first_step),
            max(self.last_step, other.last_step),
        )
        self.tokens = max(self.tokens, other.tokens)
        self.sent_bytes += other.sent_bytes
        self.lines += other.lines
        self.steps_s += other.steps_s
        self.step_tokens += other.step_tokens
        self.mfu += other.mfu
        self.mfu_lines += other.mfu_lines
        self.members += other.members
        self.members_lines += other.members_lines
        self.loss += other.loss
        self.losses += other.losses
        self.odd_losses += other.odd_losses
        self._note_extremes(other.low, other.low_step, other.high, other.high_step)

    def _note_extremes(self, low: float, low_step: int, high: float, high_step: int) -> None:
        if low < self.low:
            self.low, self.low_step = low, low_step
        if high > self.high:
            self.high, self.high_step = high, high_step

    @property
    def nodes(self) -> float | None:
        """Mean number of members; without [outer], of the nodes that wrote a line for a step."""
        if self.members_lines:
            return self.members / self.members_lines
        return self.lines / (self.last_step - self.first_step + 1) if self.lines else None

    @property
    def tokens_per_s(self) -> float | None:
        """All nodes' together: the mean rate of one times the nodes that trained."""
        if not self.steps_s:
            return None
        return self.step_tokens / self.steps_s * self.lines / (self.last_step - self.first_step + 1)

    def points(self) -> tuple[float | None, ...]:
        """The loss, as one point, or as its lowest and highest in the order in which they came."""
        if not self.losses:
            return (None,) if self.odd_losses else ()
        if self.low == self.high:
            return (self.low,)
        return (self.low, self.high) if self.low_step <= self.high_step else (self.high, self.low)


@dataclass
class Buckets:
    """Neighbouring steps together, at most `most` stretches of equal width."""

    most: int = BUCKETS
    width: int = 1
    _by_index: dict[int, Bucket] = field(default_factory=dict[int, Bucket])

    def at(self, step: int, node_id: str, at_s: float) -> Bucket:
        """The stretch that a step belongs to."""
        found = self._by_index.get(step // self.width)
        if found is None:
            while len(self._by_index) >= self.most:
                self._widen()
            found = self._by_index.get(step // self.width)
            if found is None:
                found = self._by_index[step // self.width] = Bucket(step, step, node_id, at_s)
        found.first_step, found.last_step = min(found.first_step, step), max(found.last_step, step)
        return found

    def _widen(self) -> None:
        self.width *= 2
        wide: dict[int, Bucket] = {}
        for bucket in self:
            index = bucket.first_step // self.width
            if index in wide:
                wide[index].merge(bucket)
            else:
                wide[index] = bucket
        self._by_index = wide

    def __iter__(self) -> Iterator[Bucket]:
        """By step, ascending."""
        return iter([self._by_index[index] for index in sorted(self._by_index)])

    def __len__(self) -> int:
        return len(self._by_index)


def thin(count: int, points: int) -> Sequence[int]:
    """Indices of at most `points` of `count` evenly spaced items, the first and the last among them."""
    if count <= points:
        return range(count)
    if points < 2:
        return range(count - 1, count)
    return sorted({round(i * (count - 1) / (points - 1)) for i in range(points)})
