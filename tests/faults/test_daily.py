"""A selection of the matrix for every day: links, the store, leaving, lack of memory, and a node that is late."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.arena import STEADY, Arena, cut_and_heal, open_arena, restart_store
from tests.tiny_runs import ENDLESS, TINY_RUN, ForkedCluster, until

from zeroband.observe.view import node_id_of_member

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with open_arena(tmp_path_factory.mktemp("arena"), "--outer.straggler-deadline-s", "1") as arena:
        yield arena


@pytest.fixture
def arena(built: Arena) -> Iterator[Arena]:
    with built.cell():
        yield built


def test_node_that_is_cut_off_in_a_transfer_costs_the_time_of_detection_and_comes_back(arena: Arena) -> None:
    cut_and_heal(arena, "transfer50", "silent partition")
    bundles = [path for node_id in STEADY for path in arena.cluster.nodes[node_id].spec.node_dir.glob("stalls/*")]
    assert bundles
    for bundle in bundles:
        assert "round" in (bundle / "reason.txt").read_text()
        assert "in reduce_mean" in (stacks := (bundle / "stacks.rank0.txt").read_text()) or "train.py" in stacks
        assert "plan" in json.loads((bundle / "view.json").read_text())


def test_of_two_nodes_that_are_cut_off_from_one_another_one_goes_on(arena: Arena) -> None:
    cut_and_heal(arena, "inner", "from one other node")


def test_store_that_restarts_empty_gets_its_record_back(arena: Arena) -> None:
    restart_store(arena, "voted", is_empty=True)


def test_node_that_is_asked_to_leave_hands_over_its_steps_and_ends_with_0(arena: Arena) -> None:
    victim = arena.start_victim("inner", "SIGTERM")
    assert victim.exit_code == 0, victim.console_tail()
    arena.leaves_nothing(victim)
    arena.others_go_on()
    last = max((v for v in arena.history.values() if any("victim" in m for m in v.members)), key=lambda v: v.round)
    (victim_id,) = [member for member in last.members if "victim" in member]
    assert 0 < last.plan.contributors()[victim_id] < 10


def test_node_that_loses_a_rank_to_lack_of_memory_ends_whole(arena: Arena) -> None:
    victim = arena.start_victim("inner", "OOM", node_id="wide", ranks=2)
    assert victim.exit_code not in (0, None)
    arena.leaves_nothing(victim)
    arena.others_go_on()


def test_late_node_contributes_in_a_later_round(arena: Arena) -> None:
    """A step takes longer than a round and the deadline, so no end of a phase brings it into step with the others."""
    victim = arena.start("late", ["--fault.inject", "inner@+1=TAKES3"])
    arena.until(lambda: any("late" in m for v in arena.history.values() for m in v.plan.late), "it is late")
    late_since = max(arena.history)
    arena.until(lambda: arena.newest() > late_since and "late" in arena.contributing(), "it contributes after all")
    assert not victim.events("fenced")
    assert set(STEADY) <= arena.contributing()


def test_slow_node_of_two_ranks_is_back_in_step_after_it_was_late(tmp_path: Path) -> None:
    """Its ranks decide together when a round is applied, while the next one is under way in another thread."""
    graces = ("--outer.inner-steps=8", "--outer.straggler-grace=0.2", "--outer.type=diloco", *TINY_RUN, *ENDLESS)
    with ForkedCluster(tmp_path, graces, nodes=3) as cluster:
        for _ in range(2):
            cluster.start(arguments=("--fault.inject", "inner@+0=TAKES0.1"))
        slow = cluster.start("slow", ranks=2, arguments=("--fault.inject", "inner@+0=TAKES0.3"))

        def turns() -> list[bool]:
            """Whether each round counted the slow node."""
            rounds = cluster.nodes["node0"].events("round_committed")
            return ["slow" in map(node_id_of_member, event["members"]) for event in rounds if event["round"] > 0]

        until(cluster, lambda: turns().count(False) > 0, "it is late")
        late = len(turns())
        until(cluster, lambda: turns()[late:].count(True) >= 6, "it counts again and again")
        assert len(slow.events("round_committed")) >= 6
        assert not cluster.view().disagreements
