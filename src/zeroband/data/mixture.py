"""Which source the k-th sample of a run comes from: a function of weights and k alone. Pure; reads no file.

Where a source reaches its limit of passes, or a phase begins, a new stretch does, with its own weights. Within a
stretch the lightest source takes its share of all samples, evenly spaced, the next one its share of those that are
left, and so on. So at any time the number of samples of each is what its weight says, give or take one for each other
source. It is integer arithmetic: the same on every machine, and exact for as many samples as there may be.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from zeroband.config.data import LONGEST_TURN

TURNS = "2"
"""Name of the rule by which sources take turns: by another one the k-th sample of a run is another one."""

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
            given + stretch.turns.count(source, n - stretch.start) for source, given in enumerate(stretch.given)
        )

    def _lay_out(self, phases: Sequence[tuple[int, Mapping[str, float]]]) -> list[_Stretch]:
        """The stretches: a new one where a phase begins, and behind the last sample that a source may give."""
        stretches: list[_Stretch] = []
        start, given = 0, [0] * len(self.sources)
        ends = [*(begin for begin, _ in phases[1:]), _ENDLESS]
        for (_, weights), end in zip(phases, ends, strict=True):
            while start < end:
                left = [one.limit - n for one, n in zip(self.sources, given, strict=True)]
                turns = _Turns([weights[one.name] if n > 0 else 0.0 for one, n in zip(self.sources, left, strict=True)])
                stretch = _Stretch(start, tuple(given), turns)
                stretches.append(stretch)
                start = min(end, start + min(map(stretch.turns.reach, range(len(left)), left)))
                given = [n + stretch.turns.count(s, start - stretch.start) for s, n in enumerate(given)]
        return stretches


class _Turns:
    """Which source the n-th sample of a stretch comes from. `weights`: of the sources; 0 leaves one out."""

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(str(weight)) for weight in weights]
        left = sum(exact)
        self._shares: list[tuple[int, Fraction]] = []
        """Sources, the lightest first, and what each takes of what those before leave: half at most, the last all."""
        for source in sorted((n for n, weight in enumerate(exact) if weight), key=exact.__getitem__):
            self._shares.append((source, (exact[source] / left).limit_denominator(LONGEST_TURN)))
            left -= exact[source]

    def deal(self, offsets: npt.NDArray[np.int64]) -> Dealt:
        sources, own = np.empty_like(offsets), np.empty_like(offsets)
        places, left = np.arange(len(offsets)), offsets
        for source, share in self._shares:
            before = _taken(left, share)
            is_its = _taken(left + 1, share) > before
            sources[places[is_its]], own[places[is_its]] = source, before[is_its]
            places, left = places[~is_its], (left - before)[~is_its]
        return Dealt(sources, own)

    def count(self, source: int, length: int) -> int:
        """Samples of a source among the first `length`."""
        for one, share in self._shares:
            taken = _taken(length, share)
            if one == source:
                return taken
            length -= taken
        return 0

    def reach(self, source: int, n: int) -> int:
        """The length that holds the first n samples of a source."""
        if n >= _ENDLESS or source not in dict(self._shares):
            return _ENDLESS
        return bisect.bisect_left(range(_ENDLESS), n, key=lambda length: self.count(source, length))


_Numbers = TypeVar("_Numbers", int, npt.NDArray[np.int64])


def _taken(n: _Numbers, share: Fraction) -> _Numbers:
    """How many of the first n samples a share of them is, rounded half up."""
    part, whole = share.numerator, share.denominator
    return n // whole * part + (n % whole * (2 * part) + whole) // (2 * whole)


@dataclass(frozen=True)
class _Stretch:
    """A part of a run with the same weights."""

    start: int
    given: tuple[int, ...]
    """Samples of each source before it."""
    turns: _Turns = field(repr=False)

    def deal(self, indices: npt.NDArray[np.int64]) -> Dealt:
        sources, own = self.turns.deal(indices - self.start)
        return Dealt(sources, own + np.array(self.given, dtype=np.int64)[sources])
