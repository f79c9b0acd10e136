from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroband.data.index import FlatPlaces, SampleIndex, rank_share
from zeroband.errors import ConfigError

shapes = st.tuples(st.integers(1, 40), st.integers(0, 3000)).map(lambda p: (p[0], p[0] + 1 + p[1]))


@given(shape=shapes, seed=st.integers(0, 10), hold_out=st.floats(0, 0.49), data_pass=st.integers(0, 3))
@pytest.mark.defect(8)
def test_index_makes_every_token_but_the_first_a_target_exactly_once(
    shape: tuple[int, int], seed: int, hold_out: float, data_pass: int
) -> None:
    seq_length, n_tokens = shape
    index = SampleIndex(FlatPlaces(n_tokens, seq_length), seed, hold_out)
    first = data_pass * index.n_train
    trained = index.positions(range(first, first + index.n_train)).tolist()
    held_out = index.held_out_positions(index.n_samples).tolist()
    spans = [index.span(position) for position in trained + held_out]
    targets = sorted(token for start, stop in spans for token in range(start + 1, stop))
    assert targets == list(range(1, n_tokens))
    assert index.n_train >= 1


def test_index_visits_the_samples_in_another_order_in_each_pass() -> None:
    index = SampleIndex(FlatPlaces(801, 8), 0, 0.1)
    first = index.positions(range(90)).tolist()
    second = index.positions(range(90, 180)).tolist()
    assert sorted(first) == sorted(second)
    assert first != second


def test_index_orders_by_seed_but_holds_out_the_same_samples() -> None:
    one, other = (SampleIndex(FlatPlaces(801, 8), seed, 0.1) for seed in (1, 2))
    assert one.positions(range(90)).tolist() != other.positions(range(90)).tolist()
    assert one.held_out_positions(10).tolist() == other.held_out_positions(10).tolist()


def test_pass_of_an_index_is_that_of_its_sample() -> None:
    index = SampleIndex(FlatPlaces(801, 8), 0, 0)
    assert [index.data_pass(i) for i in (99, 100, 250)] == [0, 1, 2]
    assert index.positions([99, 100, 250]).tolist() == [int(index.positions([i])[0]) for i in (99, 100, 250)]


@pytest.mark.parametrize(("n_tokens", "spans"), [(9, [(0, 5), (4, 9)]), (10, [(0, 5), (4, 9), (8, 10)])])
def test_span_overlaps_by_one_token_and_the_last_may_be_short(n_tokens: int, spans: list[tuple[int, int]]) -> None:
    index = SampleIndex(FlatPlaces(n_tokens, 4), 0, 0)
    assert [index.span(position) for position in range(index.n_samples)] == spans


@pytest.mark.parametrize(("hold_out", "held_out"), [(0.0, 0), (0.001, 1), (0.25, 25), (0.499, 50)])
def test_hold_out_rounds_up_to_whole_samples(hold_out: float, held_out: int) -> None:
    index = SampleIndex(FlatPlaces(801, 8), 0, hold_out)
    assert (index.n_held_out, index.n_train) == (held_out, 100 - held_out)
    assert len(index.held_out_positions(1000)) == held_out


def test_index_refuses_a_corpus_shorter_than_one_sample() -> None:
    with pytest.raises(ConfigError, match=r"8 tokens and data\.seq_length=8 needs at least 9"):
        SampleIndex(FlatPlaces(8, 8), 0, 0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_rank_share_cuts_a_batch_into_contiguous_equal_parts(ranks: int) -> None:
    batch = list(range(100, 112))
    shares = [list(rank_share(batch, rank, ranks)) for rank in range(ranks)]
    assert [len(share) for share in shares] == [12 // ranks] * ranks
    assert [i for share in shares for i in share] == batch


@pytest.mark.parametrize("n_tokens", [9, 10, 801])
def test_index_for_evaluation_holds_out_every_sample_in_one_order(n_tokens: int) -> None:
    index = SampleIndex(FlatPlaces(n_tokens, 8), 0, 0.1, evaluates=True)
    positions = index.held_out_positions(10**6).tolist()
    assert sorted(positions) == list(range(index.n_samples)) and index.n_held_out == index.n_samples
    assert index.held_out_positions(3).tolist() == positions[:3]
