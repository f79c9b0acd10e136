"""A run of several stores uses one of them at a time, and what is of an older generation counts no more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
import redis
from tests.stores import RUN_ID, SHARED, a_verdict, an_opening, hold

from zeroband.elastic.membership.records import Generation
from zeroband.elastic.store.local_server import RedisServer
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.errors import StoreLost

A, B = "a#1", "b#1"
OPENING = an_opening(A, B)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def servers(stack: ExitStack) -> tuple[RedisServer, RedisServer]:
    return stack.enter_context(RedisServer()), stack.enter_context(RedisServer())


def open_store(stack: ExitStack, *servers: RedisServer) -> RedisStore:
    store = RedisStore(" ".join(server.url for server in servers), RUN_ID, lease_s=2.0, patience_s=5.0)
    stack.callback(store.close)
    store.reach(patience_s=5.0)
    return store


@pytest.fixture
def store(stack: ExitStack, servers: tuple[RedisServer, RedisServer]) -> RedisStore:
    """The store of a run that A and B are about to found."""
    store = open_store(stack, *servers)
    store.found_or_match(SHARED)
    hold(store, A, B)
    return store


def older(store: RedisStore) -> Generation:
    assert store.generation is not None
    return replace(store.generation, number=store.generation.number - 1)


def test_nodes_use_one_store_whatever_the_order_of_their_lists(
    stack: ExitStack, servers: tuple[RedisServer, RedisServer], store: RedisStore
) -> None:
    other = open_store(stack, *reversed(servers))
    assert store.generation is not None and store.generation.number == 1
    assert (other.generation, other.address) == (store.generation, store.address)
    assert other.view(0).alive == {A, B}


def test_what_is_of_an_older_generation_is_refused(store: RedisStore) -> None:
    old, now = older(store), store.generation
    assert not store.propose_opening(OPENING, current=None, generation=old)
    assert store.propose_opening(OPENING, current=None, generation=now)
    for member in (A, B):
        assert store.vote(OPENING, member, "d", generation=old).votes.get(member) is None
    assert store.view(0).votes == {}
    for member in (A, B):
        store.vote(OPENING, member, "d", generation=now)
    assert store.view(0).votes == {A: "d", B: "d"}
    assert not store.propose_verdict(a_verdict(OPENING), generation=old)
    assert store.propose_verdict(a_verdict(OPENING), generation=now)


def test_store_that_lost_its_memory_is_another_one(store: RedisStore) -> None:
    with redis.Redis.from_url(store.address) as client:
        client.flushall()
    (_, seen), (_, spare) = store.survey()
    assert store.generation is not None and seen.store != store.generation.store and seen.generation is None
    assert spare.generation is None and store.view(0).generation is None


def test_run_is_begun_only_where_all_its_stores_answer(
    stack: ExitStack, servers: tuple[RedisServer, RedisServer]
) -> None:
    first, second = servers
    second.stop()
    store = RedisStore(f"{first.url} {second.url}", RUN_ID, lease_s=2.0, patience_s=1.0)
    stack.callback(store.close)
    with pytest.raises(StoreLost, match="1 of 2 do not answer"):
        store.reach(patience_s=1.0)
