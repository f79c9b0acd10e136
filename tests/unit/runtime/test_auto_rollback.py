"""The order that a round's loss calls for: given once for all members, by a compare-and-set in the store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.memory_store import MemoryRecord, MemoryStore

from zeroband.config.schema import RollbackConfig
from zeroband.elastic.membership.loss_record import LossRecord
from zeroband.elastic.membership.orders import Orders, resume, roll_back
from zeroband.elastic.store.interface import Store
from zeroband.errors import RecoveryFailed
from zeroband.node.mesh import LocalMesh
from zeroband.runtime.auto_rollback import AutoRollback

SPIKE = LossRecord(loss=9.0, mean=3.0, rounds=8, from_step=40)
Asks = Callable[..., tuple[AutoRollback, list[tuple[str, dict[str, Any]]]]]


@pytest.fixture
def store() -> Store:
    return MemoryStore(MemoryRecord())


@pytest.fixture
def member(store: Store, local: LocalMesh) -> Asks:
    """member([50, 40, 30], damaged=[40]): one with these checkpoints, and the events that it says."""

    def make(steps: list[int], damaged: tuple[int, ...] = (), most: int = 2) -> Any:
        said: list[tuple[str, dict[str, Any]]] = []
        restorer: Any = SimpleNamespace(steps=lambda: steps, is_whole=lambda step: step not in damaged)
        config = RollbackConfig(most=most)
        tell = lambda kind, **fields: said.append((kind, fields))  # noqa: E731
        return AutoRollback(config, store, restorer, local, tell), said

    return make


def orders(store: Store) -> Orders:
    return store.view(0).orders


def test_run_goes_back_to_the_newest_whole_checkpoint_from_before_the_round(member: Asks, store: Store) -> None:
    auto_rollback, said = member([50, 40, 30, 20], damaged=(40,))
    auto_rollback.answer(9, SPIKE)
    assert orders(store) == Orders(1, rollback=30, skips_data=True, answered=9, returned_to=30, returns=1)
    reason = "a loss of 9 after a mean of 3 (rollback.on_spike=2)"
    assert said == [("rollback_ordered", {"round": 9, "step": 30, "reason": reason, "times": 1})]


def test_round_whose_loss_is_fine_changes_nothing(member: Asks, store: Store) -> None:
    auto_rollback, said = member([40])
    auto_rollback.answer(9, LossRecord(loss=3.1, mean=3.0, rounds=8, from_step=40))
    assert orders(store) == Orders() and said == []


def test_second_member_finds_the_round_answered_also_when_the_run_went_back_meanwhile(
    member: Asks, store: Store
) -> None:
    first, second = member([40]), member([30])
    first[0].answer(9, SPIKE)
    second[0].answer(9, SPIKE)
    assert orders(store).rollback == 40
    store.give_orders(lambda given: replace(given, version=given.version + 1, rollback=None))  # it has gone back
    second[0].answer(9, SPIKE)
    assert orders(store).rollback is None and second[1] == []


def test_run_stands_still_after_most_returns_in_a_row_until_an_operator_lets_it_go_on(
    member: Asks, store: Store
) -> None:
    auto_rollback, said = member([40], most=2)
    for round in (9, 19, 29):
        auto_rollback.answer(round, SPIKE)
        store.give_orders(lambda given: replace(given, version=given.version + 1, rollback=None))  # it has gone back
    assert [kind for kind, _ in said] == ["rollback_ordered", "rollback_ordered", "rollback_given_up"]
    assert [fields.get("times") for _, fields in said] == [1, 2, None] and said[2][1]["most"] == 2
    assert orders(store).is_paused and orders(store).rollback is None
    store.give_orders(resume)
    auto_rollback.answer(39, SPIKE)
    assert (orders(store).is_paused, orders(store).rollback, orders(store).returns) == (False, 40, 1)


def test_returns_to_a_newer_checkpoint_are_counted_anew(member: Asks, store: Store) -> None:
    for round, step in ((9, 10), (19, 20), (29, 30)):
        member([step], most=1)[0].answer(round, SPIKE)
        store.give_orders(lambda given: replace(given, version=given.version + 1, rollback=None))  # it has gone back
    assert not orders(store).is_paused and orders(store).returned_to == 30


@pytest.mark.parametrize("steps", [[], [50]])
def test_run_without_a_checkpoint_from_before_stands_still(member: Asks, store: Store, steps: list[int]) -> None:
    auto_rollback, said = member(steps)
    auto_rollback.answer(9, SPIKE)
    assert orders(store) == Orders(1, is_paused=True, answered=9)
    assert [kind for kind, _ in said] == ["rollback_given_up"] and said[0][1]["step"] is None


def test_storage_out_of_reach_counts_as_no_checkpoint(member: Asks, store: Store) -> None:
    auto_rollback, said = member([40])

    def fails() -> list[int]:
        raise RecoveryFailed("no route to it")

    auto_rollback.restorer.steps = fails  # pyright: ignore[reportAttributeAccessIssue]
    auto_rollback.answer(9, SPIKE)
    assert orders(store).is_paused and len(said) == 1


def test_order_of_an_operator_stays(member: Asks, store: Store) -> None:
    store.give_orders(lambda given: roll_back(given, 10, [10]))
    auto_rollback, said = member([40])
    auto_rollback.answer(9, SPIKE)
    assert orders(store) == Orders(2, rollback=10, answered=9) and said == []
