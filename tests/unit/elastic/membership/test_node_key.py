"""A node's own key, and the names that carry it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroband.elastic.membership.keys import NodeKey, RunKey, is_of_key, is_signed, node_name
from zeroband.elastic.membership.orders import Orders, ban, unban
from zeroband.elastic.membership.records import Peer, Ready, RoundPlan, Verdict, View
from zeroband.errors import ConfigError
from zeroband.observe.view import node_id_of_member, public_key_in, short_key

A, B, C = (NodeKey(bytes([at] * 32)) for at in range(3))
NODE_IDS = st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True)


@given(NODE_IDS, st.binary(min_size=32, max_size=32), st.binary())
def test_name_tells_node_and_key_and_verifies_what_that_node_signs(node_id: str, secret: bytes, said: bytes) -> None:
    key = NodeKey(secret)
    member = key.new_member_id(node_id)
    for name in (member, key.name(node_id)):
        assert node_id_of_member(name) == node_id and is_signed(name, said, key.sign(said))
        assert not is_signed(name, said + b".", key.sign(said)) and not is_signed(name, said, bytes(64))
    assert member != key.new_member_id(node_id) and node_name(member) == key.name(node_id)
    assert short_key(member) == (public_key_in(member) or b"")[:4].hex()


def test_key_pair_follows_from_its_secret() -> None:
    assert NodeKey(A.secret).public == A.public != B.public
    assert NodeKey.new() != NodeKey.new()
    assert str(A.secret) not in repr(A)


@pytest.mark.parametrize("name", ["", "a", "a#1", "a#1f2e3d4c", f"a#{'A' * 42}B", f"a#{'A' * 42}=", f"a#{'ä' * 43}"])
def test_name_without_a_key_is_nobodys(name: str) -> None:
    """The same bytes in another spelling are none either: a key has one name."""
    assert public_key_in(name) is None and short_key(name) is None and node_name(name) == name
    assert not is_signed(name, b"said", A.sign(b"said"))
    assert not RunKey(b"k" * 32, A).accepts(name, b"said", A.sign(b"said"))
    assert RunKey(b"k" * 32).accepts(name, b"said", b"")


def test_member_counts_by_its_key_alone() -> None:
    one, again = A.new_member_id("a"), A.new_member_id("a")
    assert is_of_key(one, again) and is_of_key(one, A.name("another")) and not is_of_key(one, B.new_member_id("a"))
    assert is_of_key("a#1", "a#1") and not is_of_key("a#1", "a#2") and not is_of_key("a#1", one)


# -- bans --------------------------------------------------------------------------------------------------------------

MEMBERS = (A.new_member_id("a"), B.new_member_id("b"))


def test_banned_key_is_banned_under_every_name_until_it_is_let_in_again() -> None:
    banned = ban(Orders(), "a", MEMBERS)
    assert banned == Orders(1, banned=(A.name("a"),))
    assert banned.bans(A.new_member_id("a")) and banned.bans(A.name("another")) and not banned.bans(MEMBERS[1])
    assert ban(banned, "a", MEMBERS) == banned
    assert unban(banned, "a") == unban(banned, short_key(MEMBERS[0]) or "") == Orders(2)


def test_node_that_is_not_there_cannot_be_banned_and_nodes_of_one_id_are_told_apart() -> None:
    with pytest.raises(
        ConfigError, match=f"no member of this run is node 'x'; there are a \\(key {short_key(MEMBERS[0])}\\)"
    ):
        ban(Orders(), "x", MEMBERS)
    with pytest.raises(ConfigError, match="node 'b' is not banned; these are: none"):
        unban(Orders(), "b")
    namesakes = (*MEMBERS, C.new_member_id("a"))
    with pytest.raises(ConfigError, match="node 'a' has had several keys in this run"):
        ban(Orders(), "a", namesakes)
    assert ban(Orders(), short_key(C.name("a")) or "", namesakes).banned == (C.name("a"),)


# -- what of a view counts ---------------------------------------------------------------------------------------------


def view_of(*members: str, listed: tuple[str, ...] = (), orders: Orders | None = None) -> View:
    plan = RoundPlan(1, 1, 0, listed, (0,) * len(listed)) if listed else None
    peers = {member: Peer(node_id_of_member(member), "host", 1, True) for member in members}
    ready, votes = {member: Ready(1, 1, "d") for member in members}, dict.fromkeys(members, "d")
    committed = None if plan is None else Verdict(plan, "d")
    return View(plan, committed, frozenset(members), ready, votes, None, peers, orders=orders or Orders())


def test_banned_member_is_in_no_part_of_a_view() -> None:
    orders = Orders(1, banned=(A.name("a"),))
    view = view_of(*MEMBERS, listed=MEMBERS, orders=orders).counted()
    assert view == replace(view_of(MEMBERS[1], listed=MEMBERS, orders=orders))
    assert view.plan is not None and view.lost(view.plan) == (MEMBERS[0],)


def test_view_of_members_that_count_is_the_same_object() -> None:
    view = view_of(*MEMBERS)
    assert view.counted() is view


def test_of_two_living_nodes_with_one_id_the_one_in_the_run_counts() -> None:
    first, second = sorted((A.new_member_id("a"), B.new_member_id("a")))
    assert view_of(first, second).counted().alive == {first}
    assert view_of(first, second, listed=(second,)).counted().alive == {second}
    gone = replace(view_of(first, second), alive=frozenset([second]))
    assert gone.counted() is gone


def test_node_that_is_back_before_its_old_lease_ends_counts_with_both() -> None:
    before, after = A.new_member_id("a"), A.new_member_id("a")
    view = view_of(before, after, listed=(before,))
    assert view.counted() is view
