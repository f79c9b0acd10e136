"""`zeroband launch`: what a service manager's signals do to a node, and the exit codes that it sees."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zeroband.cluster.processes import ranks_of

pytestmark = [pytest.mark.faults, pytest.mark.slow]

DEADLINE_S = 90.0

STAND_IN = """
import os, signal, sys, time
from pathlib import Path

taken = []

def take(number, frame):
    taken.append(number)
    if "--deaf" not in sys.argv or len(taken) == 2:
        sys.exit(0 if len(taken) == 1 else 143)

signal.signal(signal.SIGTERM, take)
Path(sys.argv[1], os.environ["LOCAL_RANK"]).touch()
while True:
    time.sleep(0.05)
"""
"""Stands for the trainer: leaves at the first signal with 0, or, deaf, ends at the second one with 143."""

LAUNCHER = "import sys; from zeroband.cli import main; sys.exit(main(['launch', *sys.argv[1:]]))"

Launch = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """launch("--deaf", ranks=2): a launcher whose ranks are up."""
    script, started = tmp_path / "stand_in.py", []
    script.write_text(STAND_IN)

    def start(*arguments: str, ranks: int = 1) -> subprocess.Popen[bytes]:
        torchrun = ["--standalone", "--local-addr", "localhost", f"--nproc_per_node={ranks}"]
        command = [sys.executable, "-c", LAUNCHER, *torchrun, str(script), str(tmp_path), *arguments]
        started.append(subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}))
        wait_for(lambda: all((tmp_path / str(rank)).exists() for rank in range(ranks)))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def wait_for(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_first_signal_asks_all_ranks_to_leave_and_gives_0(launch: Launch, number: signal.Signals) -> None:
    launcher = launch(ranks=2)
    launcher.send_signal(number)
    assert launcher.wait(DEADLINE_S) == 0


def test_second_signal_ends_at_once_with_143(launch: Launch) -> None:
    launcher = launch("--deaf")
    (torchrun,) = children_of(launcher.pid)
    (rank,) = ranks_of(torchrun)
    launcher.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(DEADLINE_S) == 143
    assert not Path(f"/proc/{rank}").exists()


def test_ctrl_c_gives_130(launch: Launch) -> None:
    launcher = launch()
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(DEADLINE_S) == 130


def test_killed_launcher_takes_torchrun_and_its_ranks_along(launch: Launch) -> None:
    launcher = launch()
    (torchrun,) = children_of(launcher.pid)
    launcher.kill()
    wait_for(lambda: not Path(f"/proc/{torchrun}").exists())
