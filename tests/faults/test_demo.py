"""The demo as users run it: real training, a real SIGKILL, a real return."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from rich.cells import cell_len
from tests.terminals import Terminal

import zeroband
from zeroband.node.processes import pids_with

pytestmark = [pytest.mark.faults, pytest.mark.slow]

SMALL = ("--model.d-model", "64", "--model.n-layers", "1", "--data.seq-length", "64", "--train.total-steps", "120")
"""Trains as fast as a GPU would: the preset's pace alone gives the killed node the time to come back."""
LOOKED_AT = 8
"""Screens, a quarter of a second from one to the next; no node has said anything yet."""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Demo:
    """The command, not started yet, and what it leaves behind."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        source = str(Path(zeroband.__file__).parents[1])
        self.run_id = f"demo-{secrets.token_hex(4)}"
        self.run_dir = folder / "runs" / self.run_id
        self.env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTHONUNBUFFERED": "1",
            "ZERO_BAND_RUN__ID": self.run_id,
            "ZERO_BAND_RUN__DIR": str(folder / "runs"),
        }
        self.command = [sys.executable, "-m", "zeroband.cli", "demo", *arguments]

    def left_behind(self) -> list[object]:
        """Processes and folders in shared memory that belong to the run, after the time that the last one takes to end.

        The server of forks hears of the end of the command from the kernel.
        """
        end_s = time.monotonic() + 10.0
        while (found := self._found()) and time.monotonic() < end_s:
            time.sleep(0.05)
        return found

    def _found(self) -> list[object]:
        return [*pids_with("ZERO_BAND_RUN__ID", self.run_id), *Path("/dev/shm").glob(f"zeroband-{self.run_id}@*")]


def frames_of(drawn: str) -> list[list[str]]:
    """The screens that were drawn, from border to border, each as its lines."""
    plain = ESCAPES.sub("", drawn).replace("\r", "")
    return [frame.split("\n") for frame in re.findall("╭.*?╯", plain, re.DOTALL)]


def is_of_the_loop(frame: list[str]) -> bool:
    """Whether the demo began to wait for its nodes before it drew this, as the clock in the lower border says."""
    return "─ 00:00 ─" not in frame[-1]


@pytest.mark.timeout(900)
def test_demo_loses_a_node_gets_it_back_and_ends_with_one_state(tmp_path: Path) -> None:
    demo = Demo(tmp_path, *SMALL)
    done = subprocess.run(demo.command, env=demo.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = done.stdout
    assert done.returncode == 0, said
    acts = [
        "http://localhost:",
        "starting 4 nodes",
        "Next: node2 is killed",
        "founded the run",
        "SIGKILL: every process of node2",
        "continues without node2",
        "node2 has joined",
        "Done in",
    ]
    places = [said.find(act) for act in acts]
    assert -1 not in places and places == sorted(places), said
    assert "equal on all 4 nodes" in said
    digests = re.findall(r"^ +node\d  ([0-9a-f]+)$", said, re.MULTILINE)
    assert len(digests) == 4 and len(set(digests)) == 1
    first, last = map(float, re.findall(r"loss +([\d.]+) -> ([\d.]+)", said)[0])
    assert first > 5 and last < 2.8  # 2.4; the preset's model ends at 1.9
    assert (demo.run_dir / "node0" / "sample.txt").read_text().startswith("def ")
    assert demo.left_behind() == []


def test_demo_moves_from_its_first_second_and_interrupted_leaves_nothing(tmp_path: Path) -> None:
    demo = Demo(tmp_path)
    env = {
        **{name: value for name, value in demo.env.items() if name != "NO_COLOR"},
        "TERM": "xterm",
        "LC_ALL": "C.UTF-8",
    }
    terminal = Terminal(demo.command, 80, 24, env)
    terminal.wait_for(lambda drawn: sum(map(is_of_the_loop, frames_of(drawn))) >= LOOKED_AT)
    frames = frames_of(terminal.drawn)
    for frame in frames:
        assert len(frame) <= 24 and {cell_len(line) for line in frame} == {80}, "\n".join(frame)
    bodies = [frame[:-1] for frame in frames if is_of_the_loop(frame)]  # without the clock
    assert all(before != after for before, after in pairwise(bodies))
    terminal.press("\x03")
    assert terminal.exit_code() == 130
    assert demo.left_behind() == []
