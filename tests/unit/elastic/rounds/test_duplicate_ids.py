"""Two members with one node.id: an earlier life of this node, or another machine that lives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
from tests.memory_store import MemoryRecord, MemoryStore

from zeroband.elastic.membership.records import Peer, RoundPlan
from zeroband.elastic.rounds.waits import outlast_duplicates
from zeroband.errors import ConfigError

OTHER, SAME, OURS, LATER = "b#1", "a#1", "a#2", "a#3"
LEASE_MS = 5000
Pass = Callable[[int], None]
Outlive = Callable[..., None]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(MemoryRecord())


@pytest.fixture
def renew(store: MemoryStore) -> Callable[..., None]:
    def renew_all(*members: str, first: bool = False) -> None:
        store.record.let_pass(1, is_silent=True)  # or this renewal would be at the instant of the last one
        for member in members:
            peer = Peer(member.partition("#")[0], f"host of {member}", 7070, True)
            assert store.renew_lease(member, peer, first=first) is not None

    return renew_all


@pytest.fixture
def let_pass(store: MemoryStore) -> Pass:
    """Have the store's clock go on, while nobody renews."""
    return partial(store.record.let_pass, is_silent=True)


@pytest.fixture
def outlive(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> Outlive:
    """outlive(act, act): what happens between the looks; one look more is an error."""

    def run(*acts: Callable[[], object]) -> None:
        left = list(acts)
        monkeypatch.setattr("zeroband.elastic.rounds.waits.time", SimpleNamespace(sleep=lambda seconds: left.pop(0)()))
        outlast_duplicates(store, OURS, "a", look_s=0.5)
        assert not left

    return run


def test_node_that_is_the_only_one_of_its_name_waits_for_nothing(renew: Callable[..., None], outlive: Outlive) -> None:
    renew(OTHER, OURS, first=True)
    outlive()


def test_node_that_was_killed_waits_until_its_old_lease_runs_out(
    renew: Callable[..., None], let_pass: Pass, outlive: Outlive
) -> None:
    renew(OTHER, SAME, OURS, first=True)
    outlive(*3 * [lambda: (let_pass(LEASE_MS // 3 + 1), renew(OTHER, OURS))])


def test_machine_with_the_name_of_one_that_lives_is_refused(renew: Callable[..., None], outlive: Outlive) -> None:
    renew(OTHER, SAME, OURS, first=True)
    with pytest.raises(ConfigError, match=r"node\.id='a' is in this run already, at host of a#1:7070; give .* another"):
        outlive(*100 * [lambda: renew(OTHER, SAME, OURS)])


def test_of_two_new_machines_of_one_name_the_first_by_its_id_waits_until_the_other_is_gone(
    renew: Callable[..., None], let_pass: Pass, outlive: Outlive
) -> None:
    renew(OURS, LATER, first=True)
    outlive(*3 * [lambda: renew(OURS, LATER)], *3 * [lambda: (let_pass(LEASE_MS // 3 + 1), renew(OURS))])


def test_machine_that_is_in_the_run_stays_whatever_the_ids(
    store: MemoryStore, renew: Callable[..., None], outlive: Outlive
) -> None:
    renew(OURS, LATER, first=True)
    assert store.propose_plan(RoundPlan(1, 1, 1, (LATER,), (1,)), current=None)
    with pytest.raises(ConfigError, match="is in this run already, at host of a#3:7070"):
        outlive(*100 * [lambda: renew(OURS, LATER)])


def test_old_lease_that_the_store_prolongs_after_a_silence_is_no_life(
    renew: Callable[..., None], let_pass: Pass, outlive: Outlive
) -> None:
    renew(OTHER, SAME, OURS, first=True)
    let_pass(LEASE_MS // 2 + 1)
    outlive(lambda: renew(OURS), *3 * [lambda: (let_pass(LEASE_MS // 3 + 1), renew(OURS))])
