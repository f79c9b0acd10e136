"""A node of the run that writes in another member's name: what it writes does not count, and the other is not kept out.

It has the token, so the MACs of its records verify; it lacks the key that the member's id carries.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
import redis
from tests.stores import SHARED, a_plan, a_verdict, commit_by, open_next, signing_stores

from zeroband.elastic.membership.ballots import vote_of
from zeroband.elastic.membership.keys import NodeKey, RunKey, is_signed
from zeroband.elastic.membership.orders import OperatorKey, ban, pause, resume, roll_back, unban
from zeroband.elastic.membership.records import LinkRates, Peer, Ready, RestartPoint, RoundPlan, StoreTerm
from zeroband.elastic.membership.resume_rules import Holding
from zeroband.elastic.membership.succession import MemberReport
from zeroband.elastic.store.backup import StoreBackup
from zeroband.elastic.store.fact_records import FactBatch
from zeroband.elastic.store.interface import record_of
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.observe.view import short_key

KEYS = {node: NodeKey(node.encode() * 32) for node in "abx"}
A, B, X = (KEYS[node].new_member_id(node) for node in "abx")
HONEST = {"a": A, "b": B}
READY = Ready(1, 8, "state")


@pytest.fixture
def stores(redis_url: str) -> Iterator[dict[str, RedisStore]]:
    """Stores by node; A and B are in round 1, and X has the token."""
    with signing_stores(redis_url, KEYS, HONEST) as opened:
        commit_by(opened, HONEST, a_verdict(opened["a"].signed(a_plan(A, B), A)))
        yield opened


def proposed(stores: dict[str, RedisStore]) -> RoundPlan:
    """Round 1 as member A proposes it."""
    return stores["a"].signed(a_plan(A, B, version=2, round=1), A)


def test_ready_and_vote_in_another_members_name_are_rejected_and_reported(stores: dict[str, RedisStore]) -> None:
    told: list[tuple[str, str]] = []
    stores["b"].verifier.on_forgery = lambda place, member: told.append((place, member))
    stores["x"].announce_ready(A, Ready(1, 10**9, "worse"))
    assert A not in stores["b"].view(1).ready
    plan = proposed(stores)
    assert open_next(stores["b"], plan)
    stores["x"].vote(plan, A, "worse")
    assert stores["b"].view(1).votes == {}
    assert told == [(f"{stores['b'].keys.ready(1)} {A}", A), (f"{stores['b'].keys.votes} {A}", A)]


def test_member_overwrites_a_record_forged_in_its_name(stores: dict[str, RedisStore]) -> None:
    """The first record counts, if that member signed it."""
    stores["x"].announce_ready(A, Ready(1, 10**9, "worse"))
    view = stores["a"].announce_ready(A, READY)
    known = StoreBackup(A, record_of(SHARED), view.plan, view.committed, ready=READY)
    assert A not in view.ready
    stores["a"].restore(known)
    assert all(store.view(1).ready[A] == READY for store in stores.values())


def test_plan_needs_the_signature_of_its_proposer(stores: dict[str, RedisStore]) -> None:
    told: list[str] = []
    stores["b"].verifier.on_forgery = lambda place, member: told.append(member)
    forged = stores["x"].signed(a_plan(A, B, version=2, round=1), A)
    nobodys = replace(forged, proposer="", signature="")
    changed = replace(proposed(stores), weights=(1, 0))
    for plan in (forged, nobodys, changed):
        before = stores["x"].view(1).plan
        assert stores["x"].propose_plan(plan, current=before)
        assert stores["b"].view(1).plan is None
    assert {*told} <= {A, ""} and told[0] == A
    assert open_next(stores["a"], proposed(stores)) and stores["b"].view(1).plan == proposed(stores)


def test_failure_needs_the_signature_of_a_listed_member(stores: dict[str, RedisStore]) -> None:
    plan = proposed(stores)
    assert open_next(stores["a"], plan)
    stores["x"].announce_ready(X, READY)
    stores["x"].report_failure(plan, "stop")
    assert stores["a"].view(1).failed is None
    stores["a"].announce_ready(A, READY)
    stores["a"].report_failure(plan, f"{B}: stop")
    assert {store.view(1).failed for store in stores.values()} == {None}
    stores["a"].report_failure(plan, f"{A}: lost")
    assert {store.view(1).failed for store in stores.values()} == {f"{A}: lost"}


def test_peer_links_holding_report_and_leaving_in_another_members_name_are_rejected(
    stores: dict[str, RedisStore],
) -> None:
    stores["x"].renew_lease(A, Peer("a", "elsewhere", 2, True))
    stores["x"].publish_links(A, LinkRates({B: 1}))
    stores["x"].publish_holding(A, Holding())
    stores["x"].announce_leaving(A)
    member_report = MemberReport((StoreTerm(1, "s"),), StoreTerm(1, "s"))
    stores["x"].probe(A, member_report)
    b = stores["b"]
    assert A not in b.view(1).peers and b.links() == {} and b.holdings() == {}
    assert b.probe("", None).member_reports == {}
    assert b.announce_leaving(B) == {A}
    assert stores["a"].renew_lease(A, Peer("a", "host", 1, True)) is not None
    assert b.view(1).peers[A].host == "host"


def test_peer_that_names_another_node_than_its_member_id_is_rejected(stores: dict[str, RedisStore]) -> None:
    stores["x"].renew_lease(X, Peer("a", "host", 1, True), first=True)
    assert X not in stores["b"].view(1).peers


def test_checkpoint_messages_and_facts_need_the_key_of_their_node(stores: dict[str, RedisStore]) -> None:
    a, b, x = (stores[node] for node in "abx")
    b.view(1)  # so that it knows whose id is whose
    mine = KEYS["a"].name("a")
    x.publish_saving("attempt", mine, "forged", retry_s=5.0)
    assert b.saving("attempt", retry_s=5.0) == {}
    a.publish_saving("attempt", mine, "written", retry_s=5.0)
    x.publish_saving("attempt", KEYS["x"].name("a"), "of another key", retry_s=5.0)
    assert b.saving("attempt", retry_s=5.0) == {"a": "written"}
    x.append_facts(mine, "", FactBatch(), FactBatch())
    assert b.recorders() == {mine: None} and [entry.batch for entry in b.read_facts(mine, "")] == [None]


def test_name_without_a_key_is_rejected_by_nodes(stores: dict[str, RedisStore], redis_url: str) -> None:
    with closing(RedisStore(redis_url, "run", key=RunKey(b"k" * 32), lease_s=1000.0, retry_s=5.0)) as keyless:
        keyless.announce_ready("y#1", READY)
    assert stores["b"].view(1).ready == {}


def test_banned_member_is_excluded_until_readmitted(stores: dict[str, RedisStore]) -> None:
    for node, member in (("a", A), ("b", B)):
        stores[node].announce_ready(member, READY)
    plan = proposed(stores)
    assert open_next(stores["b"], plan)
    short = short_key(A)
    assert short is not None
    stores["x"].give_orders(lambda orders: ban(orders, short, [A, B]))
    for store in stores.values():
        view = store.view(1)
        assert view.alive == {B} and view.ready.keys() == view.peers.keys() == {B}
        assert view.lost(plan) == (A,) and view.orders.bans(A)
    stores["a"].report_failure(plan, "of a banned one")
    assert stores["b"].view(1).failed is None
    late = a_plan(A, B, version=3, round=1)
    assert not open_next(stores["b"], stores["b"].signed(late, B)), "it was made under older orders"
    late = replace(late, orders=1)
    assert open_next(stores["a"], stores["a"].signed(late, A)) and stores["b"].view(1).plan is None
    assert open_next(stores["b"], stores["b"].signed(late, B)) and stores["b"].view(1).plan is not None
    stores["x"].give_orders(lambda orders: unban(orders, "a"))
    assert stores["b"].view(1).alive == {A, B}


def test_record_is_verified_once(stores: dict[str, RedisStore], monkeypatch: pytest.MonkeyPatch) -> None:
    stores["a"].announce_ready(A, READY)
    stores["b"].view(1)
    verified: list[str] = []

    def count(name: str, said: bytes, signature: bytes) -> bool:
        verified.append(name)
        return is_signed(name, said, signature)

    monkeypatch.setattr("zeroband.elastic.membership.keys.is_signed", count)
    stores["b"].view(1)
    assert verified == []
    stores["b"].announce_ready(B, READY)
    assert verified == []  # its own
    stores["a"].view(1)
    assert {*verified} == {B}


def test_damaged_record_is_not_reported_as_forgery(stores: dict[str, RedisStore], redis_client: redis.Redis) -> None:
    told: list[str] = []
    stores["b"].verifier.on_forgery = lambda place, member: told.append(member)
    redis_client.hset(stores["b"].keys.ready(1), A, "nonsense")
    assert stores["b"].view(1).ready == {} and told == []


def test_verdict_without_its_members_votes_is_rejected(
    stores: dict[str, RedisStore], redis_client: redis.Redis
) -> None:
    """Neither one on the open round nor one on an invented plan."""
    plan = proposed(stores)
    assert open_next(stores["a"], plan)
    verdict, key = replace(a_verdict(plan), record={"n": 2}), stores["x"].keys.committed
    for node, member in (("a", A), ("b", B)):
        stores[node].announce_ready(member, READY)
        stores[node].expect_verdict(verdict)
        stores[node].vote(plan, member, vote_of(verdict))
    founded = stores["a"].view(1).committed
    assert founded is not None and founded == stores["b"].view(1).committed
    for forged in (
        replace(verdict, record={"n": 3}),
        replace(verdict, digest="another"),
        replace(verdict, plan=stores["x"].signed(a_plan(A, B, X, version=3, round=2), X)),
    ):
        redis_client.set(key, stores["x"].verifier.seal_verdict(forged))
        assert [stores[node].view(1).committed for node in "ab"] == [None] * 2
        stores["a"].restore(StoreBackup(A, record_of(SHARED), plan, founded, vote=(plan, vote_of(verdict))))
        assert [stores[node].view(1).committed for node in "ab"] == [founded] * 2
    redis_client.hset(stores["a"].keys.clock, "settling_until_ms", 0)
    assert stores["b"].propose_verdict(verdict) and stores["a"].view(1).committed == verdict


@pytest.mark.parametrize("is_open_again", [False, True])
def test_late_member_accepts_a_verdict_by_the_others_votes(stores: dict[str, RedisStore], is_open_again: bool) -> None:
    late = stores["a"].signed(a_plan(A, version=2, round=1, late=(B,)), A)
    assert open_next(stores["a"], late)
    stores["b"].announce_ready(B, READY)
    founded, verdict = stores["b"].view(1).committed, replace(a_verdict(late), record={"n": 2})
    stores["a"].expect_verdict(verdict)
    assert stores["a"].propose_verdict(verdict)
    if not is_open_again:
        view = stores["b"].view(1)
        assert view.committed == founded and view.is_settling
    stores["a"].vote(late, A, vote_of(verdict))
    if is_open_again:
        assert open_next(stores["a"], stores["a"].signed(a_plan(A, version=3, round=2, late=(B,)), A))
    view = stores["b"].view(1)
    assert view.committed == verdict and not view.is_settling


# -- one member against the others ------------------------------------------------------------------------------------

C = KEYS["x"].new_member_id("x")
LIAR = {"x": C}


def renews(store: RedisStore, node: str, member: str) -> bool:
    return store.renew_lease(member, Peer(node, "host", 1, True)) is not None


@pytest.fixture
def three(stores: dict[str, RedisStore]) -> dict[str, RedisStore]:
    """A, B and the liar C are in round 1; A and B are ready for the next."""
    assert stores["x"].renew_lease(C, Peer("x", "host", 1, True), first=True) is not None
    plan = stores["a"].signed(a_plan(A, B, C, version=2, round=1), A)
    for node, member in (HONEST | LIAR).items():
        stores[node].announce_ready(member, READY)
    verdict = commit_by(stores, HONEST | LIAR, a_verdict(plan))
    for node, member in HONEST.items():
        assert stores[node].announce_ready(member, replace(READY, round=2)).committed == verdict
    return stores


def go_on_alone(stores: dict[str, RedisStore], *with_joiners: str) -> RoundPlan:
    """Let C open round 2 without A and B, vote for anything, and commit it."""
    plan = stores["x"].signed(a_plan(C, *with_joiners, version=3, round=2), C)
    commit_by(stores, LIAR, replace(a_verdict(plan, digest="made up"), record={"n": 7}))
    return plan


@pytest.mark.parametrize("joiners", [(), ("y#1",)], ids=["alone", "with a joiner of its own"])
def test_round_committed_by_one_member_without_the_living_others_is_rejected(
    three: dict[str, RedisStore], redis_client: redis.Redis, joiners: tuple[str, ...]
) -> None:
    """The others report who opened it, overwrite it, and commit that round themselves."""
    told: list[RoundPlan] = []
    three["b"].on_left_out = told.append
    before = three["b"].view(2)
    taken = go_on_alone(three, *joiners)
    for node in "ab":
        view = three[node].view(2)
        assert view.plan is None and view.committed is None
    assert told and {plan.proposer for plan in told} == {C} and told[0] == taken
    assert before.plan is not None and before.committed is not None
    for node, member in HONEST.items():
        ready = replace(READY, round=2)
        three[node].restore(StoreBackup(member, record_of(SHARED), before.plan, before.committed, ready=ready))
    redis_client.hset(three["a"].keys.clock, "settling_until_ms", 0)
    assert [three[node].view(2).committed for node in "ab"] == [before.committed] * 2
    plan = three["a"].signed(a_plan(A, B, version=3, round=2), A)
    assert open_next(three["a"], plan) and three["b"].view(2).plan == plan
    verdict = a_verdict(plan)
    for node, member in HONEST.items():
        three[node].expect_verdict(verdict)
        three[node].vote(plan, member, vote_of(verdict))
    assert three["a"].propose_verdict(verdict)
    assert three["b"].history()[1:] == [before.committed, verdict], "what they wrote over is no round of the run"


def test_deleted_lease_is_acquired_again_by_its_member(three: dict[str, RedisStore], redis_client: redis.Redis) -> None:
    """C removes their leases and continues: until they renew, nothing is decided; then C's round is rejected."""
    assert all(renews(three[node], node, member) for node, member in HONEST.items())
    redis_client.zrem(three["a"].keys.leases, A, B)
    go_on_alone(three)
    seen = three["a"].view(2)
    assert seen.is_settling and seen.plan is None and seen.committed is not None and seen.committed.round == 1
    assert all(renews(three[node], node, member) for node, member in HONEST.items())
    assert [three[node].view(2).committed for node in "ab"] == [None, None]


