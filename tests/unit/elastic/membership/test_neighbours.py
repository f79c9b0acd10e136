"""Few probes of each member find every cut."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroband.elastic.membership.reach import FULL_MESH_UP_TO, RINGS, neighbours, suspects
from zeroband.elastic.membership.records import Peer

MANY = [f"node{number:03}#{number:08x}" for number in range(128)]

Pair = frozenset[str]


@cache
def probed_of_many() -> dict[str, frozenset[str]]:
    return {own: neighbours(own, MANY) for own in MANY}


def test_few_members_probe_one_another() -> None:
    few = MANY[:FULL_MESH_UP_TO]
    assert [neighbours(own, few) for own in few] == [frozenset(few) - {own} for own in few]


def test_of_many_members_each_probes_one_in_each_ring_and_each_is_probed() -> None:
    probed = probed_of_many()
    assert all(1 <= len(found) <= RINGS and own not in found for own, found in probed.items())
    assert frozenset[str]().union(*probed.values()) == frozenset(MANY)


def test_who_leaves_is_missed_by_those_who_probed_it_alone() -> None:
    left = [member for member in MANY if member != MANY[7]]
    changed = [own for own in left if neighbours(own, left) != neighbours(own, MANY)]
    assert changed == [own for own in left if MANY[7] in neighbours(own, MANY)]
    assert len(changed) <= RINGS


@given(st.sets(st.sampled_from(MANY), min_size=1, max_size=len(MANY) - 1))
def test_each_ring_crosses_every_partition_at_least_twice(side: set[str]) -> None:
    crossing = sum((own in side) != (other in side) for own in MANY for other in probed_of_many()[own])
    assert crossing >= 2


def test_both_ends_of_a_doubted_or_cut_link_are_suspects_and_strangers_are_not() -> None:
    sound = Peer("a", "host", 1, False)
    peers = {
        "a": replace(sound, doubted=("b", "gone")),
        "b": sound,
        "c": replace(sound, cut_off=("d",)),
        "d": sound,
        "e": replace(sound, doubted=("gone",)),
    }
    assert suspects(peers) == {"a", "b", "c", "d"}


def found_within_one_detection(cut: Collection[Pair]) -> set[Pair]:
    """Cut pairs that one of the two has found itself when the first doubts were told."""
    asked = probed_of_many()
    silent = {own: {other for other in asked[own] if frozenset((own, other)) in cut} for own in MANY}
    told = {own: sorted(others) if 4 * len(others) < 3 * len(asked[own]) else [] for own, others in silent.items()}
    peers = {own: Peer(own, "host", 1, False, (), tuple(others)) for own, others in told.items()}
    doubted = suspects(peers)
    return {frozenset((own, other)) for own in MANY for other in {*doubted, *silent[own]} if {own, other} in cut}


def cuts() -> Iterator[tuple[str, set[Pair]]]:
    chance = random.Random(0)
    for size in (1, 2, 5, 30, 64):
        side = set(chance.sample(MANY, size))
        yield f"{size} from the others", {frozenset((a, b)) for a in side for b in MANY if b not in side}
    for share in (0.3, 0.5):
        lonely = chance.choice(MANY)
        away = chance.sample([member for member in MANY if member != lonely], round(share * len(MANY)))
        yield f"one from {share:.0%}", {frozenset((lonely, other)) for other in away}


@pytest.mark.parametrize("cut", [pytest.param(cut, id=name) for name, cut in cuts()])
def test_every_cut_pair_is_found_by_those_whom_the_first_doubts_have_ask(cut: set[Pair]) -> None:
    assert found_within_one_detection(cut) == cut
