"""Best-fit packing: which documents share a sample, so that none is cut that fits into one. Pure; opens no file."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class DocumentPart(NamedTuple):
    """A part of a document, half open; the whole of it where it fits into a bin."""

    document: int
    start: int
    stop: int


def fill_bins(
    ids: npt.NDArray[np.unsignedinteger], lengths: Sequence[int], size: int, end: int
) -> Iterator[list[npt.NDArray[np.unsignedinteger]]]:
    """Yield the parts of each bin that `pack_best_fit` makes, the last one padding: the end of a document repeated.

    ids: documents end to end. Shapes: (n,) in; the parts of a bin have `size` ids together.
    """
    starts = list(itertools.accumulate(lengths, initial=0))
    for spans in pack_best_fit(lengths, size):
        parts = [ids[starts[span.document] + span.start : starts[span.document] + span.stop] for span in spans]
        yield [*parts, np.full(size - sum(map(len, parts)), end, dtype=ids.dtype)]


def pack_best_fit(lengths: Sequence[int] | npt.NDArray[np.integer], size: int) -> list[list[DocumentPart]]:
    """Put documents into bins of `size` ids: the longest first, each where the least room is left that holds it.

    lengths: ids of each document with the end-of-document id behind it, at least 1. One that is longer than a bin fills
    bins that follow each other and begins the next one with its rest, so that its ids stay in one piece. Bins lie in
    the order of their first documents, and documents within a bin in their own.
    Source: best-fit decreasing, as in "Fewer Truncations Improve Language Modeling", arXiv:2404.10830.
    """
    bins: list[list[DocumentPart]] = []
    room = _Room(size)
    full: dict[int, list[list[DocumentPart]]] = {}  # the bins that stand before the one of a long document's rest
    for document in np.flatnonzero(np.asarray(lengths) > size).tolist():
        length, rest = int(lengths[document]), int(lengths[document]) % size
        pieces = [[DocumentPart(document, start, start + size)] for start in range(0, length - rest, size)]
        opened = [DocumentPart(document, length - rest, length)] if rest else pieces.pop()[:]
        full[len(bins)] = pieces
        bins.append(opened)
        room.offer(len(bins) - 1, size - (rest or size))
    for document in np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist():
        length = int(lengths[document])
        if length > size:
            continue
        number, left = room.take(length)
        if number is None:
            number = len(bins)
            bins.append([])
        bins[number].append(DocumentPart(document, 0, length))
        room.offer(number, left - length)
    packed = ([*full.get(number, []), sorted(spans, key=_rest_first)] for number, spans in enumerate(bins))
    return [spans for group in sorted(packed, key=lambda group: group[0][0].document) for spans in group]


def _rest_first(span: DocumentPart) -> tuple[bool, int]:
    return span.start == 0, span.document


class _Room:
    """Bins by the room that is left in them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._rooms: list[int] = []
        """What is left in some bin, ascending, each number once."""
        self._bins: dict[int, list[int]] = {}

    def offer(self, number: int, left: int) -> None:
        """Let a bin have documents put into what is left of it."""
        if left and left not in self._bins:
            bisect.insort(self._rooms, left)
        if left:
            self._bins.setdefault(left, []).append(number)

    def take(self, length: int) -> tuple[int | None, int]:
        """The bin with the least room for this many ids, and that room; None, a new one."""
        place = bisect.bisect_left(self._rooms, length)
        if place == len(self._rooms):
            return None, self._size
        left = self._rooms[place]
        number = self._bins[left].pop()
        if not self._bins[left]:
            del self._bins[left], self._rooms[place]
        return number, left
