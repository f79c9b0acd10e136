"""The store against a real Redis: what two writers may not both do, what is fenced, what is forgotten."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import redis

from zeroband.cluster import RedisServer
from zeroband.elastic.epoch import Opening, Ready, Verdict, View
from zeroband.elastic.store import HISTORY_LENGTH, Store, token_digest
from zeroband.errors import JoinRefused, StoreLost

A, B, C = "a#1", "b#1", "c#1"
LONG_S = 1000.0
SHARED = {"model.d_model": "256", "train.batch_size": "64"}


def an_opening(*members: str, version: int = 1, round: int = 0) -> Opening:
    return Opening(version, version, round, members, tuple(0 for _ in members))


def a_verdict(opening: Opening, digest: str = "d") -> Verdict:
    return Verdict(opening.round, opening.version, opening.epoch, opening.members, opening.weights, digest, {"n": 1})


def hold(store: Store, *members: str) -> None:
    for member in members:
        assert store.renew_lease(member, lease_s=LONG_S, progress=0, first=True)


def expire(client: redis.Redis, store: Store, member: str) -> None:
    """What the passing of the lease does, without waiting for it."""
    assert client.delete(store.keys.lease(member)) == 1


def commit(store: Store, opening: Opening) -> None:
    assert store.propose_opening(opening) and store.propose_verdict(a_verdict(opening))


# -- proposals --------------------------------------------------------------------------------------------------------


def test_store_takes_one_of_many_simultaneous_proposals(open_store: Callable[..., Store]) -> None:
    racers = 4
    stores = [open_store() for _ in range(racers)]
    start = threading.Barrier(racers)
    opened: list[tuple[int, int]] = []
    committed: list[tuple[int, int]] = []

    def race(racer: int) -> None:
        for round in range(25):
            opening = Opening(round + 1, 1, round, (f"racer#{racer}",), (0,))
            start.wait()
            if stores[racer].propose_opening(opening):
                opened.append((round, racer))
            start.wait()
            if stores[racer].propose_verdict(a_verdict(opening, digest=str(racer))):
                committed.append((round, racer))

    threads = [threading.Thread(target=race, args=(racer,)) for racer in range(racers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert [round for round, _ in opened] == list(range(25))
    assert [round for round, _ in committed] == list(range(25))
    assert [v.round for v in stores[0].history()] == list(range(25))


def test_opening_must_follow_the_current_one(store: Store) -> None:
    assert store.propose_opening(an_opening(A))
    assert not store.propose_opening(an_opening(B))
    assert not store.propose_opening(an_opening(B, version=3))
    assert store.propose_opening(an_opening(A, B, version=2))
    assert store.view(0).opening == an_opening(A, B, version=2)


def test_opening_of_a_committed_round_is_refused(store: Store) -> None:
    commit(store, an_opening(A))
    assert not store.propose_opening(an_opening(A, version=2))
    assert store.propose_opening(an_opening(A, version=2, round=1))


def test_verdict_of_a_superseded_opening_is_refused(store: Store) -> None:
    assert store.propose_opening(an_opening(A, B)) and store.propose_opening(an_opening(A, version=2))
    assert not store.propose_verdict(a_verdict(an_opening(A, B)))
    assert store.view(0).committed is None


def test_verdict_is_written_once(store: Store) -> None:
    commit(store, an_opening(A))
    assert not store.propose_verdict(a_verdict(an_opening(A), digest="another"))
    assert store.view(0).committed == a_verdict(an_opening(A))


def test_verdict_without_an_opening_is_refused(store: Store) -> None:
    assert not store.propose_verdict(a_verdict(an_opening(A)))


def test_failed_opening_can_not_be_committed_any_more(store: Store) -> None:
    """Who saw a failure has dropped the result: the others must not be able to commit it behind its back."""
    assert store.propose_opening(an_opening(A, B))
    assert store.report_failure(1, "b#1 lost")
    assert not store.propose_verdict(a_verdict(an_opening(A, B)))
    assert store.view(0).failed == "b#1 lost"


def test_committed_opening_can_not_fail_any_more(store: Store) -> None:
    commit(store, an_opening(A, B))
    assert not store.report_failure(1, "b#1 lost")
    assert store.view(0).failed is None


def test_first_reason_of_a_failure_stays(store: Store) -> None:
    store.propose_opening(an_opening(A))
    assert store.report_failure(1, "first") and store.report_failure(1, "second")
    assert store.view(0).failed == "first"


def test_first_vote_and_first_word_of_a_member_count(store: Store) -> None:
    store.propose_opening(an_opening(A))
    for digest, weight in (("first", 1), ("second", 2)):
        store.vote(1, A, digest)
        store.announce_ready(A, Ready(0, weight, "s"))
    view = store.view(0)
    assert view.votes == {A: "first"} and view.ready == {A: Ready(0, 1, "s")}


def test_view_shows_votes_and_failure_of_the_current_opening_only(store: Store) -> None:
    store.propose_opening(an_opening(A, B))
    store.vote(1, A, "old")
    store.report_failure(1, "old")
    store.propose_opening(an_opening(A, version=2))
    view = store.view(0)
    assert view.votes == {} and view.failed is None


def test_view_shows_who_is_ready_for_the_round_that_was_asked_for(store: Store) -> None:
    store.announce_ready(A, Ready(1, 5, "s"))
    assert store.view(1).ready == {A: Ready(1, 5, "s")} and store.view(2).ready == {}


def test_history_is_bounded_and_oldest_first(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroband.elastic.store.HISTORY_LENGTH", 3)
    for round in range(5):
        commit(store, an_opening(A, version=round + 1, round=round))
    assert [verdict.round for verdict in store.history()] == [2, 3, 4] and HISTORY_LENGTH > 3


def test_runs_on_one_server_do_not_see_each_other(open_store: Callable[..., Store]) -> None:
    hold(open_store("one"), A)
    assert open_store("two").view(0).alive == frozenset()


# -- leases -----------------------------------------------------------------------------------------------------------


def test_lease_makes_alive_and_its_release_ends_that(store: Store) -> None:
    hold(store, A)
    store.describe_member(A, {"port": 1})
    assert store.view(0).alive == {A} and store.members_info() == {A: {"port": 1}}
    store.release_lease(A)
    assert store.view(0).alive == frozenset() and store.members_info() == {}


def test_lease_runs_out_by_the_clock_of_the_store_alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A predecessor compared the wall clocks of two hosts: 10 s of skew killed healthy nodes."""
    monkeypatch.setattr(time, "time", lambda: 0.0)
    store.renew_lease(A, lease_s=LONG_S, progress=0, first=True)
    monkeypatch.setattr(time, "time", lambda: 1e12)
    store.renew_lease(B, lease_s=LONG_S, progress=0, first=True)
    assert store.view(0).alive == {A, B}


