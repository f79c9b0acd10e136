"""A hostile and forgetful store: every key of a run, damaged in every way, at every moment of a round, on a real Redis.

What must hold: members bring back what they hold and go on; no round has two results; nobody is fenced for good. What
is damaged goes from one deleted key to all of an earlier run's file.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.elastic.store.damaged_run import MOMENTS, RUN_ID, Run, a_run

from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.membership.records import Ready, RoundPlan, Verdict
from zeroband.elastic.store.keys import Keys
from zeroband.elastic.store.record_verifier import RecordVerifier
from zeroband.elastic.store.seals import Seals

Damage = Callable[[Run, bytes], None]

FORGED = b"00112233445566778899aabbccddeeff 999999999 999999999 forged - {}"
HUGE = 10**15


def whole_names(run: Run) -> dict[str, bytes]:
    """Every key of a run by a short name, including those of the current round."""
    keys, plan, round = run.nodes[0].store.keys, run.nodes[0].plan, run.newest + 1
    assert plan is not None
    names = {name: getattr(keys, name) for name in Keys.names()}
    names |= {"ready": keys.ready(round), "ready_rev": keys.ready_rev(round)}
    names["group"] = keys.group(plan, 0)
    return {name: value.encode() for name, value in names.items()}


NAMES = sorted({*Keys.names(), "ready", "ready_rev", "group"})


def delete(run: Run, key: bytes) -> None:
    run.client.delete(key)


def make_string(run: Run, key: bytes) -> None:
    run.client.delete(key)
    run.client.set(key, b"\xff not for you")


def make_list(run: Run, key: bytes) -> None:
    run.client.delete(key)
    run.client.rpush(key, b"a", b"b")


def make_hash(run: Run, key: bytes) -> None:
    run.client.delete(key)
    run.client.hset(key, "a#1", b"b")


def make_sorted_set(run: Run, key: bytes) -> None:
    run.client.delete(key)
    run.client.zadd(key, {"ghost#1": HUGE, b"\xff\xfe": float("inf")})


def change(run: Run, key: bytes, value: Callable[[bytes], bytes], score: Callable[[float], float]) -> None:
    """Replace each existing value."""
    client: Any = run.client
    match client.type(key):
        case b"string":
            client.set(key, value(client.get(key)))
        case b"hash":
            client.hset(key, mapping={name: value(old) for name, old in client.hgetall(key).items()})
        case b"list":
            values = [value(old) for old in client.lrange(key, 0, -1)]
            client.delete(key)
            client.rpush(key, *values)
        case b"zset":
            client.zadd(key, {name: score(old) for name, old in client.zrange(key, 0, -1, withscores=True)})
        case _:
            client.set(key, value(b"nothing was there"))


def truncate(run: Run, key: bytes) -> None:
    change(run, key, lambda old: old[: len(old) // 2], lambda old: old // 1000 if old < HUGE else 0.0)


def forge(run: Run, key: bytes) -> None:
    """A round and a version above all others; numbers for the clock and the leases."""
    change(run, key, lambda old: b"%d" % HUGE if old.isdigit() else FORGED, lambda _: float("inf"))


def zero(run: Run, key: bytes) -> None:
    change(run, key, lambda _: b"0", lambda _: 0.0)


def empty(run: Run, key: bytes) -> None:
    change(run, key, lambda _: b"", lambda _: 0.0)


def swap(run: Run, key: bytes) -> None:
    """Each member's record in place of another one's."""
    client: Any = run.client
    if client.type(key) == b"hash":
        said = client.hgetall(key)
        client.hset(key, mapping=dict(zip(said, [*list(said.values())[1:], *list(said.values())[:1]], strict=True)))
    else:
        truncate(run, key)


KINDS: list[Damage] = [delete, make_string, make_list, make_hash, make_sorted_set, truncate, forge, zero, empty, swap]


def old_values(run: Run, old: dict[bytes, bytes], name: str) -> None:
    """An earlier value; the names of a round's keys change with the round."""
    key = whole_names(run)[name]
    prefix = key.rpartition(b":")[0] if name in ("ready", "ready_rev", "group") else key
    values = [value for other, value in old.items() if other.startswith(prefix)]
    if values:
        run.client.restore(key, 30_000_000, values[-1], replace=True)


