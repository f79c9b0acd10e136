"""Two hundred rounds of honest nodes that have little in common: nobody is blamed, refused or trusted less."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest
from tests.faults.arena import TINY
from tests.faults.test_several_stores import newest, reach_round
from tests.tiny_runs import ForkedCluster

pytestmark = [pytest.mark.faults, pytest.mark.soak, pytest.mark.timeout(1500)]

ROUNDS = 200
SUSPICIONS = (
    *("blamed", "record_refused", "plan_refused", "payload_refused", "update_refused", "impostor"),
    "transfer_stalled",
)
FOUNDERS, JOINERS = ("node0", "node1", "node2", "node3"), ("node4", "node5")
PACKAGES = dict(zip((*FOUNDERS, *JOINERS), ("json", "email", "asyncio", "logging", "unittest", "idlelib"), strict=True))
"""Of Python's library: what each node trains on. Random letters that no other node has are too much: one
of five such nodes counted less than half from round 104 to 178."""


def own(node: str) -> list[str]:
    """Arguments of one node: documents of its own, a pace of its own, and steps of its own in a round."""
    place = int(node.removeprefix("node"))
    files = json.dumps([f"{sysconfig.get_path('stdlib')}/{PACKAGES[node]}/*.py"])
    pace = ["--fault.inject", f"inner@+0=TAKES{0.01 * (1 + place % 3):g}"]
    return [
        "--data.source.type=text",
        f"--data.source.paths={files}",
        f"--outer.inner-steps={2 + 2 * place}",
        *pace,
    ]


def test_nodes_with_other_data_and_speeds_that_come_and_go_are_under_no_suspicion(tmp_path: Path) -> None:
    shared = [pair for pair in zip(TINY[::2], TINY[1::2], strict=True) if not pair[0].startswith("--data.source")]
    arguments = (
        *(text for pair in shared for text in pair),
        *("--data.private", "--outer.weights=equal", "--outer.robust.type=centered_clip", "--comm.sites=off"),
        *("--comm.codec=int8", "--fault.detect-s=5", "--optim.warmup-steps=5"),
        f"--data.cache-dir={tmp_path / 'cache'}",
    )
    env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    with ForkedCluster(tmp_path / "runs", arguments, nodes=len(FOUNDERS), env=env) as cluster:
        for node in FOUNDERS:
            cluster.start(node, arguments=own(node))
        reach_round(cluster, "node0", ROUNDS // 8, members=4)
        cluster.start("node4", arguments=own("node4"), env={"ZERO_BAND_ELASTIC__START_NODES": "1"})
        reach_round(cluster, "node0", ROUNDS // 4, members=5)
        cluster.nodes["node1"].terminate()
        assert cluster.nodes["node1"].wait(60.0) == 0
        cluster.start("node5", arguments=own("node5"), env={"ZERO_BAND_ELASTIC__START_NODES": "1"})
        reach_round(cluster, "node0", ROUNDS // 2, members=5)
        cluster.restart("node1")
        for round in range(ROUNDS // 2 + 25, ROUNDS + 1, 25):  # each wait has a deadline of its own
            reach_round(cluster, "node0", round, members=6)
        events = [event for node in cluster.nodes.values() for event in node.events()]
        trust = [
            record["outer/trust"] for n in cluster.nodes.values() for record in n.metrics() if "outer/trust" in record
        ]
        assert newest(cluster, "node0") >= ROUNDS and len(trust) > 4 * ROUNDS
        print(f"{newest(cluster, 'node0')} rounds, {len(trust)} times measured, least trust {min(trust)}")
        assert [event for event in events if event["kind"] in SUSPICIONS] == []
        assert min(trust) == 1.0
