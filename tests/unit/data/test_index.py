"""The order of samples: one shuffle, or one of blocks and one within; what is held out; each token learned once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroband.data.index import BlockLayout, Permutation, SampleIndex, flat_layout, rank_share
from zeroband.errors import ConfigError

BLOCK, T = 64, 4
shapes = st.tuples(st.integers(1, 40), st.integers(0, 3000)).map(lambda p: (p[0], p[0] + 1 + p[1]))
shards = st.lists(st.integers(1, 700), min_size=1, max_size=8).filter(lambda sizes: max(sizes) > T)


def flat(n_tokens: int = 801, seq_length: int = 8, *, seed: int = 0, hold_out: float = 0.1) -> SampleIndex:
    return SampleIndex(flat_layout(n_tokens, seq_length), seed, hold_out)


def blocks(sizes: list[int], *, seed: int = 0, hold_out: float = 0.0, window: int | None = 2) -> SampleIndex:
    return SampleIndex(BlockLayout(sizes, BLOCK, T), seed, hold_out, window=window)


def groups_of(index: SampleIndex, first: int, stop: int) -> set[int]:
    """Blocks of a stretch of the list."""
    return set((index.spans(index.positions(range(first, stop)))[:, 0] // BLOCK).tolist())


# -- a shuffle that is computed ----------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(size=st.integers(1, 2000), key=st.text(max_size=8))
def test_permutation_hits_every_value_once_for_any_size_and_key(size: int, key: str) -> None:
    images = Permutation(size, key)(np.arange(size)).tolist()
    assert sorted(images) == list(range(size))
    assert int(Permutation(size, key)(size - 1)[0]) == images[-1]


@pytest.mark.parametrize("size", [1 << 40, (1 << 61) + 12345])
def test_permutation_stays_in_range_and_collides_nowhere_for_huge_sizes(size: int) -> None:
    values = np.concatenate([np.arange(500), np.arange(size - 500, size)])
    images = Permutation(size, "k")(values)
    assert images.min() >= 0 and images.max() < size and len(np.unique(images)) == len(values)


def test_permutation_scatters_neighbours_like_a_random_shuffle_and_by_its_key() -> None:
    size = 10_000
    images = Permutation(size, "k")(np.arange(size))
    assert np.abs(np.diff(images)).mean() / size == pytest.approx(1 / 3, rel=0.03)
    assert abs(np.corrcoef(np.arange(size), images)[0, 1]) < 0.03
    assert (images == Permutation(size, "other")(np.arange(size))).sum() < 10


def test_permutation_never_changes_its_order_between_releases() -> None:
    """A run that is resumed with a later version must not see samples twice."""
    assert Permutation(100, "order/0/0")(np.arange(8)).tolist() == [86, 7, 56, 13, 99, 95, 78, 35]


# -- one array of tokens -----------------------------------------------------------------------------------------------


@given(shape=shapes, seed=st.integers(0, 10), hold_out=st.floats(0, 0.49), data_pass=st.integers(0, 3))
@pytest.mark.defect(8)
def test_index_makes_every_token_but_the_first_a_target_exactly_once(
    shape: tuple[int, int], seed: int, hold_out: float, data_pass: int
) -> None:
    seq_length, n_tokens = shape
    index = SampleIndex(flat_layout(n_tokens, seq_length), seed, hold_out)
    first = data_pass * index.n_train
    trained = index.positions(range(first, first + index.n_train)).tolist()
    held_out = index.held_out_positions(index.n_samples).tolist()
    spans = index.spans(np.array(trained + held_out)).tolist()
    targets = sorted(token for start, stop in spans for token in range(start + 1, stop))
    assert targets == list(range(1, n_tokens))
    assert index.n_train >= 1


def test_index_visits_the_samples_in_another_order_in_each_pass() -> None:
    index = flat()
    first, second = index.positions(range(90)).tolist(), index.positions(range(90, 180)).tolist()
    assert sorted(first) == sorted(second) and first != second
    whole = flat(hold_out=0)
    assert whole.positions([99, 100, 250]).tolist() == [int(whole.positions([i])[0]) for i in (99, 100, 250)]


def test_index_orders_by_seed_but_holds_out_the_same_samples() -> None:
    one, other = flat(seed=1), flat(seed=2)
    assert one.positions(range(90)).tolist() != other.positions(range(90)).tolist()
    assert one.held_out_positions(10).tolist() == other.held_out_positions(10).tolist()


@pytest.mark.parametrize(("n_tokens", "spans"), [(9, [(0, 5), (4, 9)]), (10, [(0, 5), (4, 9), (8, 10)])])
def test_span_overlaps_by_one_token_and_the_last_may_be_short(n_tokens: int, spans: list[tuple[int, int]]) -> None:
    index = flat(n_tokens, 4, hold_out=0)
    assert list(map(tuple, index.spans(np.arange(index.n_samples)).tolist())) == spans


@pytest.mark.parametrize(("hold_out", "held_out"), [(0.0, 0), (0.001, 1), (0.25, 25), (0.499, 50)])
def test_hold_out_rounds_up_to_whole_samples(hold_out: float, held_out: int) -> None:
    index = flat(hold_out=hold_out)
    assert (index.n_held_out, index.n_train) == (held_out, 100 - held_out)
    assert len(index.held_out_positions(1000)) == held_out


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_rank_share_cuts_a_batch_into_contiguous_equal_parts(ranks: int) -> None:
    batch = list(range(100, 112))
    shares = [list(rank_share(batch, rank, ranks)) for rank in range(ranks)]
    assert [len(share) for share in shares] == [12 // ranks] * ranks
    assert [i for share in shares for i in share] == batch


# -- shards that are fetched by the block ------------------------------------------------------------------------------


@settings(max_examples=50)
@given(sizes=shards, t=st.sampled_from([4, 5, 8]))
def test_positions_make_each_token_but_the_first_of_a_group_a_target_once(sizes: list[int], t: int) -> None:
    if max(sizes) < t + 1:
        return
    places = BlockLayout(sizes, BLOCK, t)
    spans = places.spans(np.arange(places.n_samples)).tolist()
    targets = sorted(token for start, stop in spans for token in range(start + 1, stop))
    assert len(set(targets)) == len(targets)
    group_tokens, begin, firsts = places.group_samples * t, 0, set[int]()
    for size in sizes:
        firsts |= set(range(begin, begin + size, group_tokens))
        begin += size
    assert set(targets) == set(range(begin)) - firsts
    ends = np.cumsum(sizes)
    for start, stop in spans:
        shard = int(np.searchsorted(ends, start, side="right"))
        assert stop <= ends[shard] and stop - start <= t + 1


@settings(max_examples=50)
@given(sizes=shards, seed=st.integers(0, 5), hold_out=st.floats(0, 0.49), window=st.sampled_from([1, 2, 3, None]))
def test_each_pass_visits_what_is_not_held_out_once(
    sizes: list[int], seed: int, hold_out: float, window: int | None
) -> None:
    one = blocks(sizes, seed=seed, hold_out=hold_out, window=window)
    assert one.n_train >= 1 and one.n_train + one.n_held_out == one.n_samples
    held_out = one.held_out_positions(one.n_samples).tolist()
    for data_pass in (0, 3):
        first = data_pass * one.n_train
        trained = one.positions(range(first, first + one.n_train)).tolist()
        assert sorted(trained + held_out) == list(range(one.n_samples))


@settings(max_examples=50)
@given(sizes=shards, window=st.sampled_from([1, 2, None]))
def test_evaluation_holds_out_every_sample_in_one_order(sizes: list[int], window: int | None) -> None:
    for places in (BlockLayout(sizes, BLOCK, T), flat_layout(sum(sizes), T)):
        one = SampleIndex(places, 0, 0.1, window=window, evaluation_only=True)
        positions = one.held_out_positions(10**6).tolist()
        assert sorted(positions) == list(range(one.n_samples)) and one.n_held_out == one.n_samples
        assert one.held_out_positions(3).tolist() == positions[:3]


def test_indices_in_a_row_lie_in_few_groups_from_anywhere() -> None:
    one = blocks([64 * 100] * 10, window=8)
    stretch = groups_of(one, 0, 8 * BLOCK // T)
    assert len(stretch) == 8, "a range of 8 groups' samples touches 8 groups"
    assert min(stretch) < 300 and max(stretch) > 700, "and they are from all over the 1000"
    assert groups_of(one, 40, 72) == stretch, "32 samples in a row mix all of them"


def test_order_is_another_one_in_each_pass_and_with_each_seed() -> None:
    one, other = blocks([64 * 50] * 4, seed=1), blocks([64 * 50] * 4, seed=2)
    first = one.positions(range(one.n_train)).tolist()
    assert first != one.positions(range(one.n_train, 2 * one.n_train)).tolist()
    assert first != other.positions(range(one.n_train)).tolist()
    assert one.positions([77, 5]).tolist() == [first[77], first[5]]


def test_two_levels_mix_what_lies_side_by_side_like_one() -> None:
    """Neighbours in the corpus are apart in the order, and any stretch has its share of each quarter of the corpus."""
    one = blocks([64 * 512] * 8, window=64)
    quarters = one.positions(range(one.n_train)) // (one.n_samples // 4)
    stretches = quarters[: len(quarters) // 1024 * 1024].reshape(-1, 1024)
    shares = np.stack([(stretches == q).mean(axis=1) for q in range(4)])
    # blocks of a stretch from one quarter, of 64: binomial, sigma 3.5 of 64
    assert np.abs(shares - 0.25).max() < 5 * 3.5 / 64
    assert np.abs(shares.mean(axis=1) - 0.25).max() < 0.01


def test_held_out_samples_are_whole_groups_and_the_first_come_from_many() -> None:
    one, other = (blocks([64 * 1000] * 4, hold_out=0.05, window=16, seed=seed) for seed in (0, 9))
    group_samples = BLOCK // T
    held_out = one.held_out_positions(one.n_held_out)
    assert one.n_held_out == 200 * group_samples
    assert len(set((held_out // group_samples).tolist())) == 200
    assert len(set((held_out[:128] // group_samples).tolist())) > 40
    assert held_out.tolist() == other.held_out_positions(10**6).tolist()
    assert blocks([200, 70], hold_out=0.05, window=100).n_held_out == 4, "few groups are shuffled as one: samples"


def test_a_terabyte_is_indexed_without_a_list_of_it() -> None:
    one = SampleIndex(BlockLayout([5 * 10**7] * 10_000, 1 << 16, 2048), 0, 0.005, window=256)
    spans = one.spans(one.positions(range(10**8, 10**8 + 512))).tolist()
    assert len({start >> 16 for start, _ in spans}) > 200
    assert all(0 <= start < stop <= 5 * 10**11 for start, stop in spans)


def test_samples_longer_than_a_block_take_several_blocks() -> None:
    places = BlockLayout([10_000], BLOCK, 100)
    assert places.group_samples >= 16 and places.n_samples == 100


def test_corpus_without_a_whole_sample_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"8 tokens and data\.seq_length=8 needs at least 9"):
        flat_layout(8, 8)
    with pytest.raises(ConfigError, match=r"2 shards have 2 tokens"):
        BlockLayout([1, 1], BLOCK, T)
