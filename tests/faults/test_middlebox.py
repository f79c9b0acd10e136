"""Transfers that stand still although the guardians see everybody: a path that swallows bytes, a trainer that hangs."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.faults.arena import TINY
from tests.faults.middlebox import HOST, Middlebox

from zeroband.observe.view import node_id_of_member
from zeroband.tools.cluster import LocalCluster
from zeroband.tools.cluster.node_process import NodeProcess

DEADLINE_S = 60.0
"""Far below `fault.hung_s`, which is 300 s."""
NODES = 3


def free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])


def start_behind(cluster: LocalCluster, box: Middlebox) -> NodeProcess:
    """Start a node that the others reach through a middlebox."""
    box.node_port = free_port()
    ports = ["--node.port", str(box.node_port), "--node.advertise-port", str(box.port)]
    return cluster.start(arguments=["--node.bind-host", HOST, *ports])


def committed(cluster: LocalCluster) -> int:
    return max(
        (event["round"] for node in cluster.nodes.values() for event in node.events("round_committed")), default=0
    )


@pytest.mark.soak
@pytest.mark.faults
@pytest.mark.slow
def test_round_whose_path_swallows_bytes_goes_on_over_new_connections(tmp_path: Path) -> None:
    env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    arguments = (*TINY, "--fault.detect-s", "1", "--data.cache-dir", str(tmp_path / "cache"))
    with ExitStack() as stack:
        boxes = [stack.enter_context(Middlebox()) for _ in range(NODES)]
        cluster = stack.enter_context(LocalCluster(tmp_path / "runs", arguments, nodes=NODES, env=env))
        nodes = [start_behind(cluster, box) for box in boxes]
        cluster.wait_until(lambda _: committed(cluster) >= 2, timeout_s=DEADLINE_S)
        assert sum(box.swallow() for box in boxes) > 0
        before = committed(cluster)
        cluster.wait_until(lambda _: committed(cluster) >= before + 3, timeout_s=DEADLINE_S)
        said = [event for node in nodes for event in node.events("transfer_stalled")]
        assert said and all(event["waiting_for"] and event["since_s"] > 0 for event in said)
        assert all(node.is_running and not node.events("fenced") for node in nodes)


HANGS = """
import os, sys, time
from zeroband.node import faults
from zeroband.train import main

passes = faults.FaultPoints.at

def at(self, point, round):
    passes(self, point, round)
    if os.environ.get("HANGS") == "yes" and (point, round) == ("opened", 3):
        time.sleep(10000)

faults.FaultPoints.at = at
sys.exit(main())
"""


@pytest.mark.soak
@pytest.mark.faults
@pytest.mark.slow
def test_trainer_that_hangs_in_a_round_loses_its_lease_and_nobody_who_waits_for_it_does(tmp_path: Path) -> None:
    """Its process runs, its links and its guardian answer; the others stand still in the transfer because of it."""
    (tmp_path / "hangs.py").write_text(HANGS)
    env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    bounds = ("--fault.detect-s", "1", "--fault.hung-s", "5", "--data.cache-dir", str(tmp_path / "cache"))
    runs, script = tmp_path / "runs", tmp_path / "hangs.py"
    with LocalCluster(runs, (*TINY, *bounds), nodes=NODES, env=env, script=script) as cluster:
        *waiting, hung = [cluster.start(env={"HANGS": "yes" if n == NODES - 1 else "no"}) for n in range(NODES)]
        cluster.wait_until(lambda _: committed(cluster) >= 5, timeout_s=DEADLINE_S)
        said = [event for node in waiting for event in node.events("transfer_stalled")]
        assert said and all(hung.node_id in map(node_id_of_member, event["waiting_for"]) for event in said)
        assert not any(node.events("fenced") for node in waiting)
        assert "fault.hung_s" in hung.console_tail(), hung.console_tail()
