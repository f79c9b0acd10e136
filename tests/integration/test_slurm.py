"""The files of deploy/slurm on a real Slurm: its daemons on this machine, which stands for two, and nodes on the CPU.

By hand, as root, where Debian's slurm-wlm and munge are: ./scripts/test.sh -m soak tests/integration/test_slurm.py -s
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_runs import TINY_MODEL

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120.0
NODES = ("n1", "n2")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
SBIN = f"{os.environ['PATH']}:/usr/sbin"

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's daemons start jobs as their users: root"),
    pytest.mark.skipif(
        not all(shutil.which(name, path=SBIN) for name in PROGRAMS), reason=f"needs {', '.join(PROGRAMS)}"
    ),
]

CONF = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=5,sched_interval=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[0]} CPUs={cpus}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus}
PartitionName=all Nodes=n1,n2 Default=YES PriorityTier=1
PartitionName=urgent Nodes=n1,n2 PriorityTier=10 PreemptMode=OFF
"""

TINY = (
    *("@debug/diloco", *TINY_MODEL),
    *("--data.seq-length", "32", "--data.source.type", "synthetic", "--data.source.documents", "200"),
    *("--train.total-steps", "1000000", "--train.threads", "1", "--train.batch-size", "4", "--train.micro-bs", "4"),
    *("--fault.detect-s", "2", "--fault.inject", "inner@+0=TAKES0.05"),
)
"""Endless; a round takes half a second, most of it sleep."""


def wait_for(is_so: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < end_s, f"not within {DEADLINE_S:g} s: {what}"
        time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@dataclass(frozen=True)
class Slurm:
    """A cluster of two nodes on this machine."""

    folder: Path
    env: Mapping[str, str]

    def call(self, *command: str) -> str:
        done = subprocess.run(command, cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, script: str, *options: str, arguments: tuple[str, ...] = ()) -> str:
        """Submit a file of deploy/slurm with options of sbatch, TINY and more for the nodes. Gives the job's number."""
        places = (f"--output={self.folder}/%j.log", "--gpus-per-node=0", "--parsable")
        return self.call("sbatch", *places, *options, f"deploy/slurm/{script}", *TINY, *arguments)

    def field(self, job: str, name: str) -> str:
        """A field of `scontrol show job`."""
        shown = dict(part.partition("=")[::2] for part in self.call("scontrol", "show", "job", job).split())
        return shown[name]

    def events(self, run_id: str, node: str, kind: str) -> list[dict[str, Any]]:
        file = self.folder / "runs" / run_id / node / "events.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def rounds(self, run_id: str, node: str) -> int:
        return len(self.events(run_id, node, "round_committed"))

    def await_rounds(self, run_id: str, node: str, more: int = 3) -> None:
        """Wait until a node has taken part in so many more rounds of two."""

        def together() -> int:
            return sum(len(event["members"]) == 2 for event in self.events(run_id, node, "round_committed"))

        wanted = together() + more
        wait_for(lambda: together() >= wanted, f"{node} trains with the other one; {self.logs()}")

    def logs(self) -> str:
        return "\n".join(f"{path}:\n{path.read_text()[-3000:]}" for path in self.folder.glob("*.log"))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    port, store, *ports = free_ports(4)
    host, cpus = socket.gethostname().partition(".")[0], os.cpu_count()
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(folder=folder, host=host, port=port, ports=ports, cpus=cpus))
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "ZERO_BAND"))},
        "PATH": SBIN,
        "SLURM_CONF": str(conf),
        "SLURM_RANKS": "1",
        "OMP_NUM_THREADS": "1",
        "STORE_BIND": "127.0.0.1",
        "STORE_PORT": str(store),
        "ZEROBAND_SECRETS": str(folder / "secrets"),
        "ZERO_BAND_RUN__DIR": str(folder / "runs"),
        "ZERO_BAND_DATA__CACHE_DIR": str(folder / "cache"),
    }
    names = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "seed-file": "munge.seed"}
    places = [f"--{option}={folder / name}" for option, name in {**names, "log-file": "munge.log"}.items()]
    cluster = Slurm(folder, env)
    try:
        cluster.call("munged", "--force", *places)
        cluster.call("slurmctld")
        for node in NODES:
            cluster.call("slurmd", "-N", node)
        wait_for(lambda: cluster.call("sinfo", "--noheader", "-o", "%T %D") == "idle 2", cluster.logs())
        yield cluster
    finally:
        with suppress(AssertionError, subprocess.TimeoutExpired):
            cluster.call("scancel", "--user=root")
            wait_for(lambda: cluster.call("squeue", "--noheader") == "", "all jobs are over")
        for name in (*(f"{node}.pid" for node in NODES), "slurmctld.pid", "munge.pid"):
            with suppress(FileNotFoundError, ProcessLookupError):
                os.kill(int((folder / name).read_text()), signal.SIGTERM)


