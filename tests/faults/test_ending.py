"""Signals in bad moments: a long inner step, an operation in C, the seconds in which a process is set up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tests.faults.arena import TINY
from tests.tiny_runs import ForkedCluster

from zeroband.node.processes import ranks_of
from zeroband.tools.cluster import RedisServer
from zeroband.tools.cluster.local import TRAINER
from zeroband.tools.data.audit import audit, read_rounds

pytestmark = [pytest.mark.faults, pytest.mark.slow]

DEADLINE_S = 180.0
ENDLESS = ("--fault.inject", "inner@+2=TAKES3600", "--fault.grace-s", "1")
IN_C = """
import ctypes, sys, time
from zeroband.node import launched
from zeroband.runtime import signals
from zeroband.elastic.membership.departure import Departure
from zeroband.runtime.signals import SignalHandling

signals._REACT_S = signals._UNWIND_S = 0.3
launched.REQUEST_WINDOW_S = float(sys.argv[1])
departure = Departure(grace_s=0.3)
departure.holds_work = True
departure.on_cut_off = lambda: print("cut off", flush=True)
mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
with SignalHandling(departure, ranks=1), departure.in_step():
    libc.pthread_mutex_lock(mutex)
    print("locked", flush=True)
    libc.pthread_mutex_lock(mutex)  # for ever, in C: no handler of Python's runs any more
"""


def wait_for(is_so: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < end_s, f"not within {DEADLINE_S:g} s: {what}"
        time.sleep(0.02)


def sleeps(pid: int) -> bool:
    """Whether a process's main thread uses no time at all: whoever polls does."""

    def used_ns() -> str:
        return Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]

    before = used_ns()
    time.sleep(0.5)
    return used_ns() == before


@pytest.mark.soak
def test_node_leaves_in_the_middle_of_an_inner_step_that_does_not_end(tmp_path: Path) -> None:
    """Nodes of one and of two ranks; the second rank waits for the first one in an exchange meanwhile."""
    arguments = (*TINY, "--data.cache-dir", str(tmp_path / "cache"))
    env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    with ForkedCluster(tmp_path / "runs", arguments, nodes=3, env=env) as cluster:
        steady = cluster.start()
        leaving = [cluster.start(ranks=ranks, arguments=ENDLESS) for ranks in (1, 2)]
        wait_for(lambda: all(len(n.events("round_committed")) >= 3 for n in leaving), "their last round")
        wait_for(lambda: all(sleeps(node.rank_pids[0]) for node in leaving), "the step that does not end")
        for node in leaving:
            node.terminate()
        assert [node.wait(DEADLINE_S) for node in leaving] == [0, 0], cluster.describe()
        rounds = len(steady.events("round_committed"))
        wait_for(lambda: len(steady.events("round_committed")) > rounds + 2, "the others go on")
        for node in leaving:
            (left,) = node.events("left")
            assert "in progress took longer than fault.grace_s" in left["reason"]
            assert "Traceback" not in node.console_tail() and not node.spec.memory.exists()
        assert audit(read_rounds(cluster.run_dir)).is_exact


