"""The demo as users run it: real training, a real SIGKILL, a real return."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import zeroband

pytestmark = [pytest.mark.faults, pytest.mark.slow]


@pytest.mark.timeout(600)
def test_demo_loses_a_node_gets_it_back_and_ends_with_one_state(tmp_path: Path) -> None:
    source = str(Path(zeroband.__file__).parents[1])
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "ZERO_BAND_RUN__ID": "demo-test",
        "ZERO_BAND_RUN__DIR": str(tmp_path / "runs"),
        "ZERO_BAND_DATA__CACHE_DIR": str(tmp_path / "cache"),
    }
    command = [sys.executable, "-m", "zeroband.demo"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=580)
    said = done.stdout
    assert done.returncode == 0, said + done.stderr
    acts = ["found the run", "SIGKILL: every process of node2", "goes on without node2", "node2 is back", "Done in"]
    places = [said.find(act) for act in acts]
    assert -1 not in places and places == sorted(places), said
    assert "equal on all 4 nodes" in said
    assert len(set(re.findall(r"^ +node\d  ([0-9a-f]{32})$", said, re.MULTILINE))) == 1
    first, last = map(float, re.findall(r"loss +([\d.]+) -> ([\d.]+)", said)[0])
    assert first > 5 and last < 2.2
    assert (tmp_path / "runs" / "demo-test" / "node0" / "sample.txt").read_text().startswith("def ")
    assert list(Path("/dev/shm").glob("zeroband-demo-test-*")) == []
