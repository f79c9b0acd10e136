from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroband.data.packing import DocumentPart, pack_best_fit

LENGTHS = st.lists(st.integers(1, 40), max_size=60)


@settings(max_examples=50)
@given(lengths=LENGTHS, size=st.integers(2, 16))
def test_every_id_has_one_place_and_what_fits_is_not_cut(lengths: list[int], size: int) -> None:
    bins = pack_best_fit(lengths, size)
    spans = [span for spans in bins for span in spans]
    for document, length in enumerate(lengths):
        mine = sorted(span for span in spans if span.document == document)
        assert [span.start for span in mine] == [0, *(span.stop for span in mine[:-1])]
        assert mine[-1].stop == length
        assert len(mine) == -(-length // size)
    assert all(0 < sum(span.stop - span.start for span in spans) <= size for spans in bins)


@given(lengths=LENGTHS, size=st.integers(2, 16))
def test_long_document_lies_in_one_piece(lengths: list[int], size: int) -> None:
    """A sample's last target is the first id of the bin behind it, so that must be the document's next one."""
    bins = pack_best_fit(lengths, size)
    for first, second in itertools.pairwise(bins):
        last = first[-1]
        if last.stop < lengths[last.document]:
            assert second[0] == DocumentPart(last.document, last.stop, min(last.stop + size, lengths[last.document]))


@settings(max_examples=50)
@given(lengths=st.lists(st.integers(1, 16), max_size=60), size=st.just(16))
def test_each_document_goes_where_the_least_room_holds_it(lengths: list[int], size: int) -> None:
    """Compared with the rule as it is written down: the longest first, all bins looked at."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        chosen = min(fitting, key=lambda i: rooms[i], default=None)
        if chosen is None:
            rooms.append(size - length)
        else:
            rooms[chosen] -= length
    filled = [size - sum(span.stop - span.start for span in spans) for spans in pack_best_fit(lengths, size)]
    assert sorted(filled) == sorted(rooms)


def test_padding_of_many_documents_is_small() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1, 5000).astype(int) + 1
    bins = pack_best_fit(lengths, 2048)
    assert 1 - lengths.sum() / (2048 * len(bins)) < 0.01
