from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.unit.tools.conftest import node as make_node

from zeroband.elastic.membership.join_states import JoinState
from zeroband.observe.events import EVENTS
from zeroband.observe.view import EventView, RunView
from zeroband.tools.top.scene import Chronicle, Note, Scene, bars, in_words, mean_curve, on_its_way, waited_for

FIELDS: dict[str, dict[str, object]] = {
    "epoch_changed": {"epoch": 2, "members": ["node1#b", "node0#a"]},
    "peer_lost": {"round": 5, "member_ids": ["node2#c"]},
    "joined": {"member_id": "node2#d", "round": 7},
    "recovered": {"round": 6, "digest": "0123456789abcdef", "took_s": 0.2},
    "fenced": {"reason": "the run went on"},
    "run_failed": {"error": "ValueError: no"},
    "round_retried": {"round": 4, "reason": "node1 is gone"},
    "transfer_stalled": {
        "round": 4,
        "waiting_for": ["node1#a"],
        "since_s": 12.4,
        "at_byte": 3,
        "of_bytes": 9,
        "reason": "silence",
    },
    "blamed": {
        "round": 4,
        "member_ids": ["node1#a"],
        "reason": "other bytes",
        "is_lie": True,
        "consequence": "out",
    },
    "update_refused": {"round": 4, "reason": "not finite"},
    "payload_refused": {"round": 4, "member_id": "node1#a", "reason": "no payload"},
    "impostor": {"member_id": "node1#a", "where": "10.0.0.9:4711"},
    "paused": {"round": 4},
    "resumed": {"round": 4, "paused_s": 9.0},
    "drained": {"round": 4},
    "rolled_back": {"round": 4, "step": 30, "digest": "d", "has_inner": True, "skipped": {}},
    "resumed_from": {"round": 4, "step": 30, "digest": "d", "took_s": 1.0, "has_inner": True},
    "run_abandoned": {"round": 4, "members": [], "wait_s": 7.0, "until": 9.0, "then": "ends", "type": "x"},
    "checkpoint_committed": {"round": 4, "step": 30, "bytes": 1_500_000, "took_s": 1.0},
    "checkpoint_failed": {"round": 4, "step": 30, "reason": "no room"},
    "evaluated": {"step": 30, "loss": 2.5, "bits_per_byte": None, "by_source": {}, "took_s": 1.0},
    "left": {"reason": "asked"},
    "run_finished": {"step": 120},
}


def _event(kind: str, node_id: str = "node0", at_s: float = 110.0, **fields: object) -> EventView:
    return EventView(at_s, node_id, kind, {**FIELDS.get(kind, {}), **fields})


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("epoch_changed", "epoch 2: node0, node1 are in"),
        ("peer_lost", "outer step 5 goes on without node2"),
        ("joined", "node0 is in: outer step 7"),
        ("recovered", "node0 fetched the state of outer step 6 and verified it: 01234567"),
        ("fenced", "node0 was away too long"),
        ("run_failed", "node0 failed: ValueError: no"),
        ("round_retried", "outer step 4 is tried again: node1 is gone"),
        ("transfer_stalled", "node0 gets nothing from node1 for 12.4 s, in outer step 4"),
        ("update_refused", "outer step 4 leaves out what node0 learned: not finite"),
        ("payload_refused", "outer step 4 leaves out what node1 learned: no payload"),
        ("impostor", "another node posed as node1 (10.0.0.9:4711), without effect"),
        ("paused", "paused before outer step 4"),
        ("resumed", "goes on with outer step 4"),
        ("drained", "node0 leaves after outer step 4"),
        ("rolled_back", "the run went back to the checkpoint of step 30"),
        ("resumed_from", "the run begins again on the checkpoint of step 30"),
        ("run_abandoned", "no member of the run lives; node0 waits 7 s"),
        ("checkpoint_committed", "checkpoint of step 30 is durable, 1.5 MB"),
        ("checkpoint_failed", "checkpoint of step 30 failed on node0: no room"),
        ("evaluated", "held out at step 30: loss 2.5"),
        ("left", "node0 left: asked"),
        ("run_finished", "finished: all 120 inner steps are done"),
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
        "node1 is in",
        "node1 is in",
    ]


