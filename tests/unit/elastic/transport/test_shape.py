"""Shapes: who owns what, in what pieces, and which way round."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroband.elastic.membership.topology import LinkTable
from zeroband.elastic.transport.shape import (
    CONTENTION,
    MESSAGE_S,
    Route,
    all_to_all_s,
    chain_of,
    chunk_numel,
    ring_s,
    route_of,
    shape_of,
    shard_bounds,
)
from zeroband.kernels.codec import CODECS

INT8 = CODECS["int8"]
ALIGNMENT = 256
numels = st.integers(0, 1 << 40)
rates = st.lists(st.floats(1e3, 1e10), min_size=2, max_size=64)


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
    sizes = [stop - start for start, stop in pairwise(shape_of(numel, INT8, [1 / world] * world).bounds)]
    assert len(sizes) == world and sum(sizes) == numel
    assert max(sizes) - min(sizes) <= 2 * ALIGNMENT


def sizes_of(rates: list[int]) -> list[int]:
    """Of the shards, in blocks, of 400 blocks."""
    shape = shape_of(400 * ALIGNMENT, INT8, [1 / len(rates)] * len(rates), LinkTable(tuple(rates), rtt_ms=1))
    return [(stop - start) // ALIGNMENT for start, stop in pairwise(shape.bounds)]


@pytest.mark.parametrize(
    "rates", [[300, 240, 270, 290], [300, 220, 300, 300], [100, 140, 110, 100], [290, 0, 300, 260]]
)
def test_noise_of_equal_links_sizes_no_shard(rates: list[int]) -> None:
    """Each of them carries the same; measured were rates a third apart."""
    assert sizes_of(rates) == [100] * 4


@pytest.mark.parametrize("slow", [100, 30, 10])
def test_member_with_a_really_slow_link_owns_less(slow: int) -> None:
    first, *others = sizes_of([slow, 300, 300, 300])
    assert first < 20 and max(others) - min(others) <= 1


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
    shape = shape_of(numel, CODECS[name], [1 / world] * world)
    assert shape.codec is CODECS[name]
    assert sorted(shape.order) == list(range(world)) and len(shape.shares) == world
    assert shape.chunk_numel == chunk_numel(max(stop - start for start, stop in pairwise(shape.bounds)))


@pytest.mark.parametrize("numel", [1, 10**6, 10**9])
@pytest.mark.parametrize("rtt_ms", [0, 1, 80])
def test_members_with_equal_links_speak_to_all(numel: int, rtt_ms: int) -> None:
    """Both move as much, and a ring waits for everybody one after the other."""
    for world in (2, 3, 16, 64, 200):
        assert not shape_of(numel, INT8, [1 / world] * world, LinkTable((100,) * world, rtt_ms=rtt_ms)).is_ring


@pytest.mark.parametrize(("slowest_link", "is_ring"), [(100, False), (40, False), (5, True)])
def test_ring_goes_around_a_slow_link(slowest_link: int, is_ring: bool) -> None:
    """All-to-all of 4 members moves half a state between any two, a ring 1.5 states over each link that it uses."""
    network = LinkTable((100,) * 4, (0, 2, 1, 3), slowest_link=slowest_link, slowest_in_ring=100, rtt_ms=10)
    shape = shape_of(10**8, INT8, [0.25] * 4, network)
    assert (shape.is_ring, shape.order) == (is_ring, (0, 2, 1, 3))


def test_ring_is_not_worth_its_round_trips_for_little() -> None:
    network = LinkTable((100,) * 4, slowest_link=5, slowest_in_ring=100, rtt_ms=80)
    assert not shape_of(10**5, INT8, [0.25] * 4, network).is_ring


worlds, sizes, mbits = st.integers(2, 1000), st.integers(1, 10**10), st.integers(1, 10**5)


@given(worlds, sizes, mbits)
def test_both_ways_take_at_least_the_time_of_their_bytes(world: int, size: int, rate: int) -> None:
    network = LinkTable((rate,) * world)
    least_s = 2 * (world - 1) / world * size * 8e-6 / rate
    assert min(ring_s(world, size, network), all_to_all_s([1 / world] * world, size, network)) >= 0.999 * least_s


def test_predicted_time_counts_bytes_ways_and_messages() -> None:
    network = LinkTable((8,) * 4, slowest_in_ring=4, rtt_ms=500)  # a megabyte a second
    chunk_s = 0.25 / 16
    assert all_to_all_s([0.25] * 4, 10**6, network) == pytest.approx(
        1.5 * CONTENTION + 3 * chunk_s + 0.5 + 6 * MESSAGE_S
    )
    assert ring_s(4, 10**6, network) == pytest.approx(3.0 + 3 * (2 * 2 * chunk_s + 0.5 + 2 * MESSAGE_S))
    assert all_to_all_s([0.5, 0.5], 10**9, LinkTable((8, 8), rtt_ms=500)) == pytest.approx(
        1000 + 0.065536 + 0.5 + 2 * MESSAGE_S
    )


def test_slowest_access_link_decides_unless_its_owner_owns_less() -> None:
    network = LinkTable((80, 8, 80), rtt_ms=1)
    equal, sized = all_to_all_s([1 / 3] * 3, 10**7, network), all_to_all_s([0.5, 0.0, 0.5], 10**7, network)
    assert sized == pytest.approx(10 * CONTENTION, abs=0.15) and equal == pytest.approx(
        10 * CONTENTION * 4 / 3, abs=0.15
    )


def test_member_whose_rate_is_not_known_counts_as_the_median() -> None:
    assert ring_s(3, 10**7, LinkTable((0, 10, 80))) == ring_s(3, 10**7, LinkTable((80, 10, 80)))


@pytest.mark.parametrize("numel", [1, 257, 100_000])
def test_who_speaks_for_a_site_owns_shards_and_the_others_own_none(numel: int) -> None:
    sites = (1, 1, 1, 3, 5, 5, 5)
    network = LinkTable(rates=(900, 40, 900, 30, 900, 20, 900))
    shape = shape_of(numel, INT8, (0.125,) * 7, network, sites)
    owned = [stop - start for start, stop in pairwise(shape.bounds)]
    assert sum(owned) == numel and not any(n for place, n in enumerate(owned) if place not in sites)
    alone = shape_of(numel, INT8, (0.25,) * 3, LinkTable(rates=(40, 30, 20)))
    assert [owned[place] for place in (1, 3, 5)] == [stop - start for start, stop in pairwise(alone.bounds)]
    assert (shape.order, shape.is_ring, shape.chunk_numel) == ((1, 3, 5), alone.is_ring, alone.chunk_numel)


def test_members_of_a_site_stand_in_a_chain_that_ends_at_who_speaks() -> None:
    assert chain_of((1, 1, 1, 3, 4, 4)) == (2, 1, 1, 3, 4, 4)
    assert chain_of((3, 3, 3, 3)) == (1, 2, 3, 3)
    assert chain_of(range(4)) == (0, 1, 2, 3)


members_at_sites = st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), min_size=2, max_size=24)


@given(members_at_sites, st.integers(0, 3))
def test_every_payload_comes_to_every_member_once_and_once_into_each_other_site(
    members: list[tuple[int, bool, bool]], turn: int
) -> None:
    """`members`: the site of each, whether others cannot dial it, and whether it sends anything."""
    world, named = len(members), [site for site, _, _ in members]
    sites, lengths = [named.index(site) for site in named], [int(sends) for _, _, sends in members]
    dial_out_only = [place for place, (_, is_dial_out_only, _) in enumerate(members) if is_dial_out_only]
    routes = [route_of(place, sites, dial_out_only=dial_out_only, turn=turn) for place in range(world)]
    moved = list[tuple[int, int, int]]()
    for member, route in enumerate(routes):
        moved += [(sender, source, member) for sender, source in enumerate(route.sources) if sender != member]
        assert route.sources[member] == member
    assert sorted(moved) == sorted(sent_by(routes, sites))
    for sender in range(world):
        wide = [sites[to] for whose, at, to in moved if whose == sender and sites[at] != sites[to]]
        assert sorted(wide) == sorted(set(sites) - {sites[sender]})
    for member, route in enumerate(routes):
        partners = {at if to == member else to for sender, at, to in moved if lengths[sender] and member in (at, to)}
        assert route.partners(member, lengths) == partners


def sent_by(routes: list[Route], sites: list[int]) -> list[tuple[int, int, int]]:
    """Whose payload goes from whom to whom, as those see it who send."""
    sent = [(member, member, to) for member, route in enumerate(routes) for to in route.receivers]
    for member, route in enumerate(routes):
        relayed = [s for s, source in enumerate(route.sources) if s == source and sites[s] != sites[member]]
        sent += [(sender, member, to) for sender in relayed for to in route.near]
    return sent


def test_two_sites_of_one_size_exchange_payloads_in_pairs() -> None:
    sites = (0, 0, 0, 3, 3, 3)
    assert route_of(0, sites).receivers == {1, 2, 3} and route_of(4, sites).receivers == {3, 5, 1}
    assert route_of(0, sites).sources == (0, 1, 2, 3, 1, 2)