def test_one_job_trains_on_all_its_nodes_and_leaves_in_good_order(slurm: Slurm) -> None:
    """Asked by the signal that comes before the time is up. With --resume it is queued again, and goes on."""
    checkpoints = ("--ckpt.path", str(slurm.folder / "checkpoints"), "--ckpt.every-rounds", "2", "--resume")
    (slurm.folder / "checkpoints").mkdir()
    job = slurm.submit("job.sbatch", arguments=checkpoints)
    for node in NODES:
        slurm.await_rounds(f"job-{job}", node)
    secret = slurm.folder / "secrets" / f"job-{job}" / "token"
    assert secret.stat().st_mode & 0o777 == 0o600
    token = secret.read_text().strip()
    commands = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline")]
    assert any(b"redis-server" in command for command in commands)
    assert not [command for command in commands if token.encode() in command]
    slurm.call("scancel", "--batch", "--signal=USR1", job)
    wait_for(lambda: slurm.field(job, "JobState") == "PENDING", f"queued again; {slurm.logs()}")
    for node in NODES:
        (left,) = slurm.events(f"job-{job}", node, "left")
        assert left["reason"].startswith("left as asked")
    last = max(event["round"] for event in slurm.events(f"job-{job}", "n1", "round_committed"))
    slurm.call("scontrol", "update", f"JobId={job}", "StartTime=now")  # else in about two minutes
    wait_for(lambda: len(slurm.events(f"job-{job}", "n1", "resumed_from")) == 1, f"resumed; {slurm.logs()}")
    slurm.await_rounds(f"job-{job}", "n1")
    assert max(event["round"] for event in slurm.events(f"job-{job}", "n1", "round_committed")) > last
    slurm.call("scancel", job)
    wait_for(lambda: slurm.field(job, "JobState") == "CANCELLED", slurm.logs())


def test_nodes_of_an_array_come_leave_and_come_back(slurm: Slurm) -> None:
    store = subprocess.Popen(["deploy/slurm/store.sh", "127.0.0.1", slurm.env["STORE_PORT"]], cwd=ROOT, env=slurm.env)
    try:
        url = slurm.folder / "secrets" / "store.url"
        wait_for(url.exists, "the store is up")
        run = ("--run.id", "array", "--elastic.start-nodes", "2")
        job = slurm.submit("array.sbatch", "--array=0-1", arguments=run)
        for node in ("node0", "node1"):
            slurm.await_rounds("array", node)

        # asked by the signal that comes before the time is up: it alone is queued again, and the other one trains on
        slurm.call("scancel", "--batch", "--signal=USR1", f"{job}_1")
        wait_for(lambda: slurm.field(f"{job}_1", "JobState") == "PENDING", f"queued again; {slurm.logs()}")
        assert slurm.field(f"{job}_0", "JobState") == "RUNNING"
        assert len(slurm.events("array", "node1", "left")) == 1
        slurm.call("scontrol", "update", f"JobId={job}_1", "StartTime=now")
        wait_for(lambda: len(slurm.events("array", "node1", "joined")) == 2, f"it is back; {slurm.logs()}")
        slurm.await_rounds("array", "node1")

        # preempted: Slurm signals every process of the job, and queues it again by itself
        urgent = slurm.call("sbatch", "--parsable", "-p", "urgent", "-w", "n2", "--exclusive", "-o", "/dev/null",
                            "--wrap", "sleep 600")  # fmt: skip
        moved = next(n for n in (0, 1) if slurm.field(f"{job}_{n}", "NodeList") == "n2")
        wait_for(lambda: slurm.field(f"{job}_{moved}", "JobState") == "PENDING", f"preempted; {slurm.logs()}")
        left = slurm.events("array", f"node{moved}", "left")
        assert left[-1]["reason"].startswith("left as asked") and len(left) == (2 if moved == 1 else 1)
        slurm.call("scancel", urgent)

        # cancelled: it leaves in good order, too, and for good
        stays = f"{job}_{1 - moved}"
        slurm.call("scancel", stays)
        wait_for(lambda: slurm.field(stays, "JobState") == "CANCELLED", slurm.logs())
        wait_for(lambda: len(slurm.events("array", f"node{1 - moved}", "left")) >= 1, slurm.logs())
        assert "Traceback" not in slurm.logs()
    finally:
        store.terminate()
        store.wait(20)
