"""Best-fit packing of documents into samples, so that none is cut that fits into one. Pure functions."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class DocumentPart(NamedTuple):
    """Tokens [start, stop) of a document; all of it if it fits into a bin."""

    document: int
    start: int
    stop: int


def fill_bins(
    ids: npt.NDArray[np.unsignedinteger], lengths: Sequence[int], size: int, end: int
) -> Iterator[list[npt.NDArray[np.unsignedinteger]]]:
    """Yield the parts of each bin of `pack_best_fit`, padded to `size` ids with end-of-document ids.

    ids: documents end to end. Shapes: (n,) in.
    """
    starts = list(itertools.accumulate(lengths, initial=0))
    for spans in pack_best_fit(lengths, size):
        parts = [ids[starts[span.document] + span.start : starts[span.document] + span.stop] for span in spans]
        yield [*parts, np.full(size - sum(map(len, parts)), end, dtype=ids.dtype)]


def pack_best_fit(lengths: Sequence[int] | npt.NDArray[np.integer], size: int) -> list[list[DocumentPart]]:
    """Pack documents into bins of `size` ids: longest first, each into the fullest bin that holds it.

    lengths: ids of each document including its end-of-document id, at least 1. A document longer than a bin fills
    consecutive bins, and its remainder starts the next bin. Bins are ordered by their first documents, and documents
    keep their order within a bin.
    Source: best-fit decreasing, as in "Fewer Truncations Improve Language Modeling", arXiv:2404.10830.
    """
    bins: list[list[DocumentPart]] = []
    room = _FreeSpace(size)
    full: dict[int, list[list[DocumentPart]]] = {}  # full bins of a long document, by the bin with its remainder
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


class _FreeSpace:
    """Bins by free space."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._sizes: list[int] = []
        """Distinct free sizes, ascending."""
        self._bins: dict[int, list[int]] = {}

    def offer(self, number: int, left: int) -> None:
        """Add a bin with `left` free ids."""
        if left and left not in self._bins:
            bisect.insort(self._sizes, left)
        if left:
            self._bins.setdefault(left, []).append(number)

    def take(self, length: int) -> tuple[int | None, int]:
        """Remove and return the fullest bin that holds `length` ids, and its free space; None for a new bin."""
        index = bisect.bisect_left(self._sizes, length)
        if index == len(self._sizes):
            return None, self._size
        left = self._sizes[index]
        number = self._bins[left].pop()
        if not self._bins[left]:
            del self._bins[left], self._sizes[index]
        return number, left
