"""Nodes, their launchers and their server end with the one who started them, however that ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import zeroband
from zeroband.node.processes import MARK, marked_pids, signal_all
from zeroband.node.shm import NodeFolder
from zeroband.tools.cluster import LocalCluster

pytestmark = [pytest.mark.faults, pytest.mark.slow]

STAND_IN = """
import os, signal, subprocess, sys, time
from pathlib import Path

node_id, local_rank = os.environ["ZERO_BAND_NODE__ID"], os.environ["LOCAL_RANK"]
if "--stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if local_rank == "0":
    folder = Path(f"/dev/shm/zeroband-{os.environ['ZERO_BAND_RUN__ID']}@{node_id}")
    folder.mkdir(exist_ok=True)
    (folder / "state").write_bytes(bytes(1000))
    subprocess.Popen(["sleep", "300"], start_new_session=True)
print(f"up {node_id} {local_rank}", flush=True)
if "--code" in sys.argv:
    sys.exit(int(sys.argv[sys.argv.index("--code") + 1]))
time.sleep(300)
"""
"""Stands for the trainer: has shared memory, a child in another session (the guardian), a deaf ear for SIGTERM."""

DEADLINE_S = 60.0


def _wait_for(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, f"not within {DEADLINE_S:g} s: {what}"
        time.sleep(0.02)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "stand_in.py"
    path.write_text(STAND_IN)
    return path


def _shared(run_id: str) -> list[Path]:
    return list(Path("/dev/shm").glob(f"zeroband-{run_id}@*"))


# -- LocalCluster ---------------------------------------------------------------------------------------------------


def test_cluster_leaves_no_process_and_no_shared_memory_when_its_context_ends(tmp_path: Path, script: Path) -> None:
    with LocalCluster(tmp_path / "runs", nodes=2, script=script) as cluster:
        first, second = cluster.start(ranks=2), cluster.start(ranks=1)
        _wait_for(lambda: "up node0 1" in first.console_tail() and "up node0 0" in first.console_tail(), "node0")
        _wait_for(lambda: "up node1 0" in second.console_tail(), "node1")
        assert (len(first.rank_pids), len(second.rank_pids)) == (2, 1)
        assert len(_shared(cluster.run_id)) == 2
        pids = [*first.pids, *second.pids]
        assert len(pids) == 7  # two launchers, three ranks, a child of each node's first rank
        assert cluster.redis is not None
        pids.append(cluster.redis.pid)
    _wait_for(lambda: not any(_is_alive(pid) for pid in pids), "every process ended")
    assert _shared(cluster.run_id) == []


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_kill_ends_one_node_as_a_lost_machine_and_restart_brings_it_back(tmp_path: Path, script: Path) -> None:
    with LocalCluster(tmp_path / "runs", nodes=2, script=script, alone=True) as cluster:
        lost, other = cluster.start(), cluster.start()
        for node in (lost, other):
            _wait_for(lambda node=node: "up" in node.console_tail(), node.node_id)
        lost.kill()
        assert lost.pids == ()
        assert (lost.exit_code, other.exit_code) == (-signal.SIGKILL, None)
        assert _shared(cluster.run_id) == [NodeFolder.path_of(Path("/dev/shm"), cluster.run_id, "node1")]
        back = cluster.restart("node0", arguments=["--code", "0"])
        assert back.wait(DEADLINE_S) == 0
        assert back.console_tail().count("up node0 0") == 2
        assert [node.node_id for node in cluster.running] == ["node1"]


def test_stop_ends_nodes_that_ignore_sigterm_after_its_grace(tmp_path: Path, script: Path) -> None:
    with LocalCluster(tmp_path / "runs", ["--stubborn"], nodes=1, script=script, alone=True) as cluster:
        node = cluster.start()
        _wait_for(lambda: "up" in node.console_tail(), "node0")
        cluster.stop(grace_s=0.2)
        assert node.pids == ()
        assert node.exit_code is not None


def test_wait_until_fails_early_with_the_consoles_when_every_node_has_ended(tmp_path: Path, script: Path) -> None:
    with LocalCluster(tmp_path / "runs", ["--code", "3"], nodes=1, script=script, alone=True) as cluster:
        cluster.start()
        with pytest.raises(TimeoutError, match=r"every node has ended(.|\n)*up node0 0"):
            cluster.wait_until(lambda run: False, timeout_s=DEADLINE_S)
        assert cluster.wait(timeout_s=1) == {"node0": 1}


# -- the command ----------------------------------------------------------------------------------------------------


def _hear_signals() -> None:
    """Also where the tests themselves run under nohup or in the background of a shell."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Command:
    """`zeroband simulate` as a process of its own, in the foreground of nobody."""

    def __init__(self, folder: Path, script: Path, *arguments: str) -> None:
        self.mark = f"test-{os.urandom(8).hex()}"
        self.run_id = self.mark
        self._tmp = Path(tempfile.mkdtemp(prefix="test-", dir="/tmp"))  # short enough for a socket
        source = str(Path(zeroband.__file__).parents[1])
        env = {
            **os.environ,
            MARK: self.mark,
            "PYTHONPATH": os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "TMPDIR": str(self._tmp),
            "ZERO_BAND_RUN__ID": self.run_id,
            "ZERO_BAND_RUN__DIR": str(folder / "runs"),
        }
        self._output = folder / "output"
        command = [sys.executable, "-m", "zeroband.cli", "simulate", "2", "1", str(script), *arguments]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                command, env=env, stdout=output, stderr=subprocess.STDOUT, preexec_fn=_hear_signals
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    def wait_until_up(self) -> None:
        _wait_for(lambda: all(f"[node{i}] up node{i} 0" in self.output for i in range(2)), "both nodes up")

    def nodes(self) -> list[int]:
        """Process ids of the nodes, by their environment, and of the server, whose command line names its socket."""
        run, tmp = f"ZERO_BAND_RUN__ID={self.run_id}".encode(), str(self._tmp).encode()
        others = [pid for pid in _pids() if pid != self.process.pid]
        return [pid for pid in others if run in _environment(pid) or tmp in _command_line(pid)]

    def remove_tmp(self) -> None:
        shutil.rmtree(self._tmp)

    def left_behind(self) -> list[object]:
        return [*self.nodes(), *marked_pids(self.mark), *_shared(self.run_id), *self._tmp.glob("zeroband-*")]


