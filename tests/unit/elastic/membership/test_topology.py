"""Topology: shards by rates, rings by links, and plans that noise does not change."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroband.elastic.membership.records import LinkRates, Ready
from zeroband.elastic.membership.rings import EXACT_UP_TO, plan_links, ring_order, slowest, steady_order, steady_rates
from zeroband.elastic.membership.topology import RELAY_COST, LinkTable, shard_shares

rates = st.sampled_from([10.0, 20.0, 50.0, 100.0, 1000.0])


def all_links(members: int, draw: st.DrawFn) -> dict[tuple[int, int], float]:
    return {(a, b): draw(rates) for a in range(members) for b in range(members) if a != b}


def table_of(links: dict[tuple[int, int], float], members: int) -> np.ndarray:
    return np.array([[links.get((a, b), 0.0) for b in range(members)] for a in range(members)])


# -- shards -----------------------------------------------------------------------------------------------------------


def end_s(shares: tuple[float, ...], of: list[float]) -> float:
    """When the last member has sent and received everything: 1 + (M - 2) s states."""
    return max((1 + (len(of) - 2) * share) / rate for share, rate in zip(shares, of, strict=True))


@given(st.lists(rates, min_size=3, max_size=12), st.data())
def test_no_other_shares_end_an_all_to_all_sooner(of: list[float], data: st.DataObject) -> None:
    shares = shard_shares(of)
    assert sum(shares) == pytest.approx(1) and min(shares) >= 0
    moved = data.draw(st.floats(0.001, 1))
    giver = data.draw(st.sampled_from([i for i, share in enumerate(shares) if share > 0]))
    taker = data.draw(st.sampled_from([i for i in range(len(of)) if i != giver]))
    other = list(shares)
    other[taker] += shares[giver] * moved
    other[giver] -= shares[giver] * moved
    assert end_s(shares, of) <= end_s(tuple(other), of) * (1 + 1e-9)


def test_equal_members_own_equal_parts_and_slow_ones_nothing() -> None:
    assert shard_shares([100.0] * 4) == pytest.approx([0.25] * 4)
    assert shard_shares([1000.0, 1000.0, 10.0, 10.0]) == pytest.approx([0.5, 0.5, 0, 0])


@pytest.mark.parametrize("of", [[], [5.0], [1.0, 9.0], [0.0, 0.0, 0.0]])
def test_where_rates_decide_nothing_the_parts_are_equal(of: list[float]) -> None:
    assert shard_shares(of) == pytest.approx([1 / len(of)] * len(of) if of else [])


def test_member_that_was_not_measured_counts_as_the_median() -> None:
    assert shard_shares([100.0, 0.0, 50.0, 20.0]) == pytest.approx(shard_shares([100.0, 50.0, 50.0, 20.0]))


# -- rings ------------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.integers(4, 7), st.data())
def test_ring_of_few_is_the_best_of_all_rings(members: int, data: st.DataObject) -> None:
    links = data.draw(st.composite(lambda draw: all_links(members, draw))())
    table = table_of(links, members)
    best = max(slowest(table, (0, *rest)) for rest in itertools.permutations(range(1, members)))
    order = ring_order(table_of(links, members))
    assert sorted(order) == list(range(members)) and slowest(table, order) == best


@pytest.mark.parametrize("members", [EXACT_UP_TO, EXACT_UP_TO + 1, 40])
def test_ring_finds_the_one_way_without_slow_links(members: int) -> None:
    """A hidden ring of fast links among slow ones; above the exact sizes its neighbours are fast too, as in places."""
    hidden = np.random.default_rng(members).permutation(members)
    places = {int(member): at for at, member in enumerate(hidden)}

    def rate(a: int, b: int) -> float:
        distance = (places[b] - places[a]) % members
        return 100.0 / min(distance, members - distance)

    links = {(a, b): rate(a, b) for a in range(members) for b in range(members) if a != b}
    order = ring_order(table_of(links, members))
    assert sorted(order) == list(range(members))
    assert slowest(table_of(links, members), order) >= (100.0 if members <= EXACT_UP_TO else 50.0)


def test_link_that_was_not_measured_counts_as_the_median() -> None:
    links = {(a, b): 100.0 for a in range(4) for b in range(4) if a != b}
    del links[1, 2]
    assert sorted(ring_order(table_of(links, 4))) == [0, 1, 2, 3]


def test_ring_of_many_leaves_the_slow_links_out() -> None:
    """A fifth of all links are slow; among 300 members there are many rings without them."""
    chance = np.random.default_rng(3)
    table = np.where(chance.random((300, 300)) < 0.2, 5.0, 50.0 + 50.0 * chance.random((300, 300)))
    order = ring_order(table)
    assert sorted(order) == list(range(300)) and order[0] == 0 and slowest(table, order) >= 50.0


# -- steadiness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measured", "before", "planned"),
    [
        ([100, 90], [95, 95], (95, 95)),
        ([100, 70], [95, 95], (100, 70)),
        ([100, 90], [], (100, 90)),
        ([100, 0], [100, 0], (100, 0)),
        ([0, 0], [], ()),
        ([0, 0, 0], [5, 5], ()),
        ([100, 90, 80], [100, 90], (100, 90, 80)),
    ],
)
def test_rates_change_when_one_really_did(measured: list[int], before: list[int], planned: tuple[int, ...]) -> None:
    assert steady_rates(measured, before) == planned


def links_with(fast: tuple[int, ...], rate: int) -> dict[tuple[int, int], float]:
    """100 Mbit/s between any two of four, but for the links of one ring."""
    links = {(a, b): 100.0 for a in range(4) for b in range(4) if a != b}
    return links | dict.fromkeys(zip(fast, [*fast[1:], fast[0]], strict=True), float(rate))


def test_order_changes_only_for_a_ring_that_is_really_faster() -> None:
    assert steady_order(table_of(links_with((0, 2, 1, 3), 120), 4), ()) == ()
    assert steady_order(table_of(links_with((0, 2, 1, 3), 130), 4), ()) == (0, 2, 1, 3)
    assert steady_order(table_of(links_with((0, 1, 2, 3), 120), 4), (0, 2, 1, 3)) == (0, 2, 1, 3)
    assert steady_order(table_of(links_with((0, 1, 2, 3), 200), 4), (0, 2, 1, 3)) == ()


@pytest.mark.parametrize("members", [0, 1, 2, 3])
def test_few_members_have_one_ring(members: int) -> None:
    links = {(a, b): 5.0 + a for a in range(members) for b in range(members) if a != b}
    assert steady_order(table_of(links, members), ()) == ()


def test_links_that_nobody_measured_order_nobody() -> None:
    assert steady_order(table_of({(a, b): 0 for a in range(5) for b in range(5) if a != b}, 5), ()) == ()


def measured(
    rate: int = 0, links: Mapping[str, int] | None = None, rtt_ms: int = 0, *, took_ms: int = 0
) -> tuple[Ready, LinkRates]:
    """What a member tells of its links."""
    return Ready(1, 0, "state", rate=rate, took_ms=took_ms), LinkRates(links or {}, rtt_ms)


def test_plan_knows_the_slowest_link_and_the_longest_way() -> None:
    seen = [measured(90, {"b": 50, "c": 30}, 12), measured(80, {"c": 60}, 40), measured(70)]
    assert plan_links("abc", seen, LinkTable()) == LinkTable((90, 80, 70), (), 30, 30, 40)


def test_direction_that_was_not_measured_is_like_the_other() -> None:
    seen = [measured(), measured(links={"a": 25})]
    assert plan_links("ab", seen, LinkTable()) == LinkTable((), (), 25, 25, 0)


def test_plan_leaves_a_slow_link_out_of_the_ring() -> None:
    links = [{name: 4 if {me, name} == {"a", "b"} else 100 for name in "abcd" if name != me} for me in "abcd"]
    planned = plan_links("abcd", [measured(100, those, 10) for those in links], LinkTable())
    assert (planned.slowest_link, planned.slowest_in_ring) == (4, 100)
    assert abs(planned.order.index(0) - planned.order.index(1)) == 2  # opposite one another


def test_noise_changes_no_plan() -> None:
    before = plan_links("ab", [measured(100, {"b": 100}, 50), measured(100, {"a": 100}, 50)], LinkTable())
    assert plan_links("ab", [measured(90, {"b": 110}, 45), measured(110, {"a": 95}, 55)], before) == before
    changed = plan_links("ab", [measured(100, {"b": 100}, 50), measured(40, {"a": 100}, 90)], before)
    assert (changed.rates, changed.rtt_ms, changed.slowest_link) == ((100, 40), 90, 100)


def test_members_that_know_nothing_plan_with_nothing() -> None:
    assert plan_links("abcd", [measured()] * 4, LinkTable()) == LinkTable()
    assert plan_links("a", [measured(5)], LinkTable()) == LinkTable((5,))


def test_transfer_took_as_long_as_the_member_that_it_took_longest() -> None:
    seen = [measured(took_ms=took_ms) for took_ms in (4_100, 4_120, 4_090)]
    assert plan_links("abc", seen, LinkTable(took_ms=4_000)).took_ms == 4_120


def test_time_that_one_member_does_not_tell_is_not_known() -> None:
    seen = [measured(took_ms=took_ms) for took_ms in (4_100, 0, 4_090)]
    assert plan_links("abc", seen, LinkTable(took_ms=4_000)).took_ms == 0


def test_ring_goes_around_pairs_that_a_relay_joins() -> None:
    members = "abcd"
    seen = [measured(100, {m: 100 for m in members if m != own and {m, own} != set("cd")}) for own in members]
    assert plan_links(members, seen, LinkTable()).order == ()
    network = plan_links(members, seen, LinkTable(), dial_out_only="cd")
    order = [members[place] for place in network.order]
    assert network.dial_out_only == (2, 3)
    assert {frozenset(pair) for pair in zip(order, order[1:] + order[:1], strict=True)} & {frozenset("cd")} == set()
    assert (network.slowest_link, network.slowest_in_ring) == (100 // RELAY_COST, 100)


def test_pair_that_needs_no_relay_is_as_fast_as_it_was_measured() -> None:
    members = "abcd"
    seen = [measured(100, {m: 100 for m in members if m != own}) for own in members]
    network = plan_links(members, seen, LinkTable(), dial_out_only="cd")
    assert (network.order, network.slowest_link) == ((), 100)


def test_relayed_pair_of_which_nothing_is_known_slows_nothing_down() -> None:
    nothing = [measured() for _ in range(3)]
    assert plan_links("abc", nothing, LinkTable(), dial_out_only="bc").slowest_link == 0
