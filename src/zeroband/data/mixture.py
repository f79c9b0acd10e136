"""Which source the k-th sample of a run comes from: a function of weights and k alone. Pure; reads no file.

Where a source reaches its limit of passes, or a phase begins, a new stretch does, with weights of its own. Within a
stretch the sources take turns in a fixed pattern: the j-th sample of a source with weight w is due at (j + 1/2) / w. So
at any time the number of samples of each is what its weight says, give or take one for each other source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import reduce
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_EXACT_PERIOD = 1 << 16
_PERIOD = 1 << 20
"""Length of a pattern, in samples: exact where weights are short decimals, else with shares rounded to this."""

_ENDLESS = 1 << 62


@dataclass(frozen=True)
class SourceShare:
    """One source of a mixture."""

    name: str
    weight: float
    n_train: int
    """Samples of one pass over it."""
    max_passes: float | None = None

    @property
    def limit(self) -> int:
        """Samples that may come from it in all."""
        return _ENDLESS if self.max_passes is None else math.floor(self.max_passes * self.n_train)


class Dealt(NamedTuple):
    """Where samples come from. Shapes: both (n,) int64."""

    sources: npt.NDArray[np.int64]
    """Number of the source of each."""
    indices: npt.NDArray[np.int64]
    """Which sample of that source it is, counted from 0."""


class Mixture:
    """The endless list of samples of several sources, in the order of `sources`.

    `phases`: for some samples, ascending, the weights that hold from there on, by name.
    One source without a limit must have a weight in each phase.
    """

    def __init__(self, sources: Sequence[SourceShare], phases: Sequence[tuple[int, Mapping[str, float]]] = ()) -> None:
        self.sources = tuple(sources)
        self.weights = [(0, {one.name: one.weight for one in sources}), *phases]
        """From which sample on which weights hold."""
        self._stretches = self._lay_out(self.weights)
        self._starts = np.array([stretch.start for stretch in self._stretches], dtype=np.int64)

    def deal(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> Dealt:
        """Where the samples of these indices come from."""
        wanted = np.asarray(indices, dtype=np.int64)
        sources, own = np.empty_like(wanted), np.empty_like(wanted)
        stretch_of = np.searchsorted(self._starts, wanted, side="right") - 1
        for number in np.unique(stretch_of).tolist():
            chosen = stretch_of == number
            sources[chosen], own[chosen] = self._stretches[number].deal(wanted[chosen])
        return Dealt(sources, own)

    def counts(self, n: int) -> tuple[int, ...]:
        """How many of the first n samples come from each source."""
        stretch = self._stretches[int(np.searchsorted(self._starts, n, side="right")) - 1]
        return tuple(
            given + stretch.pattern.count(source, n - stretch.start) for source, given in enumerate(stretch.given)
        )

    def _lay_out(self, phases: Sequence[tuple[int, Mapping[str, float]]]) -> list[_Stretch]:
        """The stretches: a new one where a phase begins, and behind the last sample that a source may give."""
        stretches: list[_Stretch] = []
        start, given = 0, [0] * len(self.sources)
        ends = [*(begin for begin, _ in phases[1:]), _ENDLESS]
        for (_, weights), end in zip(phases, ends, strict=True):
            while start < end:
                left = [one.limit - n for one, n in zip(self.sources, given, strict=True)]
                turns = _turns([weights[one.name] if n > 0 else 0.0 for one, n in zip(self.sources, left, strict=True)])
                stretch = _Stretch(start, tuple(given), _Pattern(turns))
                stretches.append(stretch)
                start = min(end, start + min(map(stretch.pattern.reach, range(len(left)), left)))
                given = [n + stretch.pattern.count(s, start - stretch.start) for s, n in enumerate(given)]
        return stretches


class _Pattern:
    """The order in which sources take turns, again and again."""

    def __init__(self, turns: Sequence[int]) -> None:
        self._turns = np.array(turns, dtype=np.int64)
        self._period = sum(turns)
        due = np.concatenate([(2 * np.arange(n) + 1) / (2 * n) for n in turns if n] or [np.empty(0)])
        numbers = np.repeat(np.arange(len(turns), dtype=np.int32), self._turns)
        order = np.argsort(due, kind="stable")  # at the same time, the first source
        self._sources = numbers[order]
        self._places = [np.flatnonzero(self._sources == source).astype(np.int32) for source in range(len(turns))]
        self._ranks = np.empty(self._period, dtype=np.int32)
        for places in self._places:
            self._ranks[places] = np.arange(len(places))

    def deal(self, offsets: npt.NDArray[np.int64]) -> Dealt:
        periods, within = np.divmod(offsets, self._period)
        sources = self._sources[within].astype(np.int64)
        return Dealt(sources, periods * self._turns[sources] + self._ranks[within])

    def count(self, source: int, length: int) -> int:
        """Samples of a source among the first `length`."""
        periods, within = divmod(length, self._period)
        return periods * int(self._turns[source]) + int(np.searchsorted(self._places[source], within))

    def reach(self, source: int, n: int) -> int:
        """The length that holds the first n samples of a source."""
        turns = int(self._turns[source])
        if not turns or n >= _ENDLESS:
            return _ENDLESS
        periods, within = divmod(n - 1, turns)
        return periods * self._period + int(self._places[source][within]) + 1


@dataclass(frozen=True)
class _Stretch:
    """A part of a run with the same weights."""

    start: int
    given: tuple[int, ...]
    """Samples of each source before it."""
    pattern: _Pattern = field(repr=False)

    def deal(self, indices: npt.NDArray[np.int64]) -> Dealt:
        sources, own = self.pattern.deal(indices - self.start)
        return Dealt(sources, own + np.array(self.given, dtype=np.int64)[sources])


def _turns(weights: Sequence[float]) -> list[int]:
    """Turns of each source in a period: in the ratio of the weights, and at least one where there is a weight."""
    exact = [Fraction(str(weight)) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    turns = [int(weight * common) for weight in exact]
    turns = [n // (reduce(math.gcd, turns) or 1) for n in turns]
    if sum(turns) <= _EXACT_PERIOD:
        return turns
    total = sum(exact)
    return [max(1, round(_PERIOD * weight / total)) if weight else 0 for weight in exact]
