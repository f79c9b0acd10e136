"""The phases of a soak, with a cluster and a watch that only stand for the real ones, and a clock that jumps."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest

from zeroband.tools.chaos import soak as soak_module
from zeroband.tools.chaos.checks import Pulse
from zeroband.tools.chaos.options import ChaosOptions
from zeroband.tools.chaos.plan import InjectedFault, Kind, PlannedFault
from zeroband.tools.chaos.soak import Soak
from zeroband.tools.chaos.starvation import Starvation
from zeroband.tools.chaos.stores import StoresOfNodes
from zeroband.tools.chaos.watch import Violations


class Scene:
    """A soak of two nodes, of which one was cut off and healed; `clock_s` goes on with every pause."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, round_s: float = 10.0, stores: StoresOfNodes | None = None
    ) -> None:
        self.clock_s, self.is_stopped = 0.0, False
        monkeypatch.setattr(soak_module.time, "sleep", self._pause)
        pulse = Pulse(round_s=round_s, detect_s=3.0, slack_s=10.0)
        self.watch = MagicMock(violations=Violations(lambda line: None), awaits_detection=False, pulse=pulse)
        self.watch.look.return_value, self.watch.overdue.return_value, self.watch.context.return_value = [], [], ""
        self.watch.complete_s, self.watch.starvation = None, Starvation()
        self.watch.is_too_late.side_effect = lambda _, from_s, bound_s, now_s, names=(): now_s - from_s > bound_s
        node: Any = SimpleNamespace(
            is_running=True, exit_code=None, pids=(), console_tail=lambda lines: "", kill=Mock()
        )
        self.cluster = cluster = MagicMock(nodes={"node0": node, "node1": node}, running=[])
        self.stores: Any = MagicMock(pids=[os.getpid()]) if stores is None else stores
        cluster.store_place = lambda node: f"host:{node.removeprefix('node')}"
        if stores is not None:
            stores.cluster = cluster
        self.env_faults = MagicMock()
        self.watch.relays.return_value, self.watch.stays_without_store.return_value = frozenset[str](), None
        options = ChaosOptions((), slack_s=10.0, keep_undisturbed=1)
        say, is_stopped = lambda line: None, lambda: self.is_stopped
        self.soak = Soak(
            *(cluster, self.stores, self.watch, options),
            detect_s=3.0,
            env_faults=self.env_faults,
            now=lambda: self.clock_s,
            is_stopped=is_stopped,
            say=say,
        )
        self.struck = InjectedFault(PlannedFault(1, 0.0, Kind.CUT_OFF, ("node0",), 5.0), at_s=-5.0, undone_s=0.0)
        self.soak.course.struck.append(self.struck)

    def _pause(self, _seconds: float) -> None:
        self.clock_s += 10.0

    def healed(self) -> Scene:
        """With both nodes back, in round 4."""
        self.struck.over_s["node0"] = 1.0
        self.watch.round, self.watch.contributed = 4, {"node0": 4, "node1": 4}
        return self


@pytest.mark.parametrize("round_s", [10.0, 600.0])
def test_node_that_never_comes_back_is_a_violation_however_long_rounds_are(
    monkeypatch: pytest.MonkeyPatch, round_s: float
) -> None:
    scene = Scene(monkeypatch, round_s=round_s)
    scene.soak.await_recovery()
    (violation,) = scene.watch.violations.found
    assert violation == f"not back {120 + 2 * (round_s + 13):.0f} s after {scene.struck.fault}"


def test_fault_that_was_never_undone_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.struck.undone_s = None
    monkeypatch.setattr(scene.soak, "_undo", lambda one: None)
    scene.soak.await_recovery()
    assert len(scene.watch.violations.found) == 1
    stopped = Scene(monkeypatch)
    stopped.is_stopped = True
    stopped.soak.await_recovery()
    assert stopped.watch.violations.found == [], "it does not say who would have come back"


def ended(exit_code: int) -> Any:
    return SimpleNamespace(is_running=False, exit_code=exit_code, pids=(), console_tail=lambda lines: "")


