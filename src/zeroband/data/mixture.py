"""Chooses the source of the k-th sample of a run from the weights and k. Pure functions.

A run is divided into segments of constant weights; a new one starts when a source exhausts its passes or a phase
begins. Within a segment the lightest source takes evenly spaced samples, the next one its share of the remaining
samples, and so on. The count of each source is thus always within one sample per other source of its weight. Integer
arithmetic makes the result exact and equal on every machine.
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
"""Version of the interleaving rule; nodes compare it, because another rule gives another sequence of samples."""

_UNLIMITED = 1 << 62


@dataclass(frozen=True)
class SourceShare:
    """One source of a mixture."""

    name: str
    weight: float
    n_train: int
    """Samples in one pass."""
    max_passes: float | None = None

    @property
    def limit(self) -> int:
        """Total number of samples that it may provide."""
        return _UNLIMITED if self.max_passes is None else math.floor(self.max_passes * self.n_train)


class SampleOrigins(NamedTuple):
    """Samples as pairs of source and index within it. Shapes: both (n,) int64."""

    sources: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int64]


class Mixture:
    """The infinite sequence of samples from several sources.

    `phases`: (first sample, weights by name), ascending. Every phase needs a source with a weight and no limit.
    """

    def __init__(self, sources: Sequence[SourceShare], phases: Sequence[tuple[int, Mapping[str, float]]] = ()) -> None:
        self.sources = tuple(sources)
        self.weights = [(0, {source.name: source.weight for source in sources}), *phases]
        """First sample and weights of each phase."""
        self._segments = self._split(self.weights)
        self._starts = np.array([segment.start for segment in self._segments], dtype=np.int64)

    def locate(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> SampleOrigins:
        """Map sample indices of the run to sources and indices within them."""
        wanted = np.asarray(indices, dtype=np.int64)
        sources, own = np.empty_like(wanted), np.empty_like(wanted)
        segment_of = np.searchsorted(self._starts, wanted, side="right") - 1
        for number in np.unique(segment_of).tolist():
            chosen = segment_of == number
            sources[chosen], own[chosen] = self._segments[number].locate(wanted[chosen])
        return SampleOrigins(sources, own)

    def counts(self, n: int) -> tuple[int, ...]:
        """Count the first n samples by source."""
        segment = self._segments[int(np.searchsorted(self._starts, n, side="right")) - 1]
        return tuple(
            before + segment.interleave.count(source, n - segment.start) for source, before in enumerate(segment.before)
        )

    def _split(self, phases: Sequence[tuple[int, Mapping[str, float]]]) -> list[_Segment]:
        """Divide the run into segments: at each phase, and after a source's last sample."""
        segments: list[_Segment] = []
        start, before = 0, [0] * len(self.sources)
        ends = [*(begin for begin, _ in phases[1:]), _UNLIMITED]
        for (_, weights), end in zip(phases, ends, strict=True):
            while start < end:
                left = [source.limit - n for source, n in zip(self.sources, before, strict=True)]
                in_use = [weights[source.name] if n > 0 else 0.0 for source, n in zip(self.sources, left, strict=True)]
                segment = _Segment(start, tuple(before), _Interleave(in_use))
                segments.append(segment)
                start = min(end, start + min(map(segment.interleave.length_for, range(len(left)), left)))
                before = [n + segment.interleave.count(s, start - segment.start) for s, n in enumerate(before)]
        return segments


class _Interleave:
    """Interleaves sources with constant weights; weight 0 excludes a source."""

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(str(weight)) for weight in weights]
        left = sum(exact)
        self._shares: list[tuple[int, Fraction]] = []
        """Sources by ascending weight, and their shares of what the previous ones leave: at most 1/2, the last 1."""
        for source in sorted((n for n, weight in enumerate(exact) if weight), key=exact.__getitem__):
            self._shares.append((source, (exact[source] / left).limit_denominator(LONGEST_TURN)))
            left -= exact[source]

    def locate(self, offsets: npt.NDArray[np.int64]) -> SampleOrigins:
        sources, own = np.empty_like(offsets), np.empty_like(offsets)
        remaining, left = np.arange(len(offsets)), offsets
        for source, share in self._shares:
            before = _taken(left, share)
            is_its = _taken(left + 1, share) > before
            sources[remaining[is_its]], own[remaining[is_its]] = source, before[is_its]
            remaining, left = remaining[~is_its], (left - before)[~is_its]
        return SampleOrigins(sources, own)

    def count(self, source: int, length: int) -> int:
        """Count a source's samples among the first `length`."""
        for other, share in self._shares:
            taken = _taken(length, share)
            if other == source:
                return taken
            length -= taken
        return 0

    def length_for(self, source: int, n: int) -> int:
        """Return the shortest length that contains n samples of a source."""
        if n >= _UNLIMITED or source not in dict(self._shares):
            return _UNLIMITED
        return bisect.bisect_left(range(_UNLIMITED), n, key=lambda length: self.count(source, length))


_Numbers = TypeVar("_Numbers", int, npt.NDArray[np.int64])


def _taken(n: _Numbers, share: Fraction) -> _Numbers:
    """Return a share of the first n samples, rounded half up."""
    part, whole = share.numerator, share.denominator
    return n // whole * part + (n % whole * (2 * part) + whole) // (2 * whole)


@dataclass(frozen=True)
class _Segment:
    """A part of a run with constant weights."""

    start: int
    before: tuple[int, ...]
    """Samples of each source before this segment."""
    interleave: _Interleave = field(repr=False)

    def locate(self, indices: npt.NDArray[np.int64]) -> SampleOrigins:
        sources, own = self.interleave.locate(indices - self.start)
        return SampleOrigins(sources, own + np.array(self.before, dtype=np.int64)[sources])
