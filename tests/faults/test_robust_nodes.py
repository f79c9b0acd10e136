"""Real nodes of which one lies: the others learn as if it were not there (`outer.robust`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.faults.arena import TINY
from tests.tiny_runs import ForkedCluster

from zeroband.tools.cluster import LocalCluster

pytestmark = [pytest.mark.faults, pytest.mark.soak, pytest.mark.timeout(300)]

LIAR = Path(__file__).parents[2] / "bench" / "liar.py"
HONEST, ROUNDS = 3, 6


def metrics(cluster: LocalCluster, node_id: str, name: str) -> list[float]:
    lines = (cluster.run_dir / node_id / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [record[name] for record in records if name in record]


def test_node_that_sends_the_opposite_a_hundred_times_spoils_nothing(tmp_path: Path) -> None:
    """With the mean the loss of the honest nodes is above 100 after two rounds."""
    lies = json.dumps(['lie="flip x100"', f"honest={HONEST}"])
    arguments = (
        *(*TINY, "--train.total-steps", str(10 * ROUNDS), "--data.cache-dir", str(tmp_path / "cache")),
        *("--optim.adamw.lr", "3e-3", "--optim.warmup-steps", "5", "--comm.sites", "off", "--comm.codec", "int8"),
        *("--outer.type", "custom", "--outer.algorithm", str(LIAR), "--outer.settings", lies),
        *("--outer.robust.type", "clip"),
    )
    env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    with ForkedCluster(tmp_path / "runs", arguments, nodes=HONEST + 1, env=env) as cluster:
        for _ in range(HONEST + 1):
            cluster.start()
        assert set(cluster.wait(timeout_s=200).values()) == {0}, cluster.describe()
        for place in range(HONEST):
            losses = metrics(cluster, f"node{place}", "train/loss")
            assert max(losses) < losses[0] + 0.5 and losses[-1] < 0.7 * losses[0]
            assert metrics(cluster, f"node{place}", "outer/trust")[-1] == 1.0
        assert metrics(cluster, f"node{HONEST}", "outer/trust")[-1] < 0.5