def assert_goes_on(run: Run, what: str) -> None:
    before = run.fences
    try:
        run.commits_rounds(1)
    except Exception as error:
        raise AssertionError(f"after {what}: {error!r}") from error
    assert run.fences == before, f"{what} fenced somebody"


def damage_all(url: str, cases: Iterable[tuple[str, Damage, str]]) -> int:
    """Apply each in turn to one run. Returns their number."""
    damages = 0
    with a_run(url) as run:
        for name, kind, moment in cases:
            run.bring_to(moment)
            kind(run, whole_names(run)[name])
            assert_goes_on(run, f"{name}: {kind.__name__} at {moment}")
            damages += 1
    return damages


@pytest.mark.slow
def test_run_survives_every_damage_to_every_key(redis_url: str) -> None:
    """Apply each at one of the moments, so that each key and each kind gets all of them."""
    pairs = list(itertools.product(enumerate(NAMES), enumerate(KINDS)))
    cases = [(name, kind, MOMENTS[(i + j) % len(MOMENTS)]) for (i, name), (j, kind) in pairs]
    assert damage_all(redis_url, cases) == len(NAMES) * len(KINDS) >= 120
    assert {(name, moment) for name, _, moment in cases} == set(itertools.product(NAMES, MOMENTS))


@pytest.mark.soak
@pytest.mark.parametrize("moment", MOMENTS)
def test_run_survives_every_damage_to_every_key_at_any_moment(redis_url: str, moment: str) -> None:
    cases = [(name, kind, moment) for name, kind in itertools.product(NAMES, KINDS)]
    assert damage_all(redis_url, cases) == len(cases) >= 120


@pytest.fixture
def yesterday(redis_url: str, redis_client: redis.Redis) -> dict[bytes, bytes]:
    """A dump of an earlier run of the same name and token, which had more rounds."""
    with a_run(redis_url) as run:
        run.commits_rounds(20)
        old = run.dump()
    redis_client.flushall()
    assert len(old) > 40
    return old


@pytest.mark.slow
def test_record_of_an_earlier_run_or_round_misleads_no_member(redis_url: str, yesterday: dict[bytes, bytes]) -> None:
    """Key by key; at first this run's counters are below the earlier one's."""
    with a_run(redis_url) as run:
        earlier = run.dump()
        for i, (name, old) in enumerate(itertools.product(NAMES, (yesterday, earlier))):
            run.bring_to(MOMENTS[(i // 2) % len(MOMENTS)])
            old_values(run, old, name)
            assert_goes_on(run, f"{name} as it was in {'another run' if old is yesterday else 'an earlier round'}")
        assert run.newest > 20, "it went on, past the earlier run"


@pytest.mark.slow
def test_server_restored_from_an_earlier_run_fences_no_member(
    redis_url: str, redis_client: redis.Redis, yesterday: dict[bytes, bytes]
) -> None:
    with a_run(redis_url) as run:
        for moment in MOMENTS:
            run.bring_to(moment)
            redis_client.flushall()
            for name, value in yesterday.items():
                redis_client.restore(name, 30_000_000, value)
            assert_goes_on(run, f"the whole file of another run at {moment}")
        assert run.newest < 20, "nobody went on with the rounds of the earlier run"


def test_server_restored_from_before_all_nodes_rejoined_fences_no_member(
    redis_url: str, redis_client: redis.Redis
) -> None:
    """Its plans and leases name no current member."""
    with a_run(redis_url) as run:
        run.commits_rounds()
        earlier = run.dump()
        for node in run.nodes:
            node.store.expire_lease(node.member.member_id)
            run.fence(node)
            run.commits_rounds()
        before = run.fences
        redis_client.flushall()
        for name, value in earlier.items():
            redis_client.restore(name, 30_000_000, value)
        run.renew_all()  # guardians come first: they renew five times in a lease
        assert_goes_on(run, "a file from before all nodes joined again")
        assert run.fences == before


@pytest.mark.slow
@settings(max_examples=12, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(
            st.sampled_from(MOMENTS), st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(KINDS)), max_size=4)
        ),
        min_size=1,
        max_size=4,
    ),
    st.permutations(range(3)),
)
def test_run_survives_several_damages_at_once(
    redis_url: str, damages: list[tuple[str, list[tuple[str, Damage]]]], order: list[int]
) -> None:
    """Whichever node reads first; several losses together may fence nodes, which rejoin."""
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    with a_run(redis_url) as run:
        for moment, several in damages:
            run.bring_to(moment)
            for name, kind in several:
                kind(run, whole_names(run)[name])
            for index in order:
                run.step(run.nodes[index])
            run.commits_rounds(2)


