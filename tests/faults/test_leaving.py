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

from zeroband.node.processes import ranks_of

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

LAUNCHER = """
import os, sys
from zeroband.cli import main
from zeroband.node import launched
launched.REQUEST_WINDOW_S = float(os.environ["REQUEST_WINDOW_S"])
sys.exit(main(["launch", *sys.argv[1:]]))
"""

CRASHING = """
import os, signal, sys, time
from pathlib import Path

folder, most = Path(sys.argv[1]), int(sys.argv[2])
starts, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
Path(folder, f"{starts}-{rank}").touch()
while rank == "0" and starts < most:
    time.sleep(0.05)  # until the launcher ends it, since the other one has failed
while not Path(folder, f"{starts}-0").exists():
    time.sleep(0.01)
if starts < most:
    os.kill(os.getpid(), signal.SIGKILL) if sys.argv[3] == "kill" else sys.exit(int(sys.argv[3]))
assert os.environ["TORCHELASTIC_MAX_RESTARTS"] == "2" and os.environ["WORLD_SIZE"] == "2"
assert os.stat(os.environ["ZEROBAND_RANKS_FILE"]).st_size == 0, "nothing of the ranks before"
"""
"""Two ranks of which the second one ends, in its first starts, as it is told."""

Launch = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """launch("--deaf", ranks=2): a launcher whose ranks are up."""
    script, started = tmp_path / "stand_in.py", []
    script.write_text(STAND_IN)

    def start(
        *arguments: str, ranks: int = 1, options: tuple[str, ...] = (), together_s: float = 0.0
    ) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", LAUNCHER, f"--nproc_per_node={ranks}", *options, str(script), str(tmp_path)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "REQUEST_WINDOW_S": str(together_s)}
        started.append(subprocess.Popen([*command, *arguments], env=env))
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_first_signal_asks_all_ranks_to_leave_and_gives_0(launch: Launch, number: signal.Signals) -> None:
    launcher = launch(ranks=2)
    launcher.send_signal(number)
    assert launcher.wait(DEADLINE_S) == 0


def test_node_that_left_ends_with_the_code_that_schedulers_were_promised(launch: Launch) -> None:
    launcher = launch(options=("--exit-code-left", "75"))
    launcher.terminate()
    assert launcher.wait(DEADLINE_S) == 75


def test_second_signal_ends_at_once_with_143(launch: Launch) -> None:
    launcher = launch("--deaf")
    (rank,) = ranks_of(launcher.pid)
    launcher.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(DEADLINE_S) == 143
    assert not Path(f"/proc/{rank}").exists()


def test_signals_that_come_together_ask_once(launch: Launch) -> None:
    """Slurm signals launcher and ranks; so does systemd; a batch script passes its own on besides."""
    launcher = launch(together_s=3600.0)
    launcher.send_signal(signal.SIGTERM)
    launcher.send_signal(signal.SIGUSR1)
    assert launcher.wait(DEADLINE_S) == 0


def test_ctrl_c_gives_130(launch: Launch) -> None:
    launcher = launch()
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(DEADLINE_S) == 130


def test_killed_launcher_takes_its_ranks_along(launch: Launch) -> None:
    launcher = launch(ranks=2)
    ranks = ranks_of(launcher.pid)
    assert len(ranks) == 2
    launcher.kill()
    wait_for(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))


def crash(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Launch the ranks that fail."""
    script = folder / "crashing.py"
    script.write_text(CRASHING)
    options = ("--nproc-per-node", "2", "--max-restarts", "2", str(script), str(folder))
    command = [sys.executable, "-c", LAUNCHER, *options, *arguments]
    env = {**os.environ, "REQUEST_WINDOW_S": "0"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def starts_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*-*"))


def test_crashed_rank_has_all_ranks_started_again_in_a_file_of_their_own(tmp_path: Path) -> None:
    done = crash(tmp_path, "2", "kill")
    assert done.returncode == 0, done.stderr
    assert starts_of(tmp_path) == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"]
    told = [line for line in done.stderr.splitlines() if line.startswith("zeroband: rank 1 was ended by SIGKILL")]
    assert [line.rpartition("; ")[2] for line in told] == [
        f"restarting the ranks, {number} of 2 times" for number in (1, 2)
    ]


def test_ranks_that_fail_too_often_give_1_and_the_reason_last(tmp_path: Path) -> None:
    done = crash(tmp_path, "9", "kill")
    assert done.returncode == 1
    assert starts_of(tmp_path) == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"]
    assert done.stderr.splitlines()[-1] == "zeroband: rank 1 was ended by SIGKILL; out of memory?"


def test_wrong_configuration_gives_2_and_is_not_tried_again(tmp_path: Path) -> None:
    done = crash(tmp_path, "9", "2")
    assert (done.returncode, done.stderr) == (2, "")
    assert starts_of(tmp_path) == ["0-0", "0-1"]
