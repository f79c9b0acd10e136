"""Shapes: who owns what, in what pieces, and which way round."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroband.kernels.codec import CODECS
from zeroband.plane.shape import LinkCosts, all_to_all_s, chunk_numel, ring_s, shape_of, shard_bounds

INT8 = CODECS["int8"]
ALIGNMENT = 256
numels = st.integers(0, 1 << 40)
rates = st.lists(st.floats(1e3, 1e10), min_size=2, max_size=64)
weight_lists = st.lists(st.integers(0, 10**6), min_size=2, max_size=64)


@given(numels, rates)
def test_shards_cover_the_buffer_in_order(numel: int, rates: list[float]) -> None:
    bounds = shard_bounds(numel, rates)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, numel, len(rates) + 1)
    assert all(start <= stop for start, stop in pairwise(bounds))


@given(numels, rates)
def test_shards_begin_at_whole_blocks_of_every_codec(numel: int, rates: list[float]) -> None:
    borders = [border for border in shard_bounds(numel, rates)[:-1] if border < numel]
    blocks = [codec.block for codec in CODECS.values() if codec.block]
    assert all(border % block == 0 for border in borders for block in [ALIGNMENT, *blocks])


@given(st.integers(0, 1 << 30), rates)
def test_shards_are_in_proportion_to_the_rates(numel: int, rates: list[float]) -> None:
    """But for half a block at each border."""
    for (start, stop), rate in zip(pairwise(shard_bounds(numel, rates)), rates, strict=True):
        assert abs((stop - start) - numel * rate / sum(rates)) <= ALIGNMENT + 1e-6 * numel


@given(st.integers(1, 1 << 30), st.integers(2, 600))
def test_members_without_known_rates_own_equal_shards(numel: int, world: int) -> None:
    sizes = [stop - start for start, stop in pairwise(shape_of(numel, INT8, [1] * world).bounds)]
    assert len(sizes) == world and sum(sizes) == numel
    assert max(sizes) - min(sizes) <= 2 * ALIGNMENT


@given(weight_lists)
def test_shares_add_up_to_one_or_are_all_zero(weights: list[int]) -> None:
    shares = shape_of(10_000, INT8, weights).shares
    assert sum(shares) == pytest.approx(1.0 if any(weights) else 0.0)
    assert [share == 0 for share in shares] == [weight == 0 for weight in weights]


@given(weight_lists)
def test_shares_are_in_proportion_to_the_weights(weights: list[int]) -> None:
    shares = shape_of(10_000, INT8, weights).shares
    assert list(shares) == pytest.approx([weight / max(sum(weights), 1) for weight in weights])


@given(numels)
def test_chunks_are_whole_blocks_and_neither_tiny_nor_huge(numel: int) -> None:
    chunk = chunk_numel(numel)
    assert chunk % ALIGNMENT == 0
    assert 1 << 12 <= chunk <= 1 << 16


@given(st.integers(1 << 16, 1 << 20))
def test_shard_of_middling_size_has_sixteen_chunks(numel: int) -> None:
    assert 15 <= -(-numel // chunk_numel(numel)) <= 16


@given(numels, st.integers(2, 64), st.sampled_from(sorted(CODECS)))
def test_shape_names_every_member_once_and_keeps_the_codec(numel: int, world: int, name: str) -> None:
    shape = shape_of(numel, CODECS[name], [1] * world)
    assert shape.codec is CODECS[name]
    assert sorted(shape.order) == list(range(world)) and len(shape.shares) == world
    assert shape.chunk_numel == chunk_numel(max(stop - start for start, stop in pairwise(shape.bounds)))


@pytest.mark.parametrize("numel", [1, 10**6, 10**9])
def test_few_members_speak_to_all_and_many_go_around_a_ring(numel: int) -> None:
    """By default the ring is faster from 503 members on, whatever the size: both move the same bytes, so that what is
    left is one round trip and a message to everybody against a round trip for every member."""
    is_ring = {world: shape_of(numel, INT8, [1] * world).is_ring for world in range(2, 600)}
    assert [world for world, ring in is_ring.items() if ring] == list(range(503, 600))


@pytest.mark.parametrize(("rtt_s", "first_ring"), [(0.0, 4), (0.001, 8), (0.01, 53)])
def test_ring_pays_earlier_where_the_way_is_short(rtt_s: float, first_ring: int) -> None:
    costs = LinkCosts(rtt_s=rtt_s)
    worlds = range(2, 600)
    is_ring = [shape_of(10**6, INT8, [1] * world, costs=costs).is_ring for world in worlds]
    assert is_ring.index(True) + 2 == first_ring


@given(st.integers(2, 1000), st.integers(1, 10**10), st.floats(1e5, 1e10))
def test_both_ways_take_at_least_the_time_of_their_bytes(world: int, size: int, rate: float) -> None:
    costs = LinkCosts(bytes_per_s=rate)
    least_s = 2 * (world - 1) / world * size / rate
    assert min(ring_s(world, size, costs), all_to_all_s(world, size, costs)) >= least_s


def test_predicted_time_counts_bytes_ways_and_messages() -> None:
    costs = LinkCosts(bytes_per_s=1e6, rtt_s=0.5, message_s=0.001)
    assert all_to_all_s(4, 10**6, costs) == pytest.approx(1.5 + 0.5 + 9 * 0.001)
    assert ring_s(4, 10**6, costs) == pytest.approx(1.5 + 3 * 0.502)
