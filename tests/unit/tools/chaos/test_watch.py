"""What a soak sees, with a store of prepared views and files that a test writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from zeroband.elastic.membership.records import Peer, RoundPlan, StoreTerm, Verdict, View
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.errors import StoreLost
from zeroband.tools.chaos.checks import Pulse
from zeroband.tools.chaos.effects import CLOCK_AHEAD_S
from zeroband.tools.chaos.plan import InjectedFault, Kind, PlannedFault
from zeroband.tools.chaos.watch import NodeFiles, SoakWatch, Violations

MEMBERS = ("node0#a", "node1#a", "node2#a")
CALM = View(plan=None, committed=None, alive=frozenset(MEMBERS), ready={}, votes={}, failed=None)


class PreparedStore:
    """Shows one view and one history."""

    def __init__(self) -> None:
        self.shown = CALM
        self.verdicts: list[Verdict] = []
        self.generation, self.newest = StoreTerm(1, "first"), StoreTerm(1, "first")

    def follow(self) -> None:
        self.generation = self.newest

    def view(self, round: int) -> View:
        return replace(self.shown, committed=self.verdicts[-1] if self.verdicts else None)

    def history(self) -> list[Verdict]:
        return self.verdicts


class Scene:
    """A watch, what it said, and what it looks at."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.said = run_dir, list[str]()
        self.store = PreparedStore()
        self.files = NodeFiles(run_dir, began_at_s=1000.0)
        self.watch = SoakWatch(cast(RedisStore, self.store), self.files, Violations(self.said.append))

    def write(self, node: str, name: str, records: Sequence[dict[str, Any]]) -> None:
        (self.run_dir / node).mkdir(exist_ok=True)
        with (self.run_dir / node / f"{name}.jsonl").open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)

    def look(self, at_s: float = 0.0) -> list[Verdict]:
        return self.watch.look(lambda: at_s)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def event(round: int, digest: str, at_s: float) -> dict[str, Any]:
    same = {"epoch": 1, "members": [], "weights": [], "samples": [], "progress": {"ledgers": {}}}
    return {"kind": "round_committed", "at_s": at_s, "round": round, "digest": digest, **same}


def verdict(round: int, weights: tuple[int, ...] = (1, 1, 1)) -> Verdict:
    return Verdict(RoundPlan(round + 1, 1, round, MEMBERS, weights, (4, 4, 4), (4, 4, 4)), f"result{round}")


def struck(kind: Kind, *nodes: str, at_s: float = 5.0) -> InjectedFault:
    return InjectedFault(PlannedFault(1, at_s, kind, nodes, 3.0), at_s)


def cut(one: str, *others: str) -> dict[str, Peer]:
    return {one: Peer(one, "host", 0, False, others)}


def test_digest_that_differs_in_the_events_of_one_node_is_said_at_once_with_what_happened(scene: Scene) -> None:
    scene.write("node0", "events", [event(3, "state", 1020.0)])
    scene.write("node1", "events", [event(3, "tampered", 1020.5)])
    scene.watch.read(21.0)
    (said,) = scene.said
    assert said.startswith("VIOLATION: round 3: digest is tampered on node1 and state on node0\n")
    assert "20.50 s node1 round_committed" in said
    assert scene.watch.violations.found == [said.partition("\n")[0].removeprefix("VIOLATION: ")]
    scene.watch.violations.add(scene.watch.violations.found[0], "later")
    assert scene.said == [said], "it is said once"


def test_events_that_agree_are_no_violation_and_date_from_the_beginning_of_the_soak(scene: Scene) -> None:
    for node in ("node0", "node1"):
        scene.write(node, "events", [event(3, "state", 1020.0)])
        scene.write(node, "metrics", [{"at_s": 1015.0, "step": 9}, {"at_s": 1020.0, "outer/round": 3}])
    scene.watch.read(21.0)
    assert scene.said == []
    records = scene.files.records["node1"]
    assert [record["at_s"] for record in records] == [20.0, 20.0]
    assert "kind" in records[0]


def test_rounds_that_no_node_recorded_are_a_violation_at_the_second_look(scene: Scene) -> None:
    scene.write("node0", "events", [event(0, "a", 1000.0), event(2, "c", 1020.0)])
    scene.watch.read(1.0)
    scene.watch.check_data(is_final=False)
    assert scene.said == []
    scene.watch.check_data(is_final=False)
    assert scene.watch.violations.found == ["rounds that no node recorded: 1"]


def test_look_gives_each_committed_round_once_and_notes_who_contributed(scene: Scene) -> None:
    scene.store.verdicts = [verdict(0), verdict(1)]
    assert [v.round for v in scene.look()] == [0, 1]
    scene.store.verdicts.append(verdict(2, weights=(1, 0, 1)))
    assert [v.round for v in scene.look()] == [2]
    assert scene.look() == []
    assert scene.watch.contributed == {"node0": 2, "node1": 1, "node2": 2}
    assert scene.watch.round == 2