def test_lease_carries_its_life_and_the_progress(store: Store, redis_client: redis.Redis) -> None:
    store.renew_lease(A, lease_s=20.0, progress=41, first=True)
    assert redis_client.get(store.keys.lease(A)) == b"41"
    assert 19_000 < redis_client.pttl(store.keys.lease(A)) <= 20_000


def test_lease_that_ran_out_returns_while_nothing_was_decided(store: Store, redis_client: redis.Redis) -> None:
    hold(store, A)
    expire(redis_client, store, A)
    assert store.renew_lease(A, lease_s=LONG_S, progress=0)
    assert store.view(0).alive == {A}


def test_lease_that_ran_out_returns_to_a_member_of_the_opening(store: Store, redis_client: redis.Redis) -> None:
    hold(store, A, B)
    commit(store, an_opening(A))
    store.propose_opening(an_opening(A, B, version=2, round=1))
    expire(redis_client, store, B)
    assert store.renew_lease(B, lease_s=LONG_S, progress=0)


def test_lease_that_ran_out_is_refused_once_a_round_was_opened_without_it(
    store: Store, redis_client: redis.Redis
) -> None:
    hold(store, A, B)
    commit(store, an_opening(A, B))
    expire(redis_client, store, B)
    store.propose_opening(an_opening(A, version=2, round=1))
    assert not store.renew_lease(B, lease_s=LONG_S, progress=0)
    assert store.view(1).alive == {A}


def test_lease_that_holds_is_renewed_even_if_a_round_was_opened_without_it(store: Store) -> None:
    hold(store, A, B)
    store.propose_opening(an_opening(A))
    assert store.renew_lease(B, lease_s=LONG_S, progress=0)


def test_new_member_of_the_same_node_is_not_fenced(store: Store, redis_client: redis.Redis) -> None:
    hold(store, A, B)
    expire(redis_client, store, B)
    store.propose_opening(an_opening(A))
    assert not store.renew_lease("b#1", lease_s=LONG_S, progress=0)
    assert store.renew_lease("b#2", lease_s=LONG_S, progress=0, first=True)
    assert store.view(0).alive == {A, "b#2"}


def test_commit_forgets_the_dead_that_can_not_return(store: Store, redis_client: redis.Redis) -> None:
    """Weeks of crashes must not make every look at the store longer."""
    joiner = "j#1"
    hold(store, A, B, C, joiner)
    for member in (A, B, C, joiner):
        store.describe_member(member, {"port": 1})
    for member in (B, C):
        expire(redis_client, store, member)
    commit(store, an_opening(A, B))
    assert set(store.members_info()) == {A, B, joiner}
    assert redis_client.smembers(store.keys.present) == {m.encode() for m in (A, B, joiner)}


