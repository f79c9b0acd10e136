"""A run that is founded twice, by machines that do not see one another: who founds nothing, and who ends at the end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.faults.arena import TINY
from tests.faults.test_several_stores import generation, newest, reach_round, told
from tests.tiny_runs import ForkedCluster

from zeroband.tools.cluster import LocalCluster, NodeProcess
from zeroband.tools.cluster.network import Network


def start(cluster: LocalCluster, node: str, *peers: str, **env: str) -> NodeProcess:
    """Start a node that is told of the stores of these nodes."""
    places = json.dumps([cluster.store_place(peer) for peer in peers])
    own = {"ZERO_BAND_STORE__PEERS": places, "ZERO_BAND_ELASTIC__START_NODES": "1"}
    return cluster.start(node, env={**own, **{f"ZERO_BAND_{key}": value for key, value in env.items()}})


@pytest.mark.soak
def test_lines_that_meet_are_named_and_the_one_with_fewer_tokens_ends(tmp_path: Path) -> None:
    """Two nodes are told to found the run, and a third one is told of both."""
    arguments = (*TINY, "--data.cache-dir", str(tmp_path / "cache"))
    more = ("--ckpt.shared", "false", "--ckpt.every-rounds", "2", "--ckpt.keep-last", "99")
    with ForkedCluster(tmp_path / "runs", (*arguments, *more), nodes=1, store_url="nodes") as cluster:
        start(cluster, "a", "a", BOOTSTRAP="true", CKPT__PATH=str(tmp_path / "a"))
        reach_round(cluster, "a", 40, members=1)
        fewer = start(cluster, "b", "b", BOOTSTRAP="true", CKPT__PATH=str(tmp_path / "b"))
        cluster.wait_until(lambda _: bool(told(cluster.run_dir / "b", "checkpoint_committed")), timeout_s=90)
        kept = {path.name for path in (tmp_path / "b").rglob("step_*")}
        start(cluster, "c", "a", "b", CKPT__PATH=str(tmp_path / "c"))
        assert fewer.wait(60.0) == 2, cluster.describe()
        reach_round(cluster, "a", newest(cluster, "a") + 2, members=2)
        for node in "ab":  # each tells of it at its own next look at the stores
            folder = cluster.run_dir / node
            cluster.wait_until(lambda _, folder=folder: bool(told(folder, "split_brain")), timeout_s=60)
            (met,) = told(cluster.run_dir / node, "split_brain")
            assert (met["goes_on"]["members"][0][0], met["ends"]["members"][0][0]) == ("a", "b")
            assert met["goes_on"]["tokens"] > met["ends"]["tokens"] > 0
            said = (cluster.run_dir / "b" / "console.log").read_text()
            assert f"session {met['goes_on']['session']} (round" in said and "that of this node, ends here" in said
        assert kept and kept <= {path.name for path in (tmp_path / "b").rglob("step_*")}


@pytest.mark.soak
@pytest.mark.skipif(Network.obstacle() != "", reason=Network.obstacle())
def test_only_peer_that_is_cut_off_and_has_a_new_disk_founds_nothing(tmp_path: Path) -> None:
    """The first machine of all, whose list names itself; the run was founded when the second one came."""
    arguments = (*TINY, "--data.cache-dir", str(tmp_path / "cache"), "--run.token=a token that nobody guesses")
    env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    with Network() as network:
        cluster = ForkedCluster(*(tmp_path / "runs", arguments), nodes=2, store_url="nodes", network=network, env=env)
        with cluster:
            for node in "abc":
                start(cluster, node, "a")
            reach_round(cluster, "b", 3, members=3)
            for other in "bc":
                network.cut_between("a", other)
            reach_round(cluster, "b", newest(cluster, "b") + 3, members=2)
            cluster.nodes["a"].kill()
            shutil.rmtree(cluster.run_dir / "a")
            cluster.restart("a")
            console = cluster.run_dir / "a" / "console.log"
            cluster.wait_until(
                lambda _: console.exists() and "sees no store of another machine" in console.read_text(), timeout_s=90
            )
            assert newest(cluster, "a") == -1 and not told(cluster.run_dir / "a", "store_in_use")
            network.heal_all()
            reach_round(cluster, "a", newest(cluster, "b") + 2, members=3)
            assert generation(cluster.run_dir / "a") == generation(cluster.run_dir / "b") == 2
            assert not told(cluster.run_dir / "b", "split_brain")
