from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroband.data.index import BlockPlaces, SampleIndex
from zeroband.errors import ConfigError

BLOCK, T = 64, 4
shards = st.lists(st.integers(1, 700), min_size=1, max_size=8).filter(lambda sizes: max(sizes) > T)


def index(sizes: list[int], *, seed: int = 0, hold_out: float = 0.0, mixed: int | None = 2, t: int = T) -> SampleIndex:
    return SampleIndex(BlockPlaces(sizes, BLOCK, t), seed, hold_out, mixed=mixed)


def groups_of(spans: list[tuple[int, int]]) -> set[int]:
    return {start // BLOCK for start, _ in spans}


@settings(max_examples=50)
@given(sizes=shards, t=st.sampled_from([4, 5, 8]))
def test_positions_make_each_token_but_the_first_of_a_group_a_target_once(sizes: list[int], t: int) -> None:
    if max(sizes) < t + 1:
        return
    places = BlockPlaces(sizes, BLOCK, t)
    spans = places.spans(np.arange(places.n_samples)).tolist()
    targets = sorted(token for start, stop in spans for token in range(start + 1, stop))
    assert len(set(targets)) == len(targets)
    group_tokens, begin, firsts = places.per_group * t, 0, set[int]()
    for size in sizes:
        firsts |= set(range(begin, begin + size, group_tokens))
        begin += size
    assert set(targets) == set(range(begin)) - firsts
    ends = np.cumsum(sizes)
    for start, stop in spans:
        shard = int(np.searchsorted(ends, start, side="right"))
        assert stop <= ends[shard] and stop - start <= t + 1


@settings(max_examples=50)
@given(sizes=shards, seed=st.integers(0, 5), hold_out=st.floats(0, 0.49), mixed=st.sampled_from([1, 2, 3, None]))
def test_each_pass_visits_what_is_not_held_out_once(
    sizes: list[int], seed: int, hold_out: float, mixed: int | None
) -> None:
    one = index(sizes, seed=seed, hold_out=hold_out, mixed=mixed)
    assert one.n_train >= 1 and one.n_train + one.n_held_out == one.n_samples
    held_out = one.held_out_positions(one.n_samples).tolist()
    for data_pass in (0, 3):
        first = data_pass * one.n_train
        trained = one.positions(range(first, first + one.n_train)).tolist()
        assert sorted(trained + held_out) == list(range(one.n_samples))


@settings(max_examples=50)
@given(sizes=shards, mixed=st.sampled_from([1, 2, None]))
def test_evaluation_holds_out_every_sample(sizes: list[int], mixed: int | None) -> None:
    one = SampleIndex(BlockPlaces(sizes, BLOCK, T), 0, 0.1, mixed=mixed, evaluates=True)
    positions = one.held_out_positions(10**6).tolist()
    assert sorted(positions) == list(range(one.n_samples)) and one.n_held_out == one.n_samples
    assert one.held_out_positions(3).tolist() == positions[:3]


def test_indices_in_a_row_lie_in_few_groups_from_anywhere() -> None:
    one = index([64 * 100] * 10, mixed=8)
    per_group = BLOCK // T
    spans = [one.span(position) for position in one.positions(range(8 * per_group)).tolist()]
    assert len(groups_of(spans)) == 8, "a range of 8 groups' samples touches 8 groups"
    spread = sorted(groups_of(spans))
    assert spread[0] < 300 and spread[-1] > 700, "and they are from all over the 1000"
    part = [one.span(position) for position in one.positions(range(40, 72)).tolist()]
    assert groups_of(part) <= groups_of(spans)
    assert len(groups_of(part)) == 8, "32 samples in a row mix all of them"


def test_order_is_another_one_in_each_pass_and_with_each_seed() -> None:
    one, other = index([64 * 50] * 4, seed=1), index([64 * 50] * 4, seed=2)
    first = one.positions(range(one.n_train)).tolist()
    assert first != one.positions(range(one.n_train, 2 * one.n_train)).tolist()
    assert first != other.positions(range(one.n_train)).tolist()
    assert one.positions([77, 5]).tolist() == [first[77], first[5]]


def test_two_levels_mix_what_lies_side_by_side_like_one() -> None:
    """Neighbours in the corpus are apart in the order, and any stretch has its share of each quarter of the corpus."""
    one = index([64 * 512] * 8, mixed=64)
    quarter = one.n_samples // 4
    quarters = one.positions(range(one.n_train)) // quarter
    stretches = quarters[: len(quarters) // 1024 * 1024].reshape(-1, 1024)
    shares = np.stack([(stretches == q).mean(axis=1) for q in range(4)])
    expected = (64 / 4 * 16) ** 0.5  # blocks of a stretch from one quarter, of 64: binomial, sigma 3.5 of 64
    assert expected == 16 and np.abs(shares - 0.25).max() < 5 * 3.5 / 64
    assert np.abs(shares.mean(axis=1) - 0.25).max() < 0.01


def test_held_out_samples_are_whole_groups_and_the_first_come_from_many() -> None:
    one = index([64 * 1000] * 4, hold_out=0.05, mixed=16)
    per_group = BLOCK // T
    held_out = one.held_out_positions(one.n_held_out)
    assert one.n_held_out == 200 * per_group
    assert len(set((held_out // per_group).tolist())) == 200
    assert len(set((held_out[:128] // per_group).tolist())) > 40
    assert (
        held_out.tolist() == index([64 * 1000] * 4, hold_out=0.05, mixed=16, seed=9).held_out_positions(10**6).tolist()
    )


def test_few_groups_are_shuffled_as_one() -> None:
    one = index([200, 70], hold_out=0.05, mixed=100)
    assert one.n_held_out == 4, "samples, not groups"


def test_a_terabyte_is_indexed_without_a_list_of_it() -> None:
    one = SampleIndex(BlockPlaces([5 * 10**7] * 10_000, 1 << 16, 2048), 0, 0.005, mixed=256)
    positions = one.positions(range(10**8, 10**8 + 512))
    spans = [one.span(position) for position in positions.tolist()]
    assert len({start >> 16 for start, _ in spans}) > 200
    assert all(0 <= start < stop <= 5 * 10**11 for start, stop in spans)


def test_samples_longer_than_a_block_take_several_blocks() -> None:
    places = BlockPlaces([10_000], BLOCK, 100)
    assert places.per_group >= 16 and places.n_samples == 100


def test_shards_without_a_whole_sample_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"2 shards have 2 tokens"):
        BlockPlaces([1, 1], BLOCK, T)