def _pids() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


@pytest.fixture
def commands() -> Iterator[list[Command]]:
    started: list[Command] = []
    yield started
    for command in started:
        command.process.kill()
        command.process.wait()
        signal_all(command.nodes(), signal.SIGKILL)
        for folder in _shared(command.run_id):
            shutil.rmtree(folder)
        command.remove_tmp()


def test_simulate_returns_the_exit_code_of_the_worst_node(
    tmp_path: Path, script: Path, commands: list[Command]
) -> None:
    commands.append(command := Command(tmp_path, script, "--code", "3"))
    assert command.process.wait(DEADLINE_S) == 1  # torchrun's, whatever its ranks ended with
    assert "[node1] up node1 0" in command.output
    assert command.left_behind() == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_simulate_ends_everything_when_it_is_asked_to(
    tmp_path: Path, script: Path, commands: list[Command], number: signal.Signals, code: int
) -> None:
    commands.append(command := Command(tmp_path, script))
    command.wait_until_up()
    assert len(command.nodes()) >= 7
    command.process.send_signal(number)
    assert command.process.wait(DEADLINE_S) == code
    assert command.left_behind() == []


def test_simulate_kills_stubborn_nodes_at_the_second_interrupt(
    tmp_path: Path, script: Path, commands: list[Command]
) -> None:
    commands.append(command := Command(tmp_path, script, "--stubborn"))
    command.wait_until_up()
    command.process.send_signal(signal.SIGINT)
    _wait_for(lambda: "again to kill" in command.output, "the first interrupt is noticed")
    asked_at_s = time.monotonic()
    for _ in range(5):
        command.process.send_signal(signal.SIGINT)
    assert command.process.wait(DEADLINE_S) == 130
    assert time.monotonic() - asked_at_s < 9  # the grace is 10 s
    assert command.left_behind() == []


def test_simulate_interrupted_while_nodes_start_leaves_nothing(
    tmp_path: Path, script: Path, commands: list[Command]
) -> None:
    commands.append(command := Command(tmp_path, script))
    _wait_for(lambda: "2 nodes started" in command.output, "the nodes are being started")
    command.process.send_signal(signal.SIGINT)
    assert command.process.wait(DEADLINE_S) == 130
    assert command.left_behind() == []


def test_nodes_end_by_themselves_when_simulate_is_killed(tmp_path: Path, script: Path, commands: list[Command]) -> None:
    commands.append(command := Command(tmp_path, script))
    command.wait_until_up()
    ranks_and_launchers = [pid for pid in command.nodes() if b"sleep" not in _command_line(pid)]
    assert len(ranks_and_launchers) == 5  # with the server
    command.process.kill()
    command.process.wait()
    _wait_for(lambda: not any(_is_alive(pid) for pid in ranks_and_launchers), "launchers, ranks and server ended")


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
