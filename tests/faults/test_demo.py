"""The demo as users run it: real training, a real SIGKILL, a real return."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import zeroband
from zeroband.node.processes import pids_with

pytestmark = [pytest.mark.faults, pytest.mark.slow]


class Demo:
    """The command as a process of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        source = str(Path(zeroband.__file__).parents[1])
        self.run_id = f"demo-{secrets.token_hex(4)}"
        self.run_dir = folder / "runs" / self.run_id
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTHONUNBUFFERED": "1",
            "ZERO_BAND_RUN__ID": self.run_id,
            "ZERO_BAND_RUN__DIR": str(folder / "runs"),
        }
        command = [sys.executable, "-m", "zeroband.tools.demo", *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True)

    def read_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def left_behind(self) -> list[object]:
        """Processes and folders in shared memory that belong to the run."""
        return [*pids_with("ZERO_BAND_RUN__ID", self.run_id), *Path("/dev/shm").glob(f"zeroband-{self.run_id}@*")]


@pytest.mark.timeout(900)
def test_demo_loses_a_node_gets_it_back_and_ends_with_one_state(tmp_path: Path) -> None:
    demo = Demo(tmp_path, "--train.total-steps", "150")
    said, _ = demo.process.communicate()
    assert demo.process.returncode == 0, said
    acts = [
        "found the run",
        "SIGKILL: every process of node2",
        "goes on without node2",
        "node2 is in: outer step",
        "Done in",
    ]
    places = [said.find(act) for act in acts]
    assert -1 not in places and places == sorted(places), said
    assert "equal on all 4 nodes" in said
    digests = re.findall(r"^ +node\d  ([0-9a-f]+)$", said, re.MULTILINE)
    assert len(digests) == 4 and len(set(digests)) == 1
    first, last = map(float, re.findall(r"loss +([\d.]+) -> ([\d.]+)", said)[0])
    assert first > 5 and last < 2.6  # 1.9 after the 240 steps of the preset
    assert (demo.run_dir / "node0" / "sample.txt").read_text().startswith("def ")
    assert demo.left_behind() == []


def test_demo_interrupted_while_its_nodes_start_leaves_nothing(tmp_path: Path) -> None:
    demo = Demo(tmp_path)
    lines = iter(demo.read_line, "")
    assert "http://localhost:" in next(lines)
    assert any("starting 4 nodes" in line for line in lines)
    assert "Next" in next(lines)
    demo.process.send_signal(signal.SIGINT)
    demo.process.communicate()
    assert demo.process.returncode == 130
    assert demo.left_behind() == []