# -- what a stranger may write ----------------------------------------------------------------------------------------


def stranger(run: Run) -> RecordVerifier:
    """A stranger that reaches the store and seals with another token."""
    return RecordVerifier(Seals(RunKey.of("another token", RUN_ID), RUN_ID, run.nodes[0].store.keys.prefix))


@pytest.mark.parametrize("moment", MOMENTS)
def test_verdict_of_a_stranger_fences_no_member_and_blocks_no_round(redis_url: str, moment: str) -> None:
    with a_run(redis_url) as run:
        run.bring_to(moment)
        forger, keys = stranger(run), run.nodes[0].store.keys
        plan = RoundPlan(HUGE, HUGE, HUGE, ("stranger#1",), (1,), (1,), (1,), sessions=(run.session,))
        verdict = Verdict(plan, "d", {"session": run.session})
        run.client.set(keys.plan, forger.seal_plan(plan))
        run.client.set(keys.committed, forger.seal_verdict(verdict))
        run.client.hset(keys.ready(run.newest + 1), "stranger#1", forger.seal_ready("stranger#1", Ready(0, 1, "s")))
        run.client.zadd(keys.leases, {"stranger#1": float("inf")})
        assert_goes_on(run, f"a forged verdict at {moment}")


@pytest.mark.parametrize("moment", MOMENTS)
def test_failure_and_votes_of_a_stranger_do_not_count(redis_url: str, moment: str) -> None:
    with a_run(redis_url) as run:
        run.bring_to(moment)
        plan, forger = run.nodes[0].plan, stranger(run)
        assert plan is not None
        keys = run.nodes[0].store.keys
        run.client.set(keys.failed, forger.seal_failure(plan, "because I say so", by=""))
        for member in plan.members:
            run.client.hset(keys.votes, member, forger.seal_vote(member, plan, "another"))
        newest = run.newest
        assert_goes_on(run, f"a forged failure at {moment}")
        assert run.newest > newest


def test_deleted_lease_costs_at_most_one_membership(redis_url: str) -> None:
    """Before its guardian renews it, the others may open a round without the member; it rejoins."""
    with a_run(redis_url) as run:
        run.bring_to("waiting")
        run.client.zrem(run.nodes[0].store.keys.leases, run.nodes[0].member.member_id)
        for node in run.nodes[1:]:
            run.step(node)
        run.commits_rounds(3)
        assert run.fences <= 1


def test_pause_ordered_in_an_earlier_run_is_void(redis_url: str, redis_client: redis.Redis) -> None:
    with a_run(redis_url) as run:
        for _ in range(5):
            run.give_orders()
        store = run.nodes[0].store
        store.give_orders(lambda orders: cast(Any, orders).__class__(orders.version + 1, is_paused=True))
        old = run.client.dump(store.keys.orders) or b""
    redis_client.flushall()
    with a_run(redis_url) as run:
        run.client.restore(run.nodes[0].store.keys.orders, 30_000_000, old, replace=True)
        assert_goes_on(run, "orders of an earlier run")