def test_chronicle_is_silent_about_what_happens_all_the_time() -> None:
    chronicle = Chronicle(started_at_s=100.0)
    chronicle.add([_event("round_committed", round=1, epoch=1, members=[], digest="d")])
    assert chronicle.notes == ()


def test_chronicle_never_dates_a_note_before_the_beginning() -> None:
    chronicle = Chronicle(started_at_s=100.0)
    chronicle.say(99.0, "early")
    assert chronicle.notes == (Note(0.0, "early"),)


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


def test_chronicle_passes_over_events_of_another_version() -> None:
    chronicle = Chronicle(started_at_s=100.0)
    chronicle.add([EventView(110.0, "node0", "epoch_changed", {}), EventView(110.0, "node0", "new_kind", {})])
    assert chronicle.notes == ()


def test_chronicle_keeps_the_newest_notes_and_counts_all() -> None:
    chronicle = Chronicle(started_at_s=0.0)
    for number in range(1000):
        chronicle.say(float(number), f"note {number}")
    assert chronicle.said == 1000
    assert len(chronicle.notes) < 1000
    assert chronicle.notes[-1].text == "note 999"


def test_waited_for_is_who_stays_behind_those_that_stand_still(run: RunView) -> None:
    front, other, _, behind = run.nodes
    nodes = (replace(front, silent_s=10.0), replace(other, silent_s=20.0), replace(behind, step=36, silent_s=1.0))
    stuck = replace(run, nodes=nodes)
    assert waited_for(stuck) == (("node3",), 10.0)
    assert in_words(waited_for(stuck)) == "node3, for 10 s"


@pytest.mark.parametrize(
    ("step", "silent_s", "tokens"),
    [(40, 10.0, 0), (36, 4.0, 0), (36, 10.0, 40 * 2100 * 4)],
    ids=["all as far", "not still for long", "its steps take as long"],
)
def test_waited_for_is_nobody_where_nobody_waits(run: RunView, step: int, silent_s: float, tokens: int) -> None:
    front, other, _, behind = (replace(node, silent_s=silent_s, tokens=tokens) for node in run.nodes)
    nodes = (front, other, replace(behind, step=step))
    assert waited_for(replace(run, nodes=nodes)) is None
    assert in_words(None) == ""


def test_scene_counts_no_node_of_another_run(run: RunView, make_scene: Callable[..., Scene]) -> None:
    ours = [replace(node, founding="second", founded_at_s=50.0) for node in run.nodes]
    other = replace(ours[0], node_id="node9", step=90, founding="first", founded_at_s=1.0)
    scene = make_scene(run=replace(run, nodes=(*ours, other)))
    assert scene.step == 40
    assert "node9" not in [node.node_id for node in scene.undisturbed]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"state": "starting", "starts": 1, "step": 0}, "knows its model"),
        ({"state": "starting", "join_state": "founding"}, "agrees with the other founders"),
        ({"state": "recovering", "join_state": "a new one"}, "a new one"),
        ({"state": "training", "step": 0}, "first inner step"),
        ({"state": "training", "step": 1}, None),
        ({"state": "left", "join_state": "discover"}, None),
    ],
)
def test_on_its_way_is_what_a_node_does_that_does_not_train(fields: dict[str, object], words: str | None) -> None:
    said = on_its_way(make_node("node0", **fields))
    assert said == words if words is None else words in (said or "")


def test_on_its_way_has_words_for_every_state_of_the_way() -> None:
    for state in set(JoinState) - {JoinState.OUTSIDE, JoinState.MEMBER, JoinState.ENDED}:
        assert on_its_way(make_node("node0", state="starting", join_state=state.value)) != state.value
