"""A node whose processes run out of descriptors while it trains keeps its rounds, and says so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.faults.arena import TINY
from tests.faults.test_several_stores import newest, reach_round, told
from tests.tiny_runs import ForkedCluster

pytestmark = pytest.mark.faults

TAKES_ALL = '''
"""Begins with each Python process of a node: takes all of its descriptors while a file is there."""
import os, resource, threading, time

def take_and_give():
    held = []
    while True:
        try:
            is_on = os.path.exists(os.environ["TAKES_ALL_WHILE"])
        except OSError:
            is_on = True
        try:
            while is_on:
                held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        while held and not is_on:
            os.close(held.pop())
        time.sleep(0.005)

resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
threading.Thread(target=take_and_give, daemon=True).start()
'''


@pytest.mark.soak
def test_node_without_descriptors_stays_in_every_round(tmp_path: Path) -> None:
    sign, begins = tmp_path / "sign", tmp_path / "begins"
    begins.mkdir()
    (begins / "sitecustomize.py").write_text(TAKES_ALL)
    arguments = (*TINY, "--data.cache-dir", str(tmp_path / "cache"), "--ckpt.path", str(tmp_path / "ckpt"))
    with ForkedCluster(tmp_path / "runs", (*arguments, "--ckpt.every-rounds", "2"), nodes=2) as cluster:
        packages = [str(begins), cluster.environment("node0", 1).get("PYTHONPATH", "")]
        cluster.start(env={"TAKES_ALL_WHILE": str(sign), "PYTHONPATH": os.pathsep.join(packages)})
        cluster.start()
        reach_round(cluster, "node0", 2, members=2)
        sign.touch()
        reach_round(cluster, "node0", newest(cluster, "node0") + 8, members=2)  # four leases
        sign.unlink()
        node = cluster.run_dir / "node0"
        saved = len(told(node, "checkpoint_committed"))
        cluster.wait_until(lambda _: len(told(node, "checkpoint_committed")) > saved, timeout_s=90)
        reach_round(cluster, "node0", newest(cluster, "node1") + 1, members=2)
        assert (len(told(node, "joined")), told(node, "fenced")) == (1, []), cluster.describe()
        assert {len(event["members"]) for event in told(node, "round_committed")} == {2}
        assert "Too many open files" in (node / "console.log").read_text()