def test_every_key_has_a_life(store: Store, redis_client: redis.Redis) -> None:
    store.found_or_match(SHARED, "secret")
    hold(store, A, B)
    store.describe_member(A, {"port": 1})
    store.announce_ready(A, Ready(0, 1, "s"))
    opening = an_opening(A, B)
    store.propose_opening(opening)
    store.vote(1, A, "d")
    store.propose_verdict(a_verdict(opening))
    store.propose_opening(an_opening(A, B, version=2, round=1))
    store.report_failure(2, "a lane broke")
    store.group_set(store.keys.group(1, 0), b"x")
    store.group_add(store.keys.group(1, 1), 1)
    lives = {key.decode(): redis_client.ttl(key) for key in redis_client.scan_iter()}
    assert len(lives) == 13
    assert {key: life for key, life in lives.items() if life <= 0} == {}
    assert all(key.startswith("zeroband:{run}") for key in lives)


# -- joining ----------------------------------------------------------------------------------------------------------


def test_equal_nodes_may_join(open_store: Callable[..., Store]) -> None:
    open_store().found_or_match(SHARED, "secret")
    open_store().found_or_match(dict(reversed(SHARED.items())), "secret")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (SHARED, {**SHARED, "model.d_model": "512"}),
        ({k: v for k, v in SHARED.items() if k != "model.d_model"}, {**SHARED, "model.d_model": "512"}),
    ],
    ids=["differs", "is new here"],
)
def test_refusal_names_the_key_that_differs(store: Store, theirs: dict[str, str], ours: dict[str, str]) -> None:
    store.found_or_match(theirs, None)
    with pytest.raises(JoinRefused) as refused:
        store.found_or_match(ours, None)
    assert refused.value.key == "model.d_model" and refused.value.ours == "512"


def test_refusal_names_a_key_that_only_the_run_has(store: Store) -> None:
    store.found_or_match(SHARED, None)
    with pytest.raises(JoinRefused) as refused:
        store.found_or_match({"train.batch_size": "64"}, None)
    assert (refused.value.key, refused.value.theirs, refused.value.ours) == ("model.d_model", "256", "absent")


def test_refusal_leaves_the_record_as_it_was(store: Store, redis_client: redis.Redis) -> None:
    store.found_or_match(SHARED, None)
    before = redis_client.hgetall(store.keys.run)
    with pytest.raises(JoinRefused):
        store.found_or_match({**SHARED, "model.d_model": "512", "new": "1"}, None)
    assert redis_client.hgetall(store.keys.run) == before


@pytest.mark.parametrize("token", ["a guess", None])
def test_wrong_token_is_refused_without_a_word_about_either(
    store: Store, redis_client: redis.Redis, token: str | None
) -> None:
    store.found_or_match(SHARED, "the secret")
    with pytest.raises(JoinRefused) as refused:
        store.found_or_match({**SHARED, "model.d_model": "512"}, token)
    assert refused.value.key == "run.token"
    told = f"{refused.value} {refused.value.theirs} {refused.value.ours}"
    assert not any(secret in told for secret in ("the secret", "a guess", token_digest("the secret")))
    assert b"the secret" not in b" ".join(redis_client.hvals(store.keys.run))


# -- a store that is not there ----------------------------------------------------------------------------------------


def test_store_lost_comes_after_patience_when_nobody_listens() -> None:
    store = Store("unix:///nowhere/redis.sock", "run", patience_s=0.1)
    from_s = time.monotonic()
    with pytest.raises(StoreLost, match=r"for 0\.1 s.*store\.url"):
        store.view(0)
    assert time.monotonic() - from_s < 1.0


def test_store_lost_comes_after_patience_when_the_server_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = Store(f"redis://127.0.0.1:{silent.getsockname()[1]}", "run", patience_s=0.1)
        from_s = time.monotonic()
        with pytest.raises(StoreLost):
            store.view(0)
        assert time.monotonic() - from_s < 1.0


def test_call_survives_connections_that_the_server_closes(store: Store, redis_client: redis.Redis) -> None:
    hold(store, A)
    for client in redis_client.client_list():
        if client["id"] != str(redis_client.client_id()):
            redis_client.client_kill_filter(_id=client["id"])
    assert store.view(0).alive == {A}


def test_scripts_are_loaded_again_into_a_server_that_lost_them(store: Store, redis_client: redis.Redis) -> None:
    hold(store, A)
    redis_client.script_flush()
    assert store.view(0).alive == {A}


def test_repeated_proposal_after_a_lost_reply_changes_nothing(store: Store) -> None:
    """A call whose reply was lost is sent again: refused, and the member finds its own proposal at its next look."""
    opening = an_opening(A)
    store.propose_opening(opening)
    assert not store.propose_opening(opening) and store.view(0).opening == opening
    store.propose_verdict(a_verdict(opening))
    assert not store.propose_verdict(replace(a_verdict(opening), payload={"n": 2}))
    assert store.view(0).committed == a_verdict(opening)


def test_call_waits_for_a_server_that_restarts() -> None:
    seen: list[View] = []
    with RedisServer() as server:
        store = Store(server.url, "run", patience_s=30.0)
        hold(store, A)
        server.stop()
        looking = threading.Thread(target=lambda: seen.append(store.view(0)))
        looking.start()
        server.start()
        looking.join(timeout=30)
        assert [view.alive for view in seen] == [frozenset()], "the server came back empty"