def test_nodes_that_end_because_the_run_is_complete_are_no_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch).healed()
    scene.cluster.nodes["node1"] = ended(0)

    def read(now_s: float) -> None:
        scene.watch.complete_s = now_s

    scene.watch.read.side_effect = read
    scene.soak.run_faults([], 60.0)
    assert scene.watch.violations.found == []
    assert scene.soak.course.struck == [scene.struck]
    scene.cluster.restart.assert_not_called()


def test_node_that_ends_by_itself_before_is_a_violation_and_no_planned_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch).healed()
    scene.cluster.nodes["node1"] = ended(1)
    scene.soak.run_faults([], 15.0)
    assert scene.watch.violations.found == ["node1 ended by itself with exit code 1"]
    assert [one.fault.kind for one in scene.soak.course.struck] == [Kind.CUT_OFF, Kind.ENDED]
    assert scene.soak.course.planned == [scene.struck]


def test_phase_without_a_whole_round_gives_no_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    assert scene.soak.run_baseline(30.0) is None
    assert scene.soak.course.calm_rounds == 0


def test_relay_that_is_in_use_is_killed_in_place_of_the_node_that_the_plan_drew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch).healed()
    scene.soak.run_faults([PlannedFault(1, 0.0, Kind.RELAY_KILLED, ("node0",), 50.0)], 20.0)
    assert len(scene.soak.course.struck) == 1, "nobody talks through another one"
    scene.watch.relays.return_value = frozenset({"node1"})
    scene.soak.run_faults([PlannedFault(1, 0.0, Kind.RELAY_KILLED, ("node0",), 50.0)], 20.0)
    assert scene.soak.course.struck[-1].fault.nodes == ("node1",)


def test_store_of_several_is_struck_where_it_is_in_use_and_nobody_gets_more_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch).healed()
    scene.watch.store_address = "unix:///second"
    store = scene.stores.at.return_value
    scene.watch.pulse.advanced("node1", 0.0)
    scene.soak.run_faults([PlannedFault(1, 0.0, Kind.STORE_LOST, (), 15.0)], 40.0)
    scene.stores.at.assert_called_once_with("unix:///second")
    store.stop.assert_called_once()
    store.start.assert_called_once_with(empty=True)
    assert scene.watch.pulse.hung(["node1"], 41.0) == {"node1": 41.0}, "its members go to another store meanwhile"


def test_members_that_stay_without_a_store_are_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch).healed()
    lost = InjectedFault(PlannedFault(2, 0.0, Kind.STORE_LOST, (), 15.0), at_s=0.0)
    scene.watch.stays_without_store.side_effect = [lost, None, None, None]
    scene.soak.run_faults([], 25.0)
    assert scene.watch.violations.found == ["no other store is in use 13 s after #2 store lost for 15.0 s"]


def test_node_that_holds_the_store_in_use_is_killed_in_place_of_the_one_that_the_plan_drew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch, stores=StoresOfNodes(["node0", "node1"])).healed()
    scene.watch.store_address = "node://host:1"
    scene.soak.run_faults([PlannedFault(1, 0.0, Kind.HOLDER_KILLED, ("node0",), 50.0)], 20.0)
    assert scene.soak.course.struck[-1].fault.nodes == ("node1",)
    scene.watch.expect_detection.assert_not_called()  # its lease goes with the store


def test_node_that_has_not_come_back_keeps_its_descriptors_until_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, gone = Scene(monkeypatch), PlannedFault(1, 0.0, Kind.DESCRIPTORS_GONE, ("node0",), 5.0)
    scene.watch.round, scene.watch.contributed = 4, {"node0": 3, "node1": 4}
    scene.soak.run_faults([gone], 20.0)
    assert scene.soak.course.planned == [scene.struck]
    scene.healed().soak.run_faults([gone], 20.0)
    scene.env_faults.set.assert_any_call("node0", Kind.DESCRIPTORS_GONE, is_on=True)


def test_clock_that_jumps_is_not_waited_for_to_be_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch).healed()
    scene.soak.run_faults([PlannedFault(1, 0.0, Kind.CLOCK_JUMPS, ("node0",), 5.0)], 20.0)
    scene.watch.expect_detection.assert_not_called()
    scene.env_faults.set.assert_any_call("node0", Kind.CLOCK_JUMPS, is_on=True)
    scene.env_faults.set.assert_called_with("node0", Kind.CLOCK_JUMPS, is_on=False)
