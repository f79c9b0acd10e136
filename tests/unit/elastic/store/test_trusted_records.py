"""Signatures that a member does not verify while nothing is disputed, on a real Redis; and that it does otherwise.

A, B and C committed the round before; X has the token, and writes in the names of others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import redis
from tests.stores import a_plan, a_verdict, commit_by, signing_stores

from zeroband.elastic.membership.ballots import vote_of
from zeroband.elastic.membership.keys import NodeKey, RunKey, is_signed
from zeroband.elastic.membership.records import Blame, Peer, Ready, RoundPlan, View
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.elastic.store.seals import Seals

KEYS = {node: NodeKey(node.encode() * 32) for node in "abcx"}
A, B, C, X = (KEYS[node].new_member_id(node) for node in "abcx")
MEMBERS = {"a": A, "b": B, "c": C}
READY = Ready(2, 8, "state", 1, 1)
BLAME = Blame((B,), "why", True, "out", 1)
Stores = dict[str, RedisStore]


@pytest.fixture(autouse=True)
def draw(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the random draw; by default there are no spot checks."""

    def is_now(value: float) -> None:
        monkeypatch.setattr("zeroband.elastic.store.record_verifier.random.random", lambda: value)

    is_now(1.0)
    return is_now


def opened(version: int, round: int, *members: str) -> RoundPlan:
    return replace(a_plan(*members, version=version, round=round), weights=(8,) * len(members))