@pytest.mark.parametrize(
    ("numbers", "together_s", "code", "said"),
    [
        ([signal.SIGTERM], 0, 0, "cut off"),
        ([signal.SIGINT], 0, 130, ""),
        ([signal.SIGUSR1, signal.SIGTERM], 0, 143, ""),
        ([signal.SIGTERM, signal.SIGTERM], 3600, 0, "cut off"),
    ],
)
def test_process_that_hangs_in_c_ends_all_the_same(
    numbers: Sequence[signal.Signals], together_s: float, code: int, said: str
) -> None:
    hanging = subprocess.Popen(
        [sys.executable, "-c", IN_C, str(together_s)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert hanging.stdout is not None and hanging.stdout.readline() == "locked\n"
        for number in numbers:
            hanging.send_signal(number)
        output, errors = hanging.communicate(timeout=DEADLINE_S)
    finally:
        hanging.kill()
    assert (hanging.returncode, output.strip(), errors) == (code, said, "")


# -- while a process is set up --------------------------------------------------------------------------------------

CLI = "import sys; from zeroband.cli import main; sys.exit(main(sys.argv[1:]))"
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a `zeroband` command that trains the tiny model, in the foreground of nobody."""
    started: list[subprocess.Popen[str]] = []

    def start_one(*command: str, **variables: str) -> subprocess.Popen[str]:
        places = ("--run.dir", str(tmp_path / "runs"), "--data.cache-dir", str(tmp_path / "cache"))
        arguments = [sys.executable, "-c", CLI, *command, *TINY[: TINY.index("--outer.type")], *places]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "ZERO_BAND_RUN__ID": "first", **variables}
        started.append(
            subprocess.Popen(
                arguments, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, preexec_fn=hear
            )
        )
        return started[-1]

    yield start_one
    for process in started:
        process.kill()
        process.communicate()


def hear() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def is_loading_torch(pid: int) -> bool:
    try:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def assert_interrupted(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors and "KeyboardInterrupt" not in errors, errors


# -- what it says at its end ----------------------------------------------------------------------------------------


def until_it_trains(folder: Path) -> None:
    metrics = folder / "runs" / "first" / "a" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, "inner steps")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_node_that_is_asked_to_leave_says_where_everything_lies(
    start: Start, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    training = start("train", ZERO_BAND_NODE__ID="a", ZERO_BAND_OBSERVE__REPORT="true")
    until_it_trains(tmp_path)
    training.send_signal(number)
    _, said = training.communicate(timeout=DEADLINE_S)
    report = tmp_path / "runs" / "first" / "report.html"
    assert training.returncode == code and f"  report      {report}" in said, said
    wait_for(report.exists, "the report, which after Ctrl-C nobody waits for")


def test_node_that_fails_says_where_everything_lies_before_why(start: Start, tmp_path: Path) -> None:
    with RedisServer() as redis:
        variables = {"STORE__URL": redis.url, "FAULT__DETECT_S": "1", "FAULT__STORE_S": "2", "OBSERVE__REPORT": "true"}
        variables |= {"NODE__ID": "a", "OUTER__TYPE": "ddp"}
        training = start("train", **{f"ZERO_BAND_{name}": value for name, value in variables.items()})
        until_it_trains(tmp_path)
    _, said = training.communicate(timeout=DEADLINE_S)
    report = tmp_path / "runs" / "first" / "report.html"
    assert training.returncode == 1 and f"  report      {report}" in said, said
    assert said.splitlines()[-1].startswith("zeroband: ") and "Redis" in said.splitlines()[-1]
    wait_for(lambda: report.exists() and "StoreLost" in report.read_text(), "the report with the failure")


@pytest.mark.soak
def test_ctrl_c_while_torch_is_loaded_ends_without_a_traceback(start: Start) -> None:
    training = start("train")
    wait_for(lambda: is_loading_torch(training.pid), "torch is being loaded")
    assert_interrupted(training)


@pytest.mark.soak
def test_ctrl_c_while_the_ranks_load_torch_ends_without_a_traceback(start: Start) -> None:
    launching = start("launch", "--nproc-per-node=2", str(TRAINER))
    wait_for(lambda: len(ranks_of(launching.pid)) == 2, "ranks")
    wait_for(lambda: all(map(is_loading_torch, ranks_of(launching.pid))), "torch is being loaded")
    assert_interrupted(launching)


def test_ctrl_c_while_a_node_waits_for_others_ends_without_a_traceback(
    start: Start, tmp_path: Path, redis_url: str
) -> None:
    variables = {"ZERO_BAND_STORE__URL": redis_url, "ZERO_BAND_NODE__ID": "a", "ZERO_BAND_ELASTIC__START_NODES": "2"}
    launching = start("launch", "--nproc-per-node=2", str(TRAINER), **variables, ZERO_BAND_OUTER__TYPE="ddp")
    shared = tmp_path / "runs" / "first" / "a" / "events.jsonl"
    wait_for(lambda: shared.exists() and "node_started" in shared.read_text(), "the node is set up")
    assert_interrupted(launching)
