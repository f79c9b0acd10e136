"""The README's blocks for GPUs, word for word, as far as this machine goes.

CPUs stand for GPUs, folders for machines, scripts for programs that are not here; the environment makes models tiny.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from zeroband.elastic.store.local_server import find_redis_server

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4

TINY = {
    "MODEL__D_MODEL": "192",  # the heads of every preset divide it
    "MODEL__N_LAYERS": "1",
    "MODEL__D_FF": "32",
    "DATA__VOCAB_SIZE": "500",
    "DATA__SEQ_LENGTH": "16",
    "DATA__SOURCE__TYPE": "synthetic",  # unless a flag says otherwise
    "TRAIN__TOTAL_STEPS": f"{STEPS}",
    "TRAIN__BATCH_SIZE": "2",
    "TRAIN__MICRO_BS": "2",
    "TRAIN__DTYPE": "float32",
    "TRAIN__THREADS": "1",
    "TRAIN__COMPILE": "false",
    "OUTER__INNER_STEPS": "2",
}

STAND_INS = {
    "uv": 'shift; exec "$@"',
    "openssl": "printf '%064d' 1",
    "hostname": "echo 127.0.0.1",
    "redis-server": 'exec {redis} --port {port} "$@"',
    # one task on each node; its options are Slurm's
    "srun": """\
while [ "${{1#-}}" != "$1" ]; do shift; done
tasks=
for node in $(seq 0 $((SLURM_NNODES - 1))); do
    SLURM_NODEID=$node SLURM_PROCID=$node ZERO_BAND_NODE__ID=node$node "$@" &
    tasks="$tasks $!"
done
for task in $tasks; do wait "$task" || exit 1; done""",
}

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def blocks() -> list[str]:
    """The commands of the section, block by block."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## The first real run, on GPUs")[2]
    return re.findall(r"```bash\n(.*?)```", section.partition("\n## ")[0], flags=re.DOTALL)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start commands on a machine, which is a folder; what they leave behind ends with the test."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in STAND_INS.items():
        path = programs / name
        path.write_text("#!/bin/bash\n" + body.format(redis=find_redis_server(), port=port) + "\n", encoding="utf-8")
        path.chmod(0o755)
    environ = {
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "SECRET": "of-the-store",
        "OMP_NUM_THREADS": "1",
        **{f"ZERO_BAND_{name}": value for name, value in TINY.items()},
    }
    with ExitStack() as stack:

        def run(commands: str, machine: str, **variables: str) -> subprocess.Popen[str]:
            (tmp_path / machine).mkdir(exist_ok=True)
            venv = tmp_path / machine / ".venv"
            if not venv.exists():
                venv.symlink_to(Path(sys.executable).parents[1])
            for there, here in {
                "=gpu": "=1",
                ":6379": f":{port}",
                "10.0.0.1": "127.0.0.1",
                "0.0.0.0": "127.0.0.1",
            }.items():
                commands = commands.replace(there, here)
            started = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", commands], cwd=tmp_path / machine, env=environ | variables,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            )  # fmt: skip
            stack.callback(end, started)
            return started

        yield run


def end(started: subprocess.Popen[str]) -> None:
    """End what is left of a process's group."""
    with suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)
    started.communicate(timeout=10)


def finished(folder: Path) -> tuple[int, bool]:
    """Inner steps that a node trained, and whether it finished the run."""
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    events = [json.loads(line)["kind"] for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    return metrics[-1]["step"], "run_finished" in events


def test_section_has_a_block_for_one_machine_for_two_and_for_slurm(blocks: list[str]) -> None:
    assert len(blocks) == 3
    assert ["redis-server" in block for block in blocks] == [False, True, True]
    assert [len(re.findall(r"zeroband launch --nproc_per_node=gpu @\d+\w", block)) for block in blocks] == [1, 1, 1]


@pytest.mark.slow
def test_block_for_one_machine_trains_alone(start: Start, blocks: list[str], tmp_path: Path) -> None:
    done = start(blocks[0], "one", ZERO_BAND_NODE__ID="n0")
    printed, _ = done.communicate(timeout=120)
    assert done.returncode == 0, printed
    assert "made-up tokens" in printed
    assert finished(tmp_path / "one/runs/speed/n0") == (STEPS, True)


@pytest.mark.slow
def test_block_for_two_machines_trains_one_model_on_both(start: Start, blocks: list[str], tmp_path: Path) -> None:
    store, _, node = blocks[1].partition("\n\n")
    start(store, "store")
    nodes = [start(node, name, ZERO_BAND_NODE__ID=name) for name in ("a", "b")]
    printed = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(printed)
    for name in ("a", "b"):
        assert finished(tmp_path / name / "runs/first-try" / name) == (STEPS, True)


@pytest.mark.soak
@pytest.mark.slow
def test_block_for_slurm_trains_one_model_on_all_nodes(start: Start, blocks: list[str], tmp_path: Path) -> None:
    job = start(blocks[2], "job", SLURM_JOB_ID="4711", SLURM_NNODES="2")
    try:
        job.wait(timeout=120)
    finally:
        os.killpg(job.pid, signal.SIGKILL)  # as Slurm ends what is left of a job
    printed = job.communicate(timeout=10)[0]
    assert job.returncode == 0, printed
    for name in ("node0", "node1"):
        assert finished(tmp_path / "job/runs/4711" / name) == (STEPS, True)
