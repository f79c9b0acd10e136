"""Every fault at every moment of a round: the others go on within the time of detection, nothing is lost or doubled.

By hand, about half an hour on two cores: `./scripts/test.sh -m matrix`. What runs every day is a selection of it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.faults.arena import DETECT_S, MOMENTS, STEADY, Arena
from tests.faults.clock import preload
from tests.faults.conftest import left_behind

from zeroband.cluster import Network, NodeProcess
from zeroband.cluster.network import STORE

pytestmark = [pytest.mark.matrix, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(300)]

SLACK_S = 8.0
"""What a survivor may need beyond `fault.detect_s`; generous, because its cores may be busy with other things."""

every_moment = pytest.mark.parametrize("moment", MOMENTS)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    folder = tmp_path_factory.mktemp("arena")
    if Network.obstacle():
        with Arena(folder, None) as arena:
            yield arena
    else:
        with Network() as network, Arena(folder, network) as arena:
            yield arena
    assert left_behind(arena.cluster.run_id) == []


@pytest.fixture
def arena(built: Arena) -> Iterator[Arena]:
    """The arena with its steady nodes alone; what must hold is checked after the fault."""
    for node_id in [node.node_id for node in built.cluster.running if node.node_id not in STEADY]:
        built.end(node_id)
    for node_id in STEADY:
        if not built.cluster.nodes[node_id].is_running:
            built.start(node_id)
    built.until_contributing(*STEADY)
    since_round = built.newest()
    yield built
    built.until_rounds(1)
    built.check()
    assert built.lost_s(since_round) < DETECT_S + SLACK_S


@pytest.fixture
def network(arena: Arena) -> Iterator[Network]:
    if arena.network is None:
        pytest.skip(f"no network of its own: {Network.obstacle()}")
    yield arena.network
    arena.network.heal_all()


def others_go_on(arena: Arena) -> None:
    arena.until_contributing(*STEADY)
    arena.until_rounds(2)


def comes_back(arena: Arena, victim: NodeProcess, moment: str) -> None:
    """A victim that lives contributes again; one that was leaving has left, as it was asked to."""
    if moment == "leaving":
        arena.until(lambda: not victim.is_running, f"{victim.node_id} leaves")
        assert victim.exit_code == 0, victim.console_tail()
    else:
        arena.until_contributing(*STEADY, victim.node_id)


def leaves_nothing(arena: Arena, victim: NodeProcess) -> None:
    arena.until(lambda: not victim.pids and not victim.spec.memory.exists(), f"nothing is left of {victim.node_id}")


# -- the victim's own end -------------------------------------------------------------------------------------------


@every_moment
def test_killed_node(arena: Arena, moment: str) -> None:
    victim = arena.start_victim(moment, "SIGKILL")
    assert victim.exit_code == -signal.SIGKILL
    leaves_nothing(arena, victim)
    others_go_on(arena)


@every_moment
def test_node_that_is_asked_to_leave(arena: Arena, moment: str) -> None:
    """While leaving, the signal is the second one: it ends at once."""
    victim = arena.start_victim(moment, "SIGTERM")
    assert (victim.exit_code == 0) == (moment != "leaving"), victim.console_tail()
    leaves_nothing(arena, victim)
    others_go_on(arena)


@every_moment
def test_node_that_loses_a_rank_to_lack_of_memory(arena: Arena, moment: str) -> None:
    victim = arena.start_victim(moment, "OOM", node_id="wide", ranks=2)
    assert victim.exit_code not in (0, None)
    leaves_nothing(arena, victim)
    others_go_on(arena)


@every_moment
def test_frozen_node_that_wakes_up(arena: Arena, moment: str) -> None:
    victim = arena.start_victim(moment, "SIGSTOP")
    others_go_on(arena)
    arena.go_on(victim)
    comes_back(arena, victim, moment)


@every_moment
def test_two_nodes_at_once(arena: Arena, moment: str) -> None:
    first = arena.start_victim(moment, "SIGSTOP")
    second = arena.start_victim(moment, "SIGSTOP", node_id="victim2")
    first.kill()
    second.kill()
    others_go_on(arena)


@every_moment
def test_all_but_one(arena: Arena, moment: str) -> None:
    victim = arena.start_victim(moment, "SIGSTOP")
    victim.kill()
    arena.cluster.nodes[STEADY[1]].kill()
    arena.until_contributing(STEADY[0])
    arena.until_rounds(2)


# -- the links ------------------------------------------------------------------------------------------------------

CUTS: dict[str, Callable[[Network], object]] = {
    "silent partition": lambda network: network.cut_off("victim"),
    "one way, outwards": lambda network: network.drop_outgoing("victim"),
    "one way, inwards": lambda network: network.drop_incoming("victim"),
    "link down": lambda network: network.link_down("victim"),
    "from one other node": lambda network: network.cut_between("victim", STEADY[0]),
    "from the store": lambda network: network.cut_between("victim", STORE),
}


@every_moment
@pytest.mark.parametrize("cut", CUTS)
def test_node_that_is_cut_off(arena: Arena, network: Network, moment: str, cut: str) -> None:
    victim = arena.start_victim(moment, "SIGSTOP")
    CUTS[cut](network)
    arena.go_on(victim)
    if cut == "from one other node":  # one of the two goes on; which one, the rules say
        arena.until(lambda: not {"victim", STEADY[0]} <= arena.contributing(), "they do not take part together")
        arena.until_rounds(2)
    else:
        others_go_on(arena)
    if cut == "link down":
        network.link_up("victim")
    network.heal_all()
    comes_back(arena, victim, moment)


# -- the store ------------------------------------------------------------------------------------------------------


@every_moment
@pytest.mark.parametrize("is_empty", [False, True], ids=["with its data", "empty"])
def test_store_is_killed_and_comes_back(arena: Arena, moment: str, is_empty: bool) -> None:
    victim = arena.start_victim(moment, "SIGSTOP")
    assert arena.cluster.redis is not None
    arena.cluster.redis.stop()
    arena.go_on(victim)
    arena.cluster.redis.start(empty=is_empty)
    comes_back(arena, victim, moment)
    arena.until_rounds(2)


@every_moment
def test_store_is_silent_for_longer_than_a_lease(arena: Arena, moment: str) -> None:
    victim = arena.start_victim(moment, "SIGSTOP")
    assert arena.cluster.redis is not None
    arena.cluster.redis.pause()
    arena.go_on(victim)
    pause_ends_s = 2 * DETECT_S
    signal.sigtimedwait([], pause_ends_s)
    arena.cluster.redis.resume()
    comes_back(arena, victim, moment)
    assert not victim.events("fenced")


# -- nodes that are different ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset_s", [-300, 300])
def test_clock_that_is_off(arena: Arena, tmp_path: Path, offset_s: int) -> None:
    """Through all moments: it joins, trains, takes part, and leaves."""
    victim = arena.cluster.start(f"clock{offset_s}", env=preload(tmp_path, offset_s))
    arena.until_contributing(*STEADY, victim.node_id)
    arena.until_rounds(3)
    assert not victim.events("fenced")
    victim.terminate()
    comes_back(arena, victim, "leaving")


def test_node_that_becomes_ten_times_slower(arena: Arena) -> None:
    """Through all moments: nobody takes a slow node for a lost one."""
    victim = arena.start("slow", ["--fault.inject", "inner@+1=SLOW10"])
    arena.until_contributing(*STEADY, "slow")
    arena.until_rounds(4)
    assert arena.contributing() == {*STEADY, "slow"}
    assert not victim.events("fenced")
    victim.terminate()
    comes_back(arena, victim, "leaving")


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