def test_expired_leases_are_refused_once_another_member_continued(
    three: dict[str, RedisStore], redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(renews(three[node], node, member) for node, member in HONEST.items())
    for node, member in HONEST.items():
        three["x"].expire_lease(member)
        monkeypatch.setattr(three[node], "_renewed_ms", 0)  # long before now
    go_on_alone(three)
    assert not any(renews(three[node], node, member) for node, member in HONEST.items())


def test_joiner_accepts_a_verdict_only_with_the_votes_of_most_members(
    three: dict[str, RedisStore], redis_client: redis.Redis, redis_url: str
) -> None:
    """C wrote it in all names; a tool shows it anyway, and members overwrite it."""
    seen = three["a"].view(2)
    assert seen.committed is not None
    plan = three["x"].signed(a_plan(A, B, C, version=3, round=2), C)
    forged = replace(a_verdict(plan, digest="made up"), record={"n": 7})
    honest = redis_client.get(three["x"].keys.committed)
    redis_client.set(three["x"].keys.committed, three["x"].verifier.seal_verdict(forged))
    redis_client.hset(three["x"].keys.votes, C, three["x"].verifier.seal_vote(C, plan, vote_of(forged)))
    joiner = RunKey(b"k" * 32, NodeKey.new())
    with closing(RedisStore(redis_url, "run", key=joiner, lease_s=1000.0, retry_s=5.0)) as store:
        view = store.view(0)
        assert view.committed is None and view.is_settling
        redis_client.set(three["x"].keys.committed, honest or b"")
        view = store.view(0)
        assert view.committed == seen.committed and not view.is_settling
    with closing(RedisStore(redis_url, "run", key=RunKey(b"k" * 32), retry_s=5.0)) as tool:
        assert tool.view(0).committed == seen.committed


def test_orders_without_the_operators_signature_are_rejected(three: dict[str, RedisStore]) -> None:
    """Members restore the operator's, which stay in force meanwhile."""
    operator = OperatorKey("of the operator alone", "run")
    for node in "ab":
        three[node].take_orders_of(operator.public, "run", None)
    three["x"].give_orders(pause)
    assert not three["a"].view(2).orders.is_paused
    three["x"].operator = operator
    ordered = three["x"].give_orders(pause)
    assert [three[node].view(2).orders for node in "ab"] == [ordered, ordered] and ordered.is_paused
    three["x"].operator = None
    for change in (resume, lambda given: roll_back(given, 5, [5]), lambda given: ban(given, "a", [A])):
        three["x"].give_orders(change)
        seen = three["a"].view(2)
        assert replace(seen.orders, version=ordered.version) == ordered and seen.orders.version < ordered.version
        assert A in seen.alive
        three["a"].restore(StoreBackup(A, record_of(SHARED), seen.plan, seen.committed, orders=ordered))
        assert {store.view(2).orders for store in three.values()} == {ordered}


def test_restart_point_is_void_for_living_members(three: dict[str, RedisStore]) -> None:
    view = three["x"].view(2)
    assert view.committed is not None
    again = RestartPoint(2, 0, "made up", C, view.committed.sessions)
    assert three["x"].propose_restart_point(again, view)
    assert [three[node].view(2).restart_point for node in "ab"] == [None, None]
