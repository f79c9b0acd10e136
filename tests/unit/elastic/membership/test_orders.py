"""Orders of an operator: what a command makes of them, and how they come through the store."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroband.elastic.membership.orders import (
    OperatorKey,
    Orders,
    answer_loss,
    ban,
    drain,
    give_up_rollback,
    is_legitimate,
    pause,
    resume,
    roll_back,
)
from zeroband.elastic.membership.records import from_json, to_json
from zeroband.errors import ConfigError

ALIVE = {"a#1": "a", "b#1": "b", "b#2": "b"}
MEMBERS = st.sampled_from(sorted(ALIVE))
ORDERS = st.builds(
    Orders,
    version=st.integers(0, 9),
    is_paused=st.booleans(),
    rollback=st.none() | st.integers(0, 500),
    leaving=st.lists(MEMBERS, unique=True).map(tuple),
    skips_data=st.booleans(),
    answered=st.integers(-1, 9),
    returned_to=st.integers(-1, 500),
    returns=st.integers(0, 3),
)
COMMANDS = st.sampled_from(
    [
        *(pause, resume, lambda o: drain(o, "b", ALIVE), lambda o: roll_back(o, 5, {5})),
        *(lambda o: give_up_rollback(o, 5), lambda o: answer_loss(o, 4, 5, most=2, skips_data=True)),
    ]
)


@given(ORDERS)
def test_orders_come_back_from_what_the_store_keeps(orders: Orders) -> None:
    assert from_json(Orders, to_json(orders)) == orders


@given(ORDERS, COMMANDS)
def test_command_takes_the_next_version_exactly_when_it_changes_something(orders: Orders, command) -> None:
    changed = command(orders)
    assert changed.version == orders.version + (changed != orders)
    assert command(changed) == changed


@given(ORDERS)
def test_pause_and_what_ends_it_leave_the_other_orders_alone(orders: Orders) -> None:
    paused, ended = pause(orders), resume(orders)
    assert (paused.is_paused, ended.is_paused) == (True, False)
    assert {(o.rollback, o.leaving) for o in (orders, paused, ended)} == {(orders.rollback, orders.leaving)}


def test_drain_names_every_living_member_of_a_node_and_forgets_the_dead() -> None:
    assert drain(Orders(leaving=("gone#1", "a#1")), "b", ALIVE).leaving == ("a#1", "b#1", "b#2")


def test_drain_of_a_node_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"'c'; there are a, b$"):
        drain(Orders(), "c", ALIVE)


def test_rollback_to_a_checkpoint_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"of step 7; there are 5, 10$"):
        roll_back(Orders(), 7, [10, 5])


def test_rollback_that_failed_is_given_up_unless_another_was_ordered() -> None:
    assert give_up_rollback(Orders(3, rollback=5), 5) == Orders(4, rollback=None)
    assert give_up_rollback(Orders(3, rollback=10), 5) == Orders(3, rollback=10)


@given(ORDERS, st.lists(st.tuples(st.integers(0, 20), st.sampled_from([None, 5, 10])), max_size=12), st.integers(1, 3))
def test_run_goes_back_at_most_so_often_in_a_row_to_one_checkpoint_and_once_for_a_round(
    orders: Orders, asked: list[tuple[int, int | None]], most: int
) -> None:
    orders, gone_back, rounds = replace(orders, returned_to=-1, returns=0), list[int | None](), list[int]()
    for round, step in asked:
        orders = replace(orders, rollback=None)  # done by then
        before, orders = orders, answer_loss(orders, round, step, most=most, skips_data=False)
        if orders != before:
            rounds.append(round)
            gone_back.append(orders.rollback)
            assert orders.rollback is not None or orders.is_paused
    assert rounds == sorted(set(rounds))
    assert all(
        len(set(gone_back[n : n + most + 1])) > 1 or None in gone_back[n : n + most + 1]
        for n in range(len(gone_back) - most)
    )


def test_operator_s_rollback_trains_the_samples_again() -> None:
    assert roll_back(Orders(skips_data=True), 5, {5}).skips_data is False


# -- an operator's own key --------------------------------------------------------------------------------------------

OPERATOR, RUN = OperatorKey("sesame", "run"), "run"
NOTHING = Orders()
PAUSED = OPERATOR.changed(NOTHING, pause)
RESUMED = OPERATOR.changed(PAUSED, resume)
BACK = OPERATOR.changed(RESUMED, lambda given: roll_back(given, 5, [5]))
DONE = replace(BACK, rollback=None, version=BACK.version + 1)
DRAINED = OPERATOR.changed(DONE, lambda given: drain(given, "b", ALIVE))
ANSWERED = answer_loss(DONE, 7, 5, most=2, skips_data=True)
GIVEN_UP = answer_loss(DONE, 7, None, most=2, skips_data=True)


@pytest.mark.parametrize(
    ("orders", "before"),
    [
        (PAUSED, NOTHING),
        (RESUMED, PAUSED),
        (BACK, RESUMED),
        (BACK, NOTHING),
        (DONE, BACK),
        (DONE, NOTHING),
        (DRAINED, DONE),
        (ANSWERED, DONE),
        (GIVEN_UP, DONE),
        (replace(ANSWERED, rollback=None, version=9), ANSWERED),
        (OPERATOR.changed(GIVEN_UP, resume), GIVEN_UP),
    ],
)
def test_orders_count_that_follow_from_what_the_operator_signed(orders: Orders, before: Orders) -> None:
    assert is_legitimate(orders, before, OPERATOR.public, RUN, lambda round: round == 7)


@pytest.mark.parametrize(
    ("orders", "before"),
    [
        (pause(NOTHING), NOTHING),
        (roll_back(NOTHING, 5, [5]), NOTHING),
        (ban(RESUMED, "a", ["a#1"]), RESUMED),
        (drain(RESUMED, "b", ALIVE), RESUMED),
        (resume(PAUSED), PAUSED),
        (roll_back(RESUMED, 5, [5]), RESUMED),
        (replace(DONE, rollback=5, version=9), DONE),
        (replace(BACK, rollback=10), RESUMED),
        (replace(BACK, skips_data=True), RESUMED),
        (replace(PAUSED, version=9), RESUMED),
        (replace(PAUSED, said=RESUMED.said), NOTHING),
        (replace(PAUSED, signature="AAAA"), NOTHING),
        (replace(PAUSED, signature="?"), NOTHING),
        (replace(PAUSED, said="[]"), NOTHING),
        (OperatorKey("another", RUN).changed(NOTHING, pause), NOTHING),
        (OperatorKey("sesame", "another run").changed(NOTHING, pause), NOTHING),
        (answer_loss(DONE, 8, 5, most=2, skips_data=True), DONE),
        (replace(ANSWERED, rollback=0, version=9), ANSWERED),
        (pause(ANSWERED), ANSWERED),
    ],
)
def test_orders_that_a_member_makes_up_do_not_count(orders: Orders, before: Orders) -> None:
    """Nor the operator's of another run, older ones, or one to go back that is done."""
    assert not is_legitimate(orders, before, OPERATOR.public, RUN, lambda round: round == 7)


def test_operator_signs_nothing_that_it_did_not_say_itself() -> None:
    forged = ban(roll_back(RESUMED, 10, [10]), "a", ["a#1"])
    ordered = OPERATOR.changed(forged, lambda given: drain(given, "b", ALIVE))
    assert (ordered.rollback, ordered.banned, ordered.leaving) == (None, (), ("b#1", "b#2"))
    assert ordered.version == forged.version + 1
