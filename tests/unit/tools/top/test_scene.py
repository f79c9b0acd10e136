from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.unit.tools.conftest import node as make_node

from zeroband.elastic.membership.join_states import JoinState
from zeroband.observe.view import EventView, JoinView, RunView, WaitingFor
from zeroband.tools.top.scene import Scene, bars, notes_of, on_its_way, range_means

EPOCH = {"epoch": 2, "members": ["node1#b", "node0#a"]}


def _event(kind: str, node_id: str = "node0", at_s: float = 110.0, **fields: object) -> EventView:
    return EventView(at_s, node_id, kind, fields)


def told(*events: EventView) -> list[tuple[float, str]]:
    """The notes about them, which date from 100 s on."""
    return [(note.at_s, note.text) for note in notes_of(events, 100.0)]


def test_notes_tell_events_once_in_the_words_of_the_page_at_their_times_and_no_rounds() -> None:
    rounds = [_event("round_committed", round=1, epoch=1, members=[], digest="d"), _event("new_kind")]
    both = [_event("epoch_changed", node_id, **EPOCH) for node_id in ("node0", "node1")]
    next_epoch = _event("epoch_changed", at_s=115.0, **{**EPOCH, "epoch": 3})
    assert told(*rounds, *both, next_epoch, _event("left", "node1", 120.0, reason="asked")) == [
        (10.0, "Epoch 2: node0, node1 train together."),
        (15.0, "Epoch 3: node0, node1 train together."),
        (20.0, "node1 left: asked."),
    ]


def test_notes_tell_the_founding_once_and_each_return() -> None:
    founders = [_event("joined", node_id, round=0, member_id=f"{node_id}#a") for node_id in ("node0", "node1")]
    returns = [_event("joined", "node1", round=7, member_id=f"node1#{i}") for i in "bc"]
    assert [text.split(";")[0] for _, text in told(*founders, *returns)] == [
        "The nodes agreed on the initial state and founded the run.",
        "node1 has joined",
        "node1 has joined",
    ]


def test_notes_date_none_before_the_beginning_and_are_equal_whatever_their_times() -> None:
    early = notes_of([_event("left", at_s=99.0, reason="asked")], 100.0)
    assert (early[0].at_s, early) == (0.0, notes_of([_event("left", at_s=105.0, reason="asked")], 100.0))


@pytest.mark.parametrize(
    ("values", "width", "means"),
    [
        ([], 10, []),
        ([3.0, 1.0], 10, [3.0, 1.0]),
        ([4.0, 2.0, 3.0, 1.0], 2, [3.0, 2.0]),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 2, [1.5, 4.0]),
    ],
)
def test_stretch_means_are_those_of_stretches_of_about_the_same_length(
    values: list[float], width: int, means: list[float]
) -> None:
    assert range_means(values, width) == means


@pytest.mark.parametrize(
    ("values", "height", "drawn"),
    [([0.0, 0.5, 1.0], 2, [" ▁█", "▁██"]), ([2.0, 2.0], 1, ["▁▁"]), ([], 3, ["", "", ""])],
)
def test_bars_go_from_one_eighth_to_the_full_height_and_equal_ones_are_flat(
    values: list[float], height: int, drawn: list[str]
) -> None:
    assert bars(values, height) == drawn


def test_scene_names_whom_the_others_wait_for_and_no_order(run: RunView, make_scene: Callable[..., Scene]) -> None:
    late, order = WaitingFor(("node3",), 1.0, 10.0, "It is late."), WaitingFor((), 1.0, 10.0, "It is paused.")
    assert make_scene().waits == ""
    assert make_scene(run=replace(run, waiting=late)).waits == "node3, for 10 s"
    assert make_scene(run=replace(run, waiting=order)).waits == ""


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"state": "starting", "starts": 1, "step": 0}, "model and data loaded"),
        ({"state": "starting", "join": JoinView("founding")}, "agreeing with the other founders"),
        ({"state": "joining", "join": JoinView("a new one")}, "a new one"),
        ({"state": "training", "step": 0}, "first inner step"),
        ({"state": "training", "step": 1}, None),
        ({"state": "left", "join": JoinView("discover")}, None),
    ],
)
def test_on_its_way_is_what_a_node_does_that_does_not_train(fields: dict[str, object], words: str | None) -> None:
    said = on_its_way(make_node("node0", **fields))
    assert said == words if words is None else words in (said or "")


def test_on_its_way_has_words_for_every_state_of_the_way() -> None:
    for state in set(JoinState) - {JoinState.OUTSIDE, JoinState.MEMBER, JoinState.ENDED}:
        assert on_its_way(make_node("node0", state="starting", join=JoinView(state.value))) != state.value
