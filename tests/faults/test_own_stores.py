"""Runs whose members hold the stores themselves: the node whose store is in use is lost for good, and others come."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.arena import TINY
from tests.faults.test_several_stores import generation, newest, reach_round, require_one_history, told
from tests.integration import dropin_peer
from tests.integration.peers import Peers
from tests.stores import free_port
from tests.tiny_runs import ForkedCluster

from zeroband.elastic.store.local_server import RedisServer, find_redis_server
from zeroband.node.processes import pids_with
from zeroband.tools.cluster import LocalCluster
from zeroband.tools.cluster.network import Network

NODES = 3


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """Three nodes that train, each with a store."""
    with ForkedCluster(tmp_path / "runs", arguments(tmp_path), nodes=NODES, store_url="nodes") as cluster:
        for _ in range(NODES):
            cluster.start()
        reach_round(cluster, "node0", 3, members=NODES)
        yield cluster


def arguments(tmp_path: Path) -> tuple[str, ...]:
    return (*TINY, "--data.cache-dir", str(tmp_path / "cache"))


def holder(cluster: LocalCluster, node: str) -> str:
    """The node that holds the store which a node uses."""
    place = told(cluster.run_dir / node, "store_in_use")[-1]["store"].removeprefix("node://")
    return next(other for other in cluster.nodes if cluster.store_place(other) == place)


def store_pid(cluster: LocalCluster, node: str) -> int:
    """The process of the store that a node holds."""
    ours = set(pids_with("ZERO_BAND_RUN__ID", cluster.run_id)) & set(pids_with("ZERO_BAND_NODE__ID", node))
    lists = [listed for pid in ours for listed in Path(f"/proc/{pid}/task").glob("*/children")]
    children = {int(pid) for listed in lists for pid in listed.read_text().split()}
    (server,) = (pid for pid in children if Path(f"/proc/{pid}/exe").resolve() == find_redis_server().resolve())
    return server


def require_moved(cluster: LocalCluster, *nodes: str, after: int = 1) -> None:
    """These nodes use a later store than that of a generation, and the same one.

    Its number says how often members promised one: more than once where some of them were slow to hear of it.
    """
    found = {generation(cluster.run_dir / node) for node in nodes}
    assert len(found) == 1 and min(found) > after, found


def committed_at_s(cluster: LocalCluster, node: str) -> dict[int, float]:
    return {event["round"]: event["at_s"] for event in told(cluster.run_dir / node, "round_committed")}


@pytest.mark.soak
def test_run_outlives_the_node_whose_store_it_uses(cluster: LocalCluster) -> None:
    """The others go on with the store of another one, and a node that knows a survivor alone gets in."""
    lost = holder(cluster, "node0")
    one, other = (node for node in cluster.nodes if node != lost)
    before, killed_at_s = newest(cluster, one), time.time()
    cluster.nodes[lost].kill()
    reach_round(cluster, one, before + 4, members=2)
    moved_at_s = told(cluster.run_dir / one, "store_in_use")[-1]["at_s"]
    next_commit_at_s = min(at_s for at_s in committed_at_s(cluster, one).values() if at_s > moved_at_s)
    print(f"moved after {moved_at_s - killed_at_s:.1f} s, next round after {next_commit_at_s - killed_at_s:.1f} s")
    require_moved(cluster, one, other)
    assert not told(cluster.run_dir / one, "fenced") and not told(cluster.run_dir / other, "fenced")
    idle = next(node for node in (one, other) if node != holder(cluster, one))
    peers = json.dumps([cluster.store_place(idle)])
    cluster.start("late", env={"ZERO_BAND_STORE__PEERS": peers, "ZERO_BAND_ELASTIC__START_NODES": "1"})
    reach_round(cluster, "late", newest(cluster, one) + 2, members=3)
    require_moved(cluster, "late", one)
    require_one_history(cluster, *cluster.nodes)


@pytest.mark.soak
def test_run_goes_on_with_the_store_of_a_member_that_came_later(cluster: LocalCluster) -> None:
    """All founders' stores are lost, one after the other, and those who are left know one another's."""
    for number in range(NODES):
        cluster.start(f"late{number}", env={"ZERO_BAND_ELASTIC__START_NODES": "1"})
    reach_round(cluster, "late0", newest(cluster, "node0") + 3, members=2 * NODES)
    for number in range(NODES):
        cluster.nodes[f"node{number}"].kill()
        reach_round(cluster, "late0", newest(cluster, "late0") + 3, members=2 * NODES - 1 - number)
    assert holder(cluster, "late0").startswith("late")
    require_one_history(cluster, *cluster.nodes)


@pytest.mark.soak
def test_node_that_is_asked_to_leave_takes_its_store_with_it(cluster: LocalCluster) -> None:
    """The others see its last round, and go on without one that was opened again."""
    left = holder(cluster, "node0")
    one, other = (node for node in cluster.nodes if node != left)
    cluster.nodes[left].terminate()
    assert cluster.nodes[left].wait(60.0) == 0
    reach_round(cluster, one, newest(cluster, one) + 3, members=2)
    require_moved(cluster, one, other)
    require_one_history(cluster, *cluster.nodes)


@pytest.mark.soak
def test_trainer_that_is_started_again_brings_an_empty_store_and_comes_back(tmp_path: Path) -> None:
    """Its address is that of the store which the run used before, and its list begins with that."""
    with ForkedCluster(tmp_path / "runs", arguments(tmp_path), nodes=NODES, store_url="nodes") as cluster:
        for _ in range(NODES):
            cluster.start(env={"PET_MAX_RESTARTS": "1"})
        reach_round(cluster, "node0", 3, members=NODES)
        crashed = holder(cluster, "node0")
        other = next(node for node in cluster.nodes if node != crashed)
        cluster.nodes[crashed].signal_rank(0, signal.SIGKILL)
        cluster.wait_until(lambda _: len(told(cluster.run_dir / crashed, "joined")) == 2, timeout_s=120)
        reach_round(cluster, crashed, newest(cluster, other) + 2, members=NODES)
        require_moved(cluster, *cluster.nodes)
        require_one_history(cluster, *cluster.nodes)


@pytest.mark.soak
def test_store_that_dies_alone_costs_no_member_and_serves_again(cluster: LocalCluster) -> None:
    """More often than there are nodes, so that one is used that had died."""
    for _ in range(NODES + 1):
        before = generation(cluster.run_dir / "node0")
        os.kill(store_pid(cluster, holder(cluster, "node0")), signal.SIGKILL)
        reach_round(cluster, "node0", newest(cluster, "node0") + 3, members=NODES)
        require_moved(cluster, *cluster.nodes, after=before)
    assert not any(told(cluster.run_dir / node, "fenced") for node in cluster.nodes)
    require_one_history(cluster, *cluster.nodes)


@pytest.mark.soak
@pytest.mark.skipif(Network.obstacle() != "", reason=Network.obstacle())
def test_cut_of_nodes_with_stores_leaves_one_history(tmp_path: Path) -> None:
    """The two whose store it is wait while the three go on with one of theirs, which its token lets them into."""
    more, fewer = ("node2", "node3", "node4"), ("node0", "node1")
    more_arguments = ("--fault.grace-s=4", "--run.token=a token that nobody guesses")
    env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    with Network() as network:
        cluster = ForkedCluster(
            *(tmp_path / "runs", (*arguments(tmp_path), *more_arguments)),
            nodes=5,
            store_url="nodes",
            network=network,
            env=env,
        )
        with cluster:
            for node in (*fewer, *more):
                cluster.start(node)
            reach_round(cluster, more[0], 2, members=5)
            assert holder(cluster, more[0]) in fewer
            for one in more:
                for other in fewer:
                    network.cut_between(one, other)
            begun = newest(cluster, more[0])
            reach_round(cluster, more[0], begun + 3, members=3)
            assert newest(cluster, fewer[0]) <= begun + 1, "two of five went on"
            network.heal_all()
            reach_round(cluster, more[0], newest(cluster, more[0]) + 1, members=5)
            require_one_history(cluster, *cluster.nodes)


@pytest.mark.soak
def test_node_with_the_store_in_use_ends_last(tmp_path: Path) -> None:
    """No other one is left without the verdict of the last round."""
    end = ("--train.total-steps", "60")
    with ForkedCluster(tmp_path / "runs", (*arguments(tmp_path), *end), nodes=2, store_url="nodes") as cluster:
        for _ in range(2):
            cluster.start()
        assert set(cluster.wait(timeout_s=120).values()) == {0}, cluster.describe()
        assert newest(cluster, "node0") == newest(cluster, "node1") == 12
        assert generation(cluster.run_dir / "node0") == generation(cluster.run_dir / "node1") == 1


@pytest.mark.soak
def test_node_that_comes_while_a_store_came_back_empty_founds_nothing(tmp_path: Path) -> None:
    """Members live, and the store in use is there again at its address, without its memory."""
    with RedisServer() as first, RedisServer() as second:
        urls = f"{first.url} {second.url}"
        with ForkedCluster(tmp_path / "runs", arguments(tmp_path), nodes=NODES, store_url=urls) as cluster:
            for _ in range(NODES):
                cluster.start()
            reach_round(cluster, "node0", 3, members=NODES)
            cluster.start("late", env={"ZERO_BAND_ELASTIC__START_NODES": "1"})
            first.stop()
            first.start(empty=True)
            reach_round(cluster, "late", newest(cluster, "node0") + 2, members=NODES + 1)
            require_moved(cluster, "node0", "node1", "node2", "late")
            assert min(event["round"] for event in told(cluster.run_dir / "late", "round_committed")) > 0
            require_one_history(cluster, *cluster.nodes)


@pytest.mark.soak
def test_loops_of_their_own_go_on_when_the_peer_is_killed_whose_store_they_use(tmp_path: Path) -> None:
    """Peer to peer: no Redis but the peers' own."""
    ports = {name: free_port() for name in "abc"}
    peers = Peers(tmp_path, "nodes", Path(dropin_peer.__file__), ("--total-steps", "60"))
    try:
        for number, name in enumerate(ports):
            settings = {
                "ZERO_BAND_ELASTIC__START_NODES": "3",
                "ZERO_BAND_STORE__PEERS": json.dumps([f"127.0.0.1:{ports[known]}" for known in "ab"]),
                "ZERO_BAND_NODE__PORT": str(ports[name]),
            }
            peers.start(name, "--data", str(number), settings=settings)
        peers.until(lambda: all(len(peers.rounds(name)) > 4 for name in ports), "some rounds")
        lost = peers.running.pop("a")
        lost.kill()
        lost.wait()
        assert [peers.end(name) for name in "bc"] == [0, 0], peers.log("b") + peers.log("c")
    finally:
        peers.kill()
    rounds = [{event["round"]: event["digest"] for event in peers.rounds(name)} for name in "bc"]
    assert rounds[0] == rounds[1] and max(rounds[0]) == 30
    assert len(peers.rounds("b")[-1]["members"]) == 2
