"""Stores under test, with a clock that the test moves, and the records that it writes into them."""

from __future__ import annotations

import socket
from collections.abc import Generator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import Any, Protocol, cast

import redis
from tests.memory_store import MemoryRecord, MemoryStore

from zeroband.elastic.membership.ballots import vote_of
from zeroband.elastic.membership.keys import NodeKey, RunKey
from zeroband.elastic.membership.records import Peer, RoundPlan, Verdict
from zeroband.elastic.store.backup import StoreBackup
from zeroband.elastic.store.interface import Store, record_of
from zeroband.elastic.store.keys import Keys
from zeroband.elastic.store.redis_store import RedisStore

RUN_ID = "run"
SHARED = {"model.d_model": "256", "train.batch_size": "64"}


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server(Protocol):
    """What holds a run's record, seen from outside."""

    def open(self) -> Store:
        """A store of one more node; its leases last for 5 s."""
        ...

    def let_pass(self, ms: int, *, is_silent: bool) -> None:
        """Have the store's clock go on without waiting for it; `is_silent`: nobody renews meanwhile."""
        ...

    def settle(self) -> None:
        """End the time that members get to bring a lost record back, without waiting for it."""
        ...

    def lose_shared(self) -> None:
        """Lose what the nodes of the run share."""
        ...

    def lose_everything(self) -> None:
        """Lose the whole record, leases too."""
        ...

    def close(self) -> None: ...


class MemoryServer:
    """Holds it in this process."""

    def __init__(self) -> None:
        self.record = MemoryRecord()

    def open(self) -> Store:
        return MemoryStore(self.record)

    def let_pass(self, ms: int, *, is_silent: bool) -> None:
        self.record.let_pass(ms, is_silent=is_silent)

    def settle(self) -> None:
        self.record.settled_ms = 0

    def lose_shared(self) -> None:
        self.record.shared = None

    def lose_everything(self) -> None:
        self.record.lose_everything()

    def close(self) -> None:
        """Hold nothing that has to be given back."""


class RedisUnderTest:
    """Holds it in a Redis, which is empty at first."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._keys = Keys(RUN_ID)
        self._client = redis.Redis.from_url(url)
        self._client.flushall()
        self._stores: list[RedisStore] = []

    def open(self) -> Store:
        self._stores.append(RedisStore(self._url, RUN_ID, retry_s=5.0))
        return self._stores[-1]

    def let_pass(self, ms: int, *, is_silent: bool) -> None:
        keys, client = self._keys, self._client
        for member in cast("list[bytes]", client.zrange(keys.leases, 0, -1)):
            client.zincrby(keys.leases, -ms, member)
        clock = cast("dict[bytes, bytes]", client.hgetall(keys.clock))
        for name in {b"settling_until_ms", b"renewed_ms"} if is_silent else {b"settling_until_ms"}:
            if name in clock:
                client.hincrby(keys.clock, name.decode(), -ms)

    def settle(self) -> None:
        self._client.hset(self._keys.clock, "settling_until_ms", 0)

    def lose_shared(self) -> None:
        self._client.delete(self._keys.run)

    def lose_everything(self) -> None:
        self._client.flushall()

    def close(self) -> None:
        for store in self._stores:
            store.close()
        self._client.close()


def a_plan(*members: str, version: int = 1, round: int = 0, late: tuple[str, ...] = ()) -> RoundPlan:
    zeros = tuple(0 for _ in members)
    return RoundPlan(version, version, round, members, zeros, zeros, zeros, late)


def a_verdict(plan: RoundPlan, digest: str = "d") -> Verdict:
    return Verdict(plan, digest, {"n": 1})


def a_peer(member: str, *cut_off: str) -> Peer:
    return Peer(member.partition("#")[0], "host", 1, False, cut_off)


def renew(store: Store, member: str, *, first: bool = False) -> bool:
    return store.renew_lease(member, a_peer(member), first=first) is not None


def hold(store: Store, *members: str) -> None:
    assert all(renew(store, member, first=True) for member in members)


def open_next(store: Store, plan: RoundPlan) -> bool:
    """Propose what follows on the current plan, as a member does that has just looked."""
    return store.propose_plan(plan, current=store.view(plan.round).plan)


def commit(store: Store, plan: RoundPlan) -> None:
    assert open_next(store, plan) and store.propose_verdict(a_verdict(plan))


def known_to(member: str, *, round: int, version: int = 0, **fields: Any) -> StoreBackup:
    """What a member knows that saw `round` committed."""
    plan = a_plan("a#1", "b#1", version=version or round + 1, round=round)
    usual: dict[str, Any] = {"run": record_of(SHARED), "plan": plan, "committed": a_verdict(plan)}
    return StoreBackup(member, **{**usual, **fields})


@contextmanager
def signing_stores(
    url: str, keys: Mapping[str, NodeKey], members: Mapping[str, str]
) -> Generator[dict[str, RedisStore]]:
    """A store of each of these nodes, by name; `members`: those of them that hold a lease."""
    with ExitStack() as stack:
        stores = {
            node: stack.enter_context(
                closing(RedisStore(url, RUN_ID, key=RunKey(b"k" * 32, key), lease_s=1000.0, retry_s=5.0))
            )
            for node, key in keys.items()
        }
        for node, member in members.items():
            stores[node].found_or_match(SHARED)
            assert stores[node].renew_lease(member, Peer(node, "host", 1, True), first=True) is not None
        yield stores


def commit_by(stores: Mapping[str, RedisStore], members: Mapping[str, str], verdict: Verdict) -> Verdict:
    """Have the first member propose the plan, all vote for the result, and the first commit it."""
    first = stores[next(iter(members))]
    assert open_next(first, verdict.plan)
    for node, member in members.items():
        stores[node].expect_verdict(verdict)
        stores[node].vote(verdict.plan, member, vote_of(verdict))
    assert first.propose_verdict(verdict)
    return verdict