def test_look_sees_a_round_that_was_written_twice_unless_the_store_was_struck(scene: Scene) -> None:
    scene.store.verdicts = [verdict(0), verdict(1)]
    scene.look()
    scene.store.verdicts = [verdict(0), replace(verdict(1), digest="other"), verdict(2)]
    scene.watch.is_store_up = False
    assert scene.look() == [] and scene.watch.violations.found == []
    scene.watch.is_store_up = True
    scene.look()
    assert scene.watch.violations.found[0].startswith("round 1 was committed twice")


@pytest.mark.parametrize(
    ("kind", "nodes", "after"),
    [
        (Kind.MACHINE_KILLED, ("node1",), lambda: replace(CALM, alive=frozenset({"node0#a", "node2#a"}))),
        (Kind.CUT_OFF, ("node1",), lambda: replace(CALM, peers=cut("node0#a", "node1#a"))),
        (Kind.PAIR_CUT, ("node0", "node2"), lambda: replace(CALM, peers=cut("node2#a", "node0#a"))),
        (Kind.PAIR_CUT, ("node0", "node2"), lambda: replace(CALM, alive=frozenset({"node0#a", "node1#a"}))),
    ],
)
def test_fault_is_detected_when_the_view_shows_it(
    scene: Scene, kind: Kind, nodes: tuple[str, ...], after: Callable[[], View]
) -> None:
    scene.look(4.9)
    one = struck(kind, *nodes)
    scene.watch.expect_detection(one)
    scene.look(5.1)
    assert one.detected_s is None
    scene.store.shown = after()
    scene.look(5.9)
    assert one.detected_s == 5.9
    assert not scene.watch.awaits_detection


def test_fault_is_not_detected_by_links_that_were_cut_before_or_join_others_nor_expected_of_strangers(
    scene: Scene,
) -> None:
    scene.store.shown = replace(CALM, peers=cut("node0#a", "node1#a"))
    scene.look(4.9)
    scene.watch.expect_detection(struck(Kind.MACHINE_KILLED, "node7"))
    assert not scene.watch.awaits_detection, "it is no member"
    one = struck(Kind.CUT_OFF, "node1")
    scene.watch.expect_detection(one)
    scene.store.shown = replace(CALM, peers=cut("node0#a", "node1#a", "node2#a"))
    scene.look(5.1)
    assert one.detected_s is None
    assert scene.watch.overdue(18.0, 13.0) == []
    assert scene.watch.overdue(18.1, 13.0) == [one]
    assert scene.watch.overdue(18.2, 13.0) == []


def test_healthy_node_that_hangs_is_a_violation_with_the_faults_that_last(scene: Scene) -> None:
    scene.watch.pulse = Pulse(round_s=10.0, detect_s=3.0, slack_s=5.0)
    scene.watch.pulse.advanced("node0", 1.0)
    scene.watch.check_pulse(["node0"], 18.0, [])
    assert scene.said == []
    scene.watch.check_pulse(["node0"], 20.0, ["#4 node2 cut off"])
    assert scene.said[0].startswith("VIOLATION: node0 hangs: at 20 s, no round for 19.0 s (bound 18.0 s)")
    assert "fault #4 node2 cut off" in scene.said[0]
    assert scene.watch.hangs == 1


def test_node_that_is_late_on_a_busy_host_is_starved_and_hangs_if_that_does_not_explain_it(scene: Scene) -> None:
    scene.watch.pulse = Pulse(round_s=10.0, detect_s=3.0, slack_s=5.0)
    scene.watch.pulse.advanced("node0", 1.0)
    for second in range(2, 41):
        scene.watch.starvation.note(second, {"node1": 0.25})
    for now_s in (20.0, 21.0, 22.0):  # 19 to 21 s since then, less what node1 waited: below 18 s
        scene.watch.check_pulse(["node0"], now_s, [])
    assert scene.watch.violations.found == []
    (starved,) = scene.watch.violations.starved
    assert starved.startswith("node0 finished no round for 19.0 s at 20 s (bound 18.0 s)")
    assert "4.8 s of that for a CPU" in starved
    assert scene.said == [f"STARVED, cannot judge: {starved}"]
    scene.watch.check_pulse(["node0"], 27.0, [])
    assert scene.watch.violations.found == ["node0 hangs: at 27 s, no round for 26.0 s (bound 18.0 s)"]


