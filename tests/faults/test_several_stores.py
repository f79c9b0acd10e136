"""Runs that have several stores: the one in use dies for good, or a cut leaves it to the fewer members."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.faults.arena import TINY
from tests.integration import dropin_peer
from tests.integration.peers import Peers
from tests.tiny_runs import ForkedCluster

from zeroband.elastic.store.local_server import RedisServer
from zeroband.tools.cluster import LocalCluster
from zeroband.tools.cluster.network import Network
from zeroband.tools.data.audit import audit, read_rounds

NODES = 3
ARGUMENTS = ("@debug/diloco", "--fault.detect-s=2", "--train.total-steps=60", "--outer.inner-steps=10")


def told(node_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind that a node wrote."""
    path = node_dir / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def generation(node_dir: Path) -> int:
    """Of the store that a node uses."""
    return max((event["generation"] for event in told(node_dir, "store_in_use")), default=0)


@pytest.mark.soak
def test_members_go_on_with_another_store_when_theirs_dies_for_good(tmp_path: Path) -> None:
    """No round is opened without one of them, none is done twice, and all end with one state."""
    with RedisServer() as first, RedisServer() as second:
        urls = f"{first.url} {second.url}"
        with ForkedCluster(tmp_path, ARGUMENTS, nodes=NODES, store_url=urls) as cluster:
            for _ in range(NODES):
                cluster.start()
            cluster.wait_until(lambda run: (run.round or 0) >= 2, timeout_s=90)
            before = cluster.view().round or 0
            first.stop()
            cluster.wait_until(lambda run: (run.round or 0) >= before + 2, timeout_s=90)
            codes = cluster.wait(timeout_s=180)
            assert set(codes.values()) == {0}, cluster.describe()
            rounds = [told(cluster.run_dir / node, "round_committed") for node in cluster.nodes]
            digests = [{event["round"]: event["digest"] for event in committed} for committed in rounds]
            assert digests[0] == digests[1] == digests[2] and len(digests[0]) == len(rounds[0])
            assert {tuple(event["members"]) for event in rounds[0]} == {tuple(rounds[0][0]["members"])}
            assert [event["progress"]["inner_step"] for event in rounds[0]] == [10 * r for r in range(len(rounds[0]))]
            assert all(generation(cluster.run_dir / node) == 2 for node in cluster.nodes), cluster.describe()
            assert not any(told(cluster.run_dir / node, "fenced") for node in cluster.nodes), cluster.describe()


@pytest.mark.soak
def test_loops_of_their_own_go_on_with_the_store_of_another_peer(tmp_path: Path) -> None:
    """Two peers each of which holds a store; the one in use is killed before their last inner step."""
    hold, steps = tmp_path / "hold", ("--total-steps", "20", "--hold", str(tmp_path / "hold"))
    with RedisServer() as first, RedisServer() as second:
        peers = Peers(tmp_path, f"{first.url} {second.url}", Path(dropin_peer.__file__), steps)
        try:
            for number, name in enumerate("ab"):
                peers.start(name, "--data", str(number), settings={"ZERO_BAND_ELASTIC__START_NODES": "2"})
            peers.until(lambda: all(len(peers.rounds(name)) > 8 for name in "ab"), "all rounds but the last")
            first.stop()
            peers.until(lambda: all(generation(tmp_path / peers.run_id / n) == 2 for n in "ab"), "both moved")
            hold.touch()
            assert [peers.end(name) for name in "ab"] == [0, 0], peers.log("a") + peers.log("b")
        finally:
            peers.kill()
        rounds = [{event["round"]: event["digest"] for event in peers.rounds(name)} for name in "ab"]
        assert rounds[0] == rounds[1] and max(rounds[0]) == 10
        assert all(len(event["members"]) == 2 for event in peers.rounds("a"))


@pytest.mark.soak
@pytest.mark.skipif(Network.obstacle() != "", reason=Network.obstacle())
def test_cut_of_five_nodes_leaves_one_history_though_each_side_has_a_store(tmp_path: Path) -> None:
    """The store in use is on the side of the two: the three go on with the other one, the two wait and come back."""
    more, fewer = ("node0", "node1", "node2"), ("node3", "node4")
    with Network() as network:
        for name in ("stay", "other"):
            network.add(name)
        first, second = (
            RedisServer(host=network.address(name), prefix=network.prefix(name), password="p")
            for name in ("stay", "other")
        )
        arguments = (*TINY, "--data.cache-dir", str(tmp_path / "cache"), "--fault.grace-s=4")
        env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
        urls = f"{first.url} {second.url}"
        cluster = ForkedCluster(tmp_path / "runs", arguments, nodes=5, store_url=urls, network=network, env=env)
        with first, second, cluster:
            for node in (*more, *fewer):
                network.add(node)
                cluster.start(node)
            reach_round(cluster, more[0], 2, members=5)
            for one in (*more, "other"):
                for other in (*fewer, "stay"):
                    network.cut_between(one, other)
            begun = newest(cluster, more[0])
            reach_round(cluster, more[0], begun + 3, members=3)
            assert newest(cluster, fewer[0]) <= begun + 1, "two of five went on"
            network.heal_all()
            reach_round(cluster, more[0], newest(cluster, more[0]) + 1, members=5)
            require_one_history(cluster, *more, *fewer)


def require_one_history(cluster: LocalCluster, *nodes: str) -> None:
    """These nodes say the same of each round that several of them know, and nothing was trained twice or left out."""
    history: dict[int, Any] = {}
    for node in nodes:
        for event in told(cluster.run_dir / node, "round_committed"):
            said = (event["digest"], event["members"], event["progress"]["inner_step"])
            assert history.setdefault(event["round"], said) == said, (node, event["round"])
    assert audit(read_rounds(cluster.run_dir)).is_exact


def newest(cluster: LocalCluster, node: str) -> int:
    return max((event["round"] for event in told(cluster.run_dir / node, "round_committed")), default=-1)


def reach_round(cluster: LocalCluster, node: str, round: int, *, members: int) -> None:
    """Wait until a node took part in this round or a later one with so many."""

    def is_reached(_run: object) -> bool:
        events = told(cluster.run_dir / node, "round_committed")
        return bool(events) and events[-1]["round"] >= round and len(events[-1]["members"]) == members

    cluster.wait_until(is_reached, timeout_s=120)
