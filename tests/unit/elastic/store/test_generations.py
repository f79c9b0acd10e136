"""A run of several stores uses one of them at a time, and what is of an older generation counts no more.

The stores that are not in use tell who comes to them where the run goes on, and members' own ones are gone to as well.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest
import redis
from tests.held_stores import HeldStore, open_at
from tests.stores import RUN_ID, SHARED, a_plan, a_verdict, hold

from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.membership.records import Peer, Ready, StoreTerm
from zeroband.elastic.membership.succession import ForwardPointer, MemberReport
from zeroband.elastic.store.backup import StoreBackup
from zeroband.elastic.store.local_server import RedisServer
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.errors import ConfigError, StoreLost

A, B = "a#1", "b#1"
KEY = RunKey.of("a token of the run", RUN_ID)
PLAN = a_plan(A, B)


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[RedisServer, RedisServer]]:
    with RedisServer() as one, RedisServer() as other:
        yield one, other


@pytest.fixture
def servers(both: tuple[RedisServer, RedisServer]) -> tuple[RedisServer, RedisServer]:
    """Two empty servers, which have other ids than before."""
    for server in both:
        if not server.is_running:
            server.start()
        with redis.Redis.from_url(server.url) as client:
            client.flushall()
    return both


def open_store(stack: ExitStack, *servers: RedisServer) -> RedisStore:
    store = RedisStore(" ".join(server.url for server in servers), RUN_ID, lease_s=2.0, retry_s=5.0)
    stack.callback(store.close)
    store.reach(retry_s=5.0)
    return store


@pytest.fixture
def store(stack: ExitStack, servers: tuple[RedisServer, RedisServer]) -> RedisStore:
    """The store of a run that A and B are about to found."""
    store = open_store(stack, *servers)
    store.found_or_match(SHARED)
    hold(store, A, B)
    return store


def older(store: RedisStore) -> StoreTerm:
    assert store.generation is not None
    return replace(store.generation, number=store.generation.number - 1)


def test_nodes_use_one_store_whatever_the_order_of_their_lists(
    stack: ExitStack, servers: tuple[RedisServer, RedisServer], store: RedisStore
) -> None:
    other = open_store(stack, *reversed(servers))
    assert store.generation is not None and store.generation.number == 1
    assert (other.generation, other.address) == (store.generation, store.address)
    assert other.view(0).alive == {A, B}


def test_records_of_an_older_generation_are_refused(store: RedisStore) -> None:
    old, now = older(store), store.generation
    assert not store.propose_plan(PLAN, current=None, generation=old)
    assert store.propose_plan(PLAN, current=None, generation=now)
    for member in (A, B):
        assert store.vote(PLAN, member, "d", generation=old).votes.get(member) is None
    assert store.view(0).votes == {}
    for member in (A, B):
        store.vote(PLAN, member, "d", generation=now)
    assert store.view(0).votes == {A: "d", B: "d"}
    assert not store.propose_verdict(a_verdict(PLAN), generation=old)
    assert store.propose_verdict(a_verdict(PLAN), generation=now)


def test_emptied_store_has_another_id(store: RedisStore) -> None:
    with redis.Redis.from_url(store.address) as client:
        client.flushall()
    (_, seen), (_, spare) = store.survey()
    assert store.generation is not None and seen.store != store.generation.store and seen.generation is None
    assert spare.generation is None and store.view(0).generation is None


def test_run_begins_only_if_all_its_stores_answer(stack: ExitStack, servers: tuple[RedisServer, RedisServer]) -> None:
    first, second = servers
    second.stop()
    store = RedisStore(f"{first.url} {second.url}", RUN_ID, lease_s=2.0, retry_s=1.0)
    stack.callback(store.close)
    with pytest.raises(StoreLost, match="1 of 2 do not answer"):
        store.reach(retry_s=1.0)


def test_nothing_is_restored_into_another_generation(store: RedisStore) -> None:
    known = StoreBackup(A, SHARED, ready=Ready(1, 8, "d"), generation=older(store))
    store.restore(known)
    assert store.view(1).ready == {}
    store.restore(replace(known, generation=store.generation))
    assert store.view(1).ready == {A: Ready(1, 8, "d")}


def test_node_founds_only_after_all_stores_were_unused_for_a_lease(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.monotonic()
    assert not store.may_found()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 60)
    assert store.may_found()


def test_node_founds_nothing_while_a_member_has_lost_its_store(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.generation is not None
    now_s = time.monotonic()
    store.survey(A, MemberReport((store.generation,), store.generation, a_verdict(PLAN)))
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 60)
    assert not store.may_found()


def test_of_two_runs_begun_at_once_the_founded_one_continues(
    stack: ExitStack, servers: tuple[RedisServer, RedisServer], store: RedisStore
) -> None:
    """Their lists have another order, and each probed before the other began."""
    (_, _), (spare, seen) = store.survey()
    spare.begin(StoreTerm(1, seen.store), None)
    assert store.propose_plan(PLAN, current=None, generation=store.generation)
    assert store.propose_verdict(a_verdict(PLAN), generation=store.generation)
    assert open_store(stack, *reversed(servers)).address == store.address


@pytest.fixture
def idle(stack: ExitStack, servers: tuple[RedisServer, RedisServer], store: RedisStore) -> RedisStore:
    """The unused one of two stores, probed by a node that knows no other; it has a forward pointer."""
    store.publish_forward_pointer()
    (address,) = {server.url for server in servers} - {store.address}
    asked = RedisStore(address, RUN_ID, lease_s=2.0, retry_s=5.0)
    stack.callback(asked.close)
    return asked


def test_unused_store_has_a_forward_pointer(idle: RedisStore, store: RedisStore) -> None:
    idle.find_run()
    assert (idle.address, idle.generation) == (store.address, store.generation) and idle.view(0).alive == {A, B}


def test_node_with_one_address_of_several_is_refused(idle: RedisStore) -> None:
    with pytest.raises(ConfigError, match="one of several stores of this run"):
        idle.reach(retry_s=5.0)


def test_tool_writes_nothing_into_the_only_store(servers: tuple[RedisServer, RedisServer]) -> None:
    with closing(RedisStore(servers[0].url, RUN_ID, lease_s=2.0, retry_s=5.0)) as tool:
        tool.find_run()
    with redis.Redis.from_url(servers[0].url) as client:
        assert client.keys() == []


# -- stores that members hold ------------------------------------------------------------------------------------------


@pytest.fixture
def held(stack: ExitStack) -> list[HeldStore]:
    """The stores of three nodes."""
    return [stack.enter_context(HeldStore(KEY, RUN_ID)) for _ in range(3)]


def reached(stack: ExitStack, *servers: HeldStore) -> RedisStore:
    store = open_at(stack, *servers)
    store.reach(retry_s=5.0)
    return store


def test_unlisted_store_of_a_member_is_a_candidate(stack: ExitStack, held: list[HeldStore]) -> None:
    first, _, late = held
    store = reached(stack, first)
    store.renew_lease(A, Peer("a", "127.0.0.1", 4000, True, store_port=late.port), first=True)
    first.stop()
    assert [place_of_store(seen) for seen, _ in store.survey()] == [late.place]


def test_newcomer_that_knows_one_node_finds_the_store_in_use(stack: ExitStack, held: list[HeldStore]) -> None:
    first, second, own = held
    member = reached(stack, first, second)
    member.publish_forward_pointer()
    newcomer = reached(stack, second, own)
    assert first.place == place_of_store(member) == place_of_store(newcomer)
    assert newcomer.generation == member.generation


def test_stores_of_members_require_the_token(stack: ExitStack, held: list[HeldStore]) -> None:
    url = f"nodes://{held[0].place}"
    other = RedisStore(url, RUN_ID, key=RunKey.of("another", RUN_ID), lease_s=2.0, retry_s=0.5)
    stack.callback(other.close)
    with pytest.raises(StoreLost, match=r"1 of 1 do not answer.*hung up on the handshake: are run.id and run.token"):
        other.reach(retry_s=0.5)


def place_of_store(store: RedisStore) -> str:
    return store.address.removeprefix("node://")


def test_newcomer_does_not_enter_a_store_that_the_run_has_left(
    stack: ExitStack, servers: tuple[RedisServer, RedisServer], store: RedisStore
) -> None:
    """Its forward pointer names a store that this newcomer cannot reach."""
    left = next(candidate for candidate in store.candidates if candidate.address == store.address)
    left.set_forward_pointer(ForwardPointer(StoreTerm(2, "far-away"), "unix:///tmp/far/away.sock"))
    newcomer = RedisStore(" ".join(server.url for server in servers), RUN_ID, lease_s=2.0, retry_s=5.0)
    stack.callback(newcomer.close)
    with pytest.raises(StoreLost, match="another store, which does not answer yet"):
        newcomer.reach(retry_s=0.5)