def test_fault_that_is_shown_late_on_a_busy_host_is_still_expected(scene: Scene) -> None:
    scene.look(4.9)
    one = struck(Kind.CUT_OFF, "node1")
    scene.watch.expect_detection(one)
    scene.watch.starvation.note(5.0, {})
    scene.watch.starvation.note(20.0, {"the store": 4.0})
    assert scene.watch.overdue(20.0, 13.0) == []
    assert scene.watch.awaits_detection and len(scene.watch.violations.starved) == 1
    assert scene.watch.overdue(23.0, 13.0) == [one]


@pytest.mark.parametrize("is_in_store", [True, False])
def test_run_that_is_complete_is_noticed_by_its_verdict_or_by_what_a_node_wrote(
    scene: Scene, is_in_store: bool
) -> None:
    scene.store.verdicts = [verdict(0)]
    scene.look(7.0)
    assert scene.watch.complete_s is None
    if is_in_store:
        scene.store.verdicts.append(replace(verdict(1), record={"progress": {"is_complete": True}}))
        scene.look(9.0)
    else:
        scene.write("node1", "events", [{"kind": "run_finished", "at_s": 1009.0, "step": 50}])
        scene.watch.read(9.5)
    assert scene.watch.complete_s == 9.0


def test_store_of_several_that_is_lost_is_left_when_a_member_says_that_it_is_at_another_one(scene: Scene) -> None:
    lost = struck(Kind.STORE_LOST)
    scene.watch.store_was_struck(lost)
    scene.store.verdicts = [verdict(0)]
    assert scene.look() == [] and scene.watch.stays_without_store(18.0, 13.0) is None
    scene.watch.store_is_back(lost)
    assert scene.look() == [], "what came back is empty"
    scene.write("node1", "events", [{"kind": "store_in_use", "at_s": 1007.5, "store": "x", "generation": 2}])
    scene.store.newest = StoreTerm(2, "second")
    scene.watch.read(8.0)
    assert lost.detected_s == 7.5 and len(scene.look()) == 1
    assert scene.watch.stays_without_store(19.0, 13.0) is None


def test_members_that_stay_without_a_store_are_told_once_and_hang_meanwhile(scene: Scene) -> None:
    scene.watch.pulse = Pulse(round_s=5.0, detect_s=3.0, slack_s=5.0)
    scene.watch.pulse.advanced("node0", 5.0)
    lost = struck(Kind.STORE_LOST)
    scene.watch.store_was_struck(lost)
    scene.watch.check_pulse(["node0"], 19.0, [])
    assert scene.watch.hangs == 1
    assert scene.watch.stays_without_store(18.1, 13.0) is lost
    assert scene.watch.stays_without_store(18.2, 13.0) is None


def test_store_that_was_stopped_too_shortly_to_be_left_is_looked_at_again(scene: Scene) -> None:
    stopped = struck(Kind.STORE_STOPPED)
    scene.watch.store_was_struck(stopped)
    scene.store.verdicts = [verdict(0)]
    assert scene.look() == []
    scene.watch.store_is_back(stopped)
    assert len(scene.look()) == 1 and stopped.detected_s is None
    assert scene.watch.stays_without_store(99.0, 13.0) is None


def test_relays_are_the_first_lines_of_those_that_are_called_and_cannot_be_dialled(scene: Scene) -> None:
    def peer(member: str, *lines: str) -> Peer:
        return Peer(member[:5], "host", 1, True, relays=lines)

    peers = {"node0#a": peer("node0#a"), "node1#a": peer("node1#a", "node0#a"), "node2#a": peer("node2#a")}
    scene.store.shown = replace(CALM, peers=peers)
    scene.look()
    assert scene.watch.relays() == frozenset(), "one alone dials all others itself"
    peers["node2#a"] = peer("node2#a", "node3#a", "node0#a")
    scene.look()
    assert scene.watch.relays() == {"node0"}, "of its lines one is there"


def test_record_of_a_clock_that_jumped_is_as_old_as_the_look_at_it(scene: Scene) -> None:
    scene.write("node0", "events", [event(1, "a", 1010.0), event(2, "b", 1020.0 + CLOCK_AHEAD_S)])
    scene.watch.read(25.0)
    assert [record["at_s"] for record in scene.files.records["node0"]] == [10.0, 25.0]


@pytest.mark.parametrize("is_held", [False, True])
def test_silent_store_is_a_violation_unless_a_node_holds_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, is_held: bool
) -> None:
    store = cast(RedisStore, scene.store)
    watch = SoakWatch(store, scene.files, Violations(scene.said.append), is_held_by_nodes=is_held)
    monkeypatch.setattr(scene.store, "view", Mock(side_effect=StoreLost("silent")))
    scene.store.newest = StoreTerm(2, "second")
    assert watch.look(lambda: 1.0) == []
    assert [line.startswith("VIOLATION: the store is up") for line in scene.said] == ([] if is_held else [True])
    assert (scene.store.generation == scene.store.newest) == is_held
