"""Every fault at every moment of a round: the others go on within the time of detection, nothing is lost or doubled.

By hand, about an hour on two cores: `./scripts/test.sh -m matrix`. `test_daily.py` is a selection of it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.arena import CUTS, DETECT_S, MOMENTS, STEADY, Arena, cut_and_heal, open_arena, restart_store
from tests.faults.clock import preload
from tests.faults.conftest import left_behind

pytestmark = [pytest.mark.matrix, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(300)]

every_moment = pytest.mark.parametrize("moment", MOMENTS)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with open_arena(tmp_path_factory.mktemp("arena")) as arena:
        yield arena


@pytest.fixture
def arena(built: Arena) -> Iterator[Arena]:
    """The arena with its steady nodes alone; what must hold is checked after the fault."""
    with built.cell():
        yield built


# -- the victim's own end -------------------------------------------------------------------------------------------


@every_moment
def test_killed_node(arena: Arena, moment: str) -> None:
    victim = arena.start_victim(moment, "SIGKILL")
    assert victim.exit_code == -signal.SIGKILL
    arena.leaves_nothing(victim)
    arena.others_go_on()


@every_moment
def test_node_that_is_asked_to_leave(arena: Arena, moment: str) -> None:
    """While leaving, the signal is the second request, which ends it at once, or part of the first if that is new."""
    victim = arena.start_victim(moment, "SIGTERM")
    ends_at_once = moment == "leaving" and victim.exit_code == 128 + signal.SIGTERM
    assert victim.exit_code == 0 or ends_at_once, victim.console_tail()
    arena.leaves_nothing(victim)
    arena.others_go_on()


@every_moment
def test_node_that_loses_a_rank_to_lack_of_memory(arena: Arena, moment: str) -> None:
    victim = arena.start_victim(moment, "OOM", node_id="wide", ranks=2)
    assert victim.exit_code not in (0, None)
    arena.leaves_nothing(victim)
    arena.others_go_on()


@every_moment
def test_frozen_node_that_wakes_up(arena: Arena, moment: str) -> None:
    victim = arena.start_victim(moment, "SIGSTOP")
    arena.others_go_on()
    arena.go_on(victim)
    arena.comes_back(victim, moment)


@every_moment
def test_two_nodes_at_once(arena: Arena, moment: str) -> None:
    first = arena.start_victim(moment, "SIGSTOP")
    second = arena.start_victim(moment, "SIGSTOP", node_id="victim2")
    first.kill()
    second.kill()
    arena.others_go_on()


@every_moment
def test_all_but_one(arena: Arena, moment: str) -> None:
    victim = arena.start_victim(moment, "SIGSTOP")
    victim.kill()
    arena.cluster.nodes[STEADY[1]].kill()
    arena.until_contributing(STEADY[0])
    arena.until_rounds(2)


# -- the links ------------------------------------------------------------------------------------------------------


@every_moment
@pytest.mark.parametrize("cut", CUTS)
def test_node_that_is_cut_off(arena: Arena, moment: str, cut: str) -> None:
    cut_and_heal(arena, moment, cut)


# -- the store ------------------------------------------------------------------------------------------------------


@every_moment
@pytest.mark.parametrize("is_empty", [False, True], ids=["with its data", "empty"])
def test_store_is_killed_and_comes_back(arena: Arena, moment: str, is_empty: bool) -> None:
    restart_store(arena, moment, is_empty=is_empty)


@every_moment
def test_store_is_silent_for_longer_than_a_lease(arena: Arena, moment: str) -> None:
    victim = arena.start_victim(moment, "SIGSTOP")
    fenced_before = len(victim.events("fenced"))
    assert arena.cluster.redis is not None
    arena.cluster.redis.pause()
    arena.go_on(victim)
    pause_ends_s = 2 * DETECT_S
    signal.sigtimedwait([], pause_ends_s)
    arena.cluster.redis.resume()
    arena.comes_back(victim, moment)
    assert len(victim.events("fenced")) == fenced_before


# -- nodes that are different ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset_s", [-300, 300])
def test_clock_that_is_off(arena: Arena, tmp_path: Path, offset_s: int) -> None:
    """Through all moments: it joins, trains, takes part, and leaves."""
    victim = arena.cluster.start(f"clock{offset_s}", env=preload(tmp_path, offset_s))
    arena.until_contributing(*STEADY, victim.node_id)
    arena.until_rounds(3)
    assert not victim.events("fenced")
    victim.terminate()
    arena.comes_back(victim, "leaving")


def test_node_that_becomes_ten_times_slower(arena: Arena) -> None:
    """Through all moments: nobody takes a slow node for a lost one."""
    victim = arena.start("slow", ["--fault.inject", "inner@+1=SLOW10"])
    arena.until_contributing(*STEADY, "slow")
    arena.until_rounds(4)
    assert arena.contributing() == {*STEADY, "slow"}
    assert not victim.events("fenced")
    victim.terminate()
    arena.comes_back(victim, "leaving")


@pytest.mark.parametrize("moment", [m for m in MOMENTS if m != "joining"])
def test_all_nodes_are_killed(moment: str, tmp_path: Path) -> None:
    """Nothing is left of them but what is on disk."""
    with Arena(tmp_path, None) as arena:
        victim = arena.start_victim(moment, "SIGSTOP")
        for node in arena.cluster.nodes.values():
            node.kill()
        assert not victim.pids
        arena.check()
        run_id = arena.cluster.run_id
    assert left_behind(run_id) == []
