from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from zeroband.observe.events import EVENTS
from zeroband.observe.view import EventView, RunView
from zeroband.tools.demo.scene import Chronicle, Note, Scene, bars, mean_curve, names

FIELDS: dict[str, dict[str, object]] = {
    "epoch_changed": {"epoch": 2, "members": ["node1#b", "node0#a"]},
    "peer_lost": {"round": 5, "member_ids": ["node2#c"]},
    "joined": {"member_id": "node2#d", "round": 7},
    "recovered": {"round": 6, "digest": "0123456789abcdef", "took_s": 0.2},
    "fenced": {"reason": "the run went on"},
    "run_failed": {"error": "ValueError: no"},
}


def _event(kind: str, node_id: str = "node0", at_s: float = 110.0, **fields: object) -> EventView:
    return EventView(at_s, node_id, kind, {**FIELDS.get(kind, {}), **fields})


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("epoch_changed", "epoch 2: node0, node1 are in"),
        ("peer_lost", "outer step 5 goes on without node2"),
        ("joined", "node0 is back: outer step 7"),
        ("recovered", "node0 fetched the state of outer step 6 and verified it: 01234567"),
        ("fenced", "node0 was away too long"),
        ("run_failed", "node0 failed: ValueError: no"),
    ],
)
def test_chronicle_tells_an_event_in_words_at_its_time(kind: str, words: str) -> None:
    chronicle = Chronicle(started_at_s=100.0)
    chronicle.add([_event(kind)])
    (note,) = chronicle.notes
    assert note.at_s == 10.0
    assert note.text.startswith(words)


def test_chronicle_knows_the_fields_of_the_events_that_it_tells() -> None:
    assert {kind: sorted(fields) for kind, fields in FIELDS.items()} == {
        kind: sorted(EVENTS[kind].fields) for kind in FIELDS
    }


def test_chronicle_tells_once_what_several_nodes_report_or_what_it_has_read_before() -> None:
    chronicle = Chronicle(started_at_s=100.0)
    events = [_event("epoch_changed", node_id) for node_id in ("node0", "node1")]
    chronicle.add(events)
    chronicle.add(events)
    assert len(chronicle.notes) == 1
    chronicle.add([_event("epoch_changed", epoch=3)])
    assert len(chronicle.notes) == 2


def test_chronicle_tells_the_founding_once_and_each_return() -> None:
    chronicle = Chronicle(started_at_s=100.0)
    chronicle.add([_event("joined", node_id, round=0, member_id=f"{node_id}#a") for node_id in ("node0", "node1")])
    chronicle.add([_event("joined", "node1", member_id=f"node1#{i}") for i in "bc"])
    assert [note.text.split(":")[0] for note in chronicle.notes] == [
        "the nodes agree on the initial state and found the run",
        "node1 is back",
        "node1 is back",
    ]


def test_chronicle_is_silent_about_what_happens_all_the_time() -> None:
    chronicle = Chronicle(started_at_s=100.0)
    chronicle.add([_event("round_committed", round=1, epoch=1, members=[], digest="d")])
    assert chronicle.notes == ()


def test_chronicle_never_dates_a_note_before_the_beginning() -> None:
    chronicle = Chronicle(started_at_s=100.0)
    chronicle.say(99.0, "early")
    assert chronicle.notes == (Note(0.0, "early"),)


def test_names_are_nodes_in_order_without_their_incarnation() -> None:
    assert names(["b#1", "a#2"]) == "a, b"


def test_scene_step_is_that_of_the_node_that_is_furthest(make_scene: Callable[..., Scene]) -> None:
    assert make_scene().step == 40
    assert make_scene(run=RunView("demo")).step == 0


def test_scene_undisturbed_leaves_out_who_is_down_and_who_came_back(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    assert [node.node_id for node in scene.undisturbed] == ["node0", "node1", "node3"]
    back = replace(scene.run.nodes[2], starts=2)
    nodes = (*scene.run.nodes[:2], back, scene.run.nodes[3])
    scene = make_scene(run=replace(scene.run, nodes=nodes), down=frozenset())
    assert [node.node_id for node in scene.undisturbed] == ["node0", "node1", "node3"]


@pytest.mark.parametrize(
    ("curves", "width", "means"),
    [
        ([], 10, []),
        ([[]], 10, []),
        ([[3.0, 1.0]], 10, [3.0, 1.0]),
        ([[4.0, 2.0, 3.0, 1.0]], 2, [3.0, 2.0]),
        ([[4.0, 2.0], [2.0, 0.0]], 2, [3.0, 1.0]),
        ([[4.0, 2.0], [2.0]], 2, [3.0, 2.0]),
        ([[1.0, 2.0, 3.0, 4.0, 5.0]], 2, [1.5, 4.0]),
    ],
)
def test_mean_curve_is_the_mean_over_nodes_and_stretches(
    curves: list[list[float]], width: int, means: list[float]
) -> None:
    assert mean_curve(curves, width) == means


def test_bars_go_from_one_eighth_to_the_full_height() -> None:
    assert bars([0.0, 0.5, 1.0], 2) == [" ▁█", "▁██"]


def test_bars_of_equal_values_are_flat() -> None:
    assert bars([2.0, 2.0], 1) == ["▁▁"]


def test_bars_of_nothing_are_empty_lines() -> None:
    assert bars([], 3) == ["", "", ""]
