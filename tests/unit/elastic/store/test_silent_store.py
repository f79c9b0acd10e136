"""A member whose store is silent takes all steps at the others before it calls the silent one again."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
from tests.stores import SHARED, a_plan, a_verdict

from zeroband.elastic.membership.orders import Orders
from zeroband.elastic.membership.records import StoreTerm
from zeroband.elastic.membership.succession import HandoverState, MemberReport, StoreProbe
from zeroband.elastic.store import failover as failover_module
from zeroband.elastic.store.backup import LiveBackup
from zeroband.elastic.store.failover import StoreFailover
from zeroband.elastic.store.redis_store import RedisStore

A, B = "a#1", "b#1"
FIRST, SECOND = StoreTerm(1, "first"), StoreTerm(2, "second")


class OtherStore:
    """A store to which the run may switch, with the reports in it."""

    def __init__(self) -> None:
        self.seen = StoreProbe("second", None)

    def begin(self, generation: StoreTerm, state: HandoverState) -> bool:
        self.seen = replace(self.seen, generation=generation, committed_round=state.committed.round)
        return True


class SilentStore:
    """The store in use, which must not be called before the member has switched."""

    def __init__(self, other: OtherStore, *others: MemberReport) -> None:
        self.generation, self.address = FIRST, "unix:///first"
        self._other = other
        self._told = dict(zip((B,), others, strict=False))
        self.surveys = 0

    def survey(self, member: str, member_report: MemberReport) -> list[tuple[OtherStore, StoreProbe]]:
        self.surveys += 1
        self._other.seen = replace(self._other.seen, member_reports={**self._told, member: member_report})
        return [(self._other, self._other.seen)]

    def publish_forward_pointer(self) -> None: ...

    def follow(self) -> None: ...

    def enter(self, _store: OtherStore, generation: StoreTerm) -> None:
        self.generation, self.address = generation, "unix:///second"

    def view(self, _round: int) -> Any:
        assert self.generation != FIRST, "it is silent"
        return SimpleNamespace(plan=None, committed=None, orders=Orders())


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that advances by sleeps."""
    clock = SimpleNamespace(now_s=100.0)

    def sleep(seconds: float) -> None:
        clock.now_s += seconds

    monkeypatch.setattr(failover_module, "time", SimpleNamespace(monotonic=lambda: clock.now_s, sleep=sleep))
    return clock


def recover(store: SilentStore) -> list[int]:
    """Let a member of the first round look for another store. Returns the generations that it reports."""
    said: list[int] = []
    memory = LiveBackup(A, SHARED)
    memory.committed(a_verdict(a_plan(A, B)))
    flags = MagicMock(is_fenced=False)

    def note(_kind: str, *, store: str, generation: int) -> None:
        said.append(generation)

    with closing(StoreFailover(cast(RedisStore, store), A, memory, flags, note, survey_s=1.0)) as failover:
        failover.recover()
    return said


def test_member_promises_begins_and_enters_without_calling_the_silent_store_between() -> None:
    other = OtherStore()
    bound = MemberReport((FIRST, SECOND), FIRST, a_verdict(a_plan(A, B)))
    store = SilentStore(other, bound)
    assert recover(store) == [1, 2]
    assert (store.generation, store.address) == (SECOND, "unix:///second")


def test_lone_member_retries_the_silent_store(clock: SimpleNamespace) -> None:
    store = SilentStore(OtherStore())
    assert recover(store) == [1]
    assert store.generation == FIRST
    assert 1 < store.surveys < 100 and clock.now_s < 110