@pytest.fixture
def stores(redis_url: str) -> Iterator[Stores]:
    """Stores by node. Round 1 is committed, and round 2 has no records."""
    with signing_stores(redis_url, KEYS, MEMBERS) as stores:
        for version, round in ((1, 0), (2, 1)):
            commit_by(stores, MEMBERS, a_verdict(stores["a"].signed(opened(version, round, A, B, C), A)))
        yield stores


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Members whose signatures were verified since."""
    found: list[str] = []

    def count(name: str, said: bytes, signature: bytes) -> bool:
        found.append(name)
        return is_signed(name, said, signature)

    monkeypatch.setattr("zeroband.elastic.membership.keys.is_signed", count)
    return found


def watch(stores: Stores, node: str) -> list[tuple[str, str]]:
    told: list[tuple[str, str]] = []
    stores[node].verifier.on_forgery = lambda place, member: told.append((place, member))
    return told


def look(store: RedisStore, round: int = 2) -> View:
    """Read like a member that is about to propose."""
    return store.await_change(round, None, within_s=0.0, whole=True)


def propose(store: RedisStore, plan: RoundPlan) -> bool:
    return store.propose_plan(plan, current=look(store, plan.round).plan)


def say_ready(stores: Stores, *nodes: str) -> None:
    for node in nodes:
        stores[node].announce_ready(MEMBERS[node], READY, enough=3)


def test_member_verifies_no_signature_of_an_undisputed_round(stores: Stores, verified: list[str]) -> None:
    say_ready(stores, "a", "b", "c")
    plan = stores["c"].signed(opened(3, 2, A, B, C), C)
    seen = look(stores["c"])
    assert {*seen.ready} == {A, B, C} and not seen.is_proven
    assert propose(stores["c"], plan)
    assert [look(stores[node]).plan for node in "abc"] == [plan] * 3
    verdict = a_verdict(plan)
    for node, member in MEMBERS.items():
        stores[node].expect_verdict(verdict)
        stores[node].vote(plan, member, vote_of(verdict))
    assert look(stores["c"]).votes == dict.fromkeys((A, B, C), vote_of(verdict))
    assert stores["c"].propose_verdict(verdict)
    assert [look(stores[node]).committed for node in "abc"] == [verdict] * 3
    assert verified == []


def test_view_verifies_all_trusted_records(stores: Stores, verified: list[str]) -> None:
    say_ready(stores, "a", "b", "c")
    plan = stores["b"].signed(opened(3, 2, A, B, C), B)
    assert propose(stores["b"], plan)
    stores["b"].vote(plan, B, "d")
    assert not look(stores["c"]).is_proven
    view = stores["c"].view(2)
    assert view.is_proven and {*verified} == {A, B} and view.votes == {B: "d"}
    assert look(stores["c"]).is_proven and len(verified) == 4, "ready of A and B, the plan, the vote of B"


def test_forged_trusted_record_is_rejected_once_verified(stores: Stores) -> None:
    told = watch(stores, "c")
    stores["x"].announce_ready(A, replace(READY, weight=7))
    say_ready(stores, "b", "c")
    assert look(stores["c"]).ready[A].weight == 7
    view = stores["c"].view(2)
    assert {*view.ready} == {B, C} and view.refused == {}
    assert told == [(f"{stores['c'].keys.ready(2)} {A}", A)]


def test_malformed_forged_record_is_not_blamed_on_its_member(stores: Stores) -> None:
    """Its member is not refused."""
    told = watch(stores, "b")
    say_ready(stores, "b")
    stores["x"].announce_ready(A, replace(READY, weight=-1))
    view = look(stores["b"])
    assert {*view.ready} == {B} and view.refused == {} and [member for _, member in told] == [A]


def test_member_notices_at_once_that_its_own_record_was_overwritten(stores: Stores, redis_client: redis.Redis) -> None:
    told = watch(stores, "a")
    say_ready(stores, "a", "b", "c")
    assert A in look(stores["a"]).ready
    forged = stores["x"].verifier.seal_ready(A, replace(READY, weight=7))
    redis_client.hset(stores["a"].keys.ready(2), A, forged)
    assert A not in look(stores["a"]).ready and [member for _, member in told] == [A]


def test_plan_forged_in_a_members_name_is_rejected_and_overwritten_by_it(stores: Stores) -> None:
    say_ready(stores, "a", "b", "c")
    forged = stores["x"].signed(replace(opened(3, 2, A, B, C), steps_requested=(5, 5, 5)), A)
    assert stores["x"].propose_plan(forged, current=stores["x"].view(2).plan)
    told = watch(stores, "a")
    assert look(stores["b"]).plan == forged
    assert look(stores["a"]).plan is None and [member for _, member in told] == [A]
    own = stores["a"].signed(opened(3, 2, A, B, C), A)
    assert stores["a"].propose_plan(own, current=None)
    assert [look(stores[node]).plan for node in "abc"] == [own] * 3


def test_plan_forged_in_anothers_name_is_rejected_once_verified(stores: Stores) -> None:
    say_ready(stores, "a", "b", "c")
    forged = stores["x"].signed(opened(3, 2, A, B, C), A)
    assert stores["x"].propose_plan(forged, current=stores["x"].view(2).plan)
    told = watch(stores, "b")
    assert look(stores["b"]).plan == forged and not look(stores["b"]).is_proven
    assert stores["b"].view(2).plan is None and [member for _, member in told] == [A]


@pytest.mark.parametrize(
    "changes",
    [{"proposer": X}, {"retries": 1}, {"rollback": 5}, {"weights": (0, 8, 8)}, {"blames": (BLAME,)}],
    ids=["of a stranger", "opened again", "goes back", "of one that sends nothing", "says who is at fault"],
)
def test_plan_that_is_not_usual_is_verified(stores: Stores, changes: dict[str, Any]) -> None:
    say_ready(stores, "a", "b", "c")
    forged = replace(stores["x"].signed(replace(opened(3, 2, A, B, C), **changes), A), **changes)
    assert stores["x"].propose_plan(forged, current=stores["x"].view(2).plan)
    assert look(stores["b"]).plan is None


@pytest.mark.parametrize("said", [replace(READY, weight=0), replace(READY, gains=(0.5,))], ids=["nothing", "gains"])
def test_ready_record_of_a_dispensable_member_is_verified(stores: Stores, said: Ready) -> None:
    say_ready(stores, "b")
    stores["x"].announce_ready(A, said)
    assert {*look(stores["b"]).ready} == {B}


def test_ready_record_of_a_new_member_is_verified(stores: Stores) -> None:
    name = NodeKey.new().new_member_id("d")
    say_ready(stores, "b")
    stores["x"].announce_ready(name, READY)
    assert {*look(stores["b"]).ready} == {B}


def test_joiner_verifies_all_records(stores: Stores) -> None:
    joiner = NodeKey.new()
    name = joiner.new_member_id("d")
    stores["x"].announce_ready(A, READY)
    key = RunKey(b"k" * 32, joiner)
    with closing(RedisStore(stores["b"].address, "run", key=key, lease_s=1000.0, retry_s=5.0)) as store:
        store.announce_ready(name, READY, enough=3)
        assert {*look(store).ready} == {name}


def test_every_signature_is_verified_after_a_forgery(stores: Stores) -> None:
    say_ready(stores, "b")
    stores["x"].renew_lease(A, Peer("a", "elsewhere", 2, True))
    look(stores["b"])
    stores["x"].announce_ready(A, READY)
    assert {*look(stores["b"]).ready} == {B}


def test_vote_of_a_dispensable_member_is_verified(stores: Stores) -> None:
    plan = stores["a"].signed(replace(opened(3, 2, A, B, C), weights=(8, 8, 0)), A)
    assert propose(stores["a"], plan)
    for member in (B, C):
        stores["x"].vote(plan, member, "d")
    assert look(stores["a"]).votes == {B: "d"}


def test_random_signatures_are_verified(stores: Stores, draw: Callable[[float], None]) -> None:
    stores["x"].announce_ready(A, READY)
    draw(0.03)
    assert look(stores["b"]).ready == {}


def test_excluded_member_verifies_the_others_states(stores: Stores) -> None:
    """C could exclude A by a forged record of B with another state."""
    say_ready(stores, "a")
    stores["x"].announce_ready(B, replace(READY, state_digest="another"))
    look(stores["a"])
    alone = stores["c"].signed(opened(3, 2, C), C)
    assert propose(stores["c"], alone)
    assert look(stores["a"]).plan is None


def test_address_of_a_member_is_signed_once(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    signed: list[str] = []
    seal = Seals.seal

    def count(self: Seals, text: str, *scope: str, **more: object) -> str:
        signed.append(scope[0])
        return seal(self, text, *scope, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Seals, "seal", count)
    for port in (2, 2, 3, 3):
        assert stores["a"].renew_lease(A, Peer("a", "host", port, True)) is not None
    assert signed == ["peer", "peer"] and stores["b"].view(2).peers[A].port == 3
