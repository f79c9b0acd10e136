"""Which checkpoint those who resume begin with, and who sees whose folder: rules over what nodes tell."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from zeroband.elastic.membership.resume_rules import (
    Held,
    Holding,
    choose_checkpoint,
    holders,
    newest_checkpoint,
    no_checkpoint_reason,
    ordered_step,
    other_folders,
    same_folder,
)
from zeroband.elastic.membership.round_rules import Wait
from zeroband.errors import ConfigError

OLD, NEW = Held(200, 20, "d200", "x"), Held(630, 63, "d630", "x")


def has(held: Held | None, **more: object) -> Holding:
    return replace(Holding(resumes=True, held=held), **more)  # pyright: ignore[reportArgumentType]


def chosen(*said: Holding, start_nodes: int = 1, is_start_over: bool = False) -> Held | Wait | None:
    """What all nodes choose, whichever of them comes first."""
    nodes = [f"{name}#1" for name in "abcd"[: len(said)]]
    found = {
        choose_checkpoint(dict(order), nodes, start_nodes=start_nodes, is_start_over=is_start_over)
        for order in permutations(zip(nodes, said, strict=True))
    }
    assert len(found) == 1, found
    return found.pop()


def test_newest_of_one_line_is_that_of_the_latest_round() -> None:
    assert newest_checkpoint([OLD, NEW]) == NEW
    assert newest_checkpoint([]) is None
    after_a_rollback = Held(210, 66, "d210", "y", after="x")
    assert newest_checkpoint([NEW, after_a_rollback]) == after_a_rollback


def test_line_of_rounds_supersedes_the_one_that_it_began_with_whatever_the_numbers() -> None:
    """A store that was empty at the second founding has its rounds begin at those of the checkpoint."""
    second = Held(230, 23, "d230", "y", after="x")
    assert newest_checkpoint([NEW, second]) == second
    assert newest_checkpoint([NEW, replace(second, after="z")]) == NEW, (
        "of two that know nothing of each other the later one"
    )


@pytest.mark.parametrize("others", [(), (OLD,), (OLD, None), (None, None, OLD)])
def test_newest_checkpoint_that_any_node_has_is_chosen(others: tuple[Held | None, ...]) -> None:
    assert chosen(has(NEW), *map(has, others)) == NEW


def test_step_that_a_person_named_comes_first_and_what_this_run_saved_before_another_one_s() -> None:
    assert chosen(has(NEW), has(OLD, ordered=200)) == OLD
    assert chosen(has(OLD), has(replace(NEW, is_own=False))) == OLD
    assert chosen(has(None), has(replace(NEW, is_own=False))) == replace(NEW, is_own=False)
    assert chosen(has(NEW), has(None, ordered=200)) is None


def test_two_orders_are_refused_with_both_named() -> None:
    with pytest.raises(ConfigError, match=r"a with step 200, b with step 400; give all of them one --resume\.step"):
        ordered_step({"b#1": has(None, ordered=400), "a#1": has(OLD, ordered=200), "c#1": has(None)})


def test_nodes_that_have_not_been_heard_and_those_to_come_are_waited_for() -> None:
    told = {"a#1": has(OLD)}
    wait = choose_checkpoint(told, {"a#1", "b#1"}, start_nodes=1, is_start_over=False)
    assert isinstance(wait, Wait) and wait.waiting_for == ("b#1",)
    assert isinstance(chosen(has(OLD), start_nodes=2), Wait)
    assert choose_checkpoint(told, {"a#1", "b#1"}, start_nodes=3, is_start_over=True) == OLD


def test_what_dead_nodes_said_does_not_count() -> None:
    assert choose_checkpoint({"a#1": has(OLD), "b#1": has(NEW)}, {"a#1"}, start_nodes=1, is_start_over=False) == OLD


def test_holders_are_those_with_the_same_state() -> None:
    told = {"b#1": has(NEW), "a#1": has(NEW), "c#1": has(replace(NEW, state_digest="other")), "d#1": has(None)}
    assert holders(told, NEW) == ("a#1", "b#1")


def test_why_none_names_every_problem_and_is_empty_where_nobody_has_anything() -> None:
    assert no_checkpoint_reason({"a#1": has(None), "b#1": Holding()}) == ""
    damaged = has(None, problem="step_00000200/manifest.json is damaged")
    assert "b: step_00000200/manifest.json is damaged" in no_checkpoint_reason({"a#1": has(None), "b#1": damaged})
    assert "step 400" in no_checkpoint_reason({"a#1": has(None, ordered=400)})


def test_nodes_are_together_where_the_later_one_has_seen_the_mark_of_the_other() -> None:
    told = {"a#1": Holding(mark="a"), "b#1": Holding(mark="b", sees=("a",)), "c#1": Holding(mark="c"), "d#1": Holding()}
    assert same_folder("a#1", told) == same_folder("b#1", told) == {"a#1", "b#1"}
    assert same_folder("c#1", told) == {"c#1"} and same_folder("d#1", told) == {"d#1"}
    assert other_folders("a#1", told) == {"c#1"} and other_folders("c#1", told) == {"a#1", "b#1"}
    assert other_folders("d#1", told) == frozenset(), "it has no folder at all"
