"""Who dials whom, and through whom."""

from __future__ import annotations

from itertools import permutations

import pytest

from zeroband.elastic.membership.reach import (
    INBOUND_ONLY,
    MAX_RELAYS,
    DialRoute,
    choose_relays,
    dials,
    is_dial_out_only,
    neighbours,
    probe_routes,
    probers,
    routes_to,
)
from zeroband.elastic.membership.records import Peer

A, B, C, D = "a#1", "b#1", "c#1", "d#1"


def peer(member: str, *, undialled: tuple[str, ...] = (), relays: tuple[str, ...] = ()) -> Peer:
    return Peer(member[0], f"host-{member[0]}", 1, True, undialled=undialled, relays=relays)


PEERS = {A: peer(A, undialled=(C,)), B: peer(B), C: peer(C, relays=(A, B)), D: peer(D, relays=(B,))}


@pytest.mark.parametrize("dial_out_only", [(), (A,), (B,), (A, B)])
def test_exactly_one_of_two_dials_and_that_is_one_who_can(dial_out_only: tuple[str, ...]) -> None:
    who = [own for own, other in permutations((A, B), 2) if dials(own, other, dial_out_only)]
    assert who == [B if dial_out_only == (B,) else A]


def test_member_is_behind_where_somebody_cannot_dial_it_or_others_take_its_calls() -> None:
    assert [member for member in PEERS if is_dial_out_only(member, PEERS)] == [C, D]
    assert is_dial_out_only(B, {A: peer(A, undialled=(B,)), B: peer(B)})


def test_ways_lead_to_the_address_first_and_then_through_those_that_take_calls() -> None:
    through_a, through_b = DialRoute("host-a", 1, A), DialRoute("host-b", 1, B)
    assert routes_to(B, A, PEERS) == (DialRoute("host-a", 1),)
    assert routes_to(D, C, PEERS) == (DialRoute("host-c", 1), through_a, through_b)
    assert routes_to(A, C, PEERS) == (through_a, through_b), "it has found that the address takes no connection"
    assert routes_to(D, C, {m: p for m, p in PEERS.items() if m != A}) == (DialRoute("host-c", 1), through_b)


def test_member_that_only_dials_is_heard_by_those_it_can_dial_and_asked_by_others_like_it() -> None:
    assert probe_routes(A, C, PEERS, is_own_dial_out_only=False) == INBOUND_ONLY
    assert probe_routes(D, C, PEERS, is_own_dial_out_only=True) == routes_to(D, C, PEERS)
    assert probe_routes(C, A, PEERS, is_own_dial_out_only=True) == (DialRoute("host-a", 1),)


def test_lines_go_to_members_that_can_be_dialled_stay_and_are_replaced() -> None:
    reached = {A: 0, B: 0, D: 0}
    first = choose_relays(C, (), reached, PEERS)
    assert set(first) == {A, B} and len(first) == MAX_RELAYS
    assert choose_relays(C, first[::-1], reached, PEERS) == first[::-1], "those that serve stay"
    assert choose_relays(C, first, {B: 0, D: 0}, PEERS) == (B,)
    assert choose_relays(C, first, {D: 0}, PEERS) == ()


def test_line_that_is_much_slower_than_another_comes_after_it() -> None:
    assert choose_relays(C, (A,), {A: 10, B: 100}, PEERS) == (B, A)
    assert choose_relays(C, (A,), {A: 60, B: 100}, PEERS) == (A, B)
    third = {**PEERS, "e#1": peer("e#1")}
    assert set(choose_relays(C, (A, B), {A: 10, B: 100, "e#1": 0}, third)) == {B, "e#1"}


def test_lines_of_many_members_are_spread() -> None:
    relays = {f"r{n}#1": peer(f"r{n}#1") for n in range(4)}
    firsts = [choose_relays(f"m{n}#1", (), dict.fromkeys(relays, 0), relays)[0] for n in range(64)]
    assert {relay: firsts.count(relay) for relay in relays} == pytest.approx(dict.fromkeys(relays, 16), abs=10)


@pytest.mark.parametrize("count", [5, 40])
def test_askers_are_those_that_have_one_as_their_neighbour(count: int) -> None:
    members = [f"m{n}#1" for n in range(count)]
    for own in members:
        assert probers(own, members) == {m for m in members if own in neighbours(m, members)}
