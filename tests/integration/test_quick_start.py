"""The README's blocks for real runs, word for word, as far as this machine goes.

The environment makes models tiny, and programs that are not here are scripts. Two machines are two hosts without a
common disk (`tests/hosts.py`).
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.hosts import obstacle
from tests.tutorial import ROOT, Block, blocks_in, terminals, two_hosts

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
    "TRAIN__COMPILE": "false",
    "OUTER__INNER_STEPS": "2",
}

STAND_INS = {
    "uv": 'shift; exec "$@"',
    "hostname": "echo localhost",
    # one task on each node; its options are Slurm's
    "srun": """\
while [ "${1#-}" != "$1" ]; do shift; done
tasks=
for node in $(seq 0 $((SLURM_NNODES - 1))); do
    SLURM_NODEID=$node SLURM_PROCID=$node ZERO_BAND_NODE__ID=node$node "$@" &
    tasks="$tasks $!"
done
for task in $tasks; do wait "$task" || exit 1; done""",
}


@pytest.fixture(scope="module")
def blocks() -> list[Block]:
    """The blocks of the section: one machine, the store, what it prints, both machines, a later one, Slurm."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## The first real run, on GPUs")[2]
    return blocks_in(section.partition("\n## ")[0], "README.md")


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in STAND_INS.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
        (programs / name).chmod(0o755)
    tiny = {f"ZERO_BAND_{name}": value for name, value in TINY.items()}
    return {"PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}", **tiny}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "clone").mkdir()
    return tmp_path / "clone"


def finished(run_dir: Path, node_id: str) -> tuple[int, bool]:
    """Inner steps that a node trained, and whether it finished the run."""
    folder = run_dir / node_id
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    events = [json.loads(line)["kind"] for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    return metrics[-1]["step"], "run_finished" in events


def test_section_has_blocks_for_one_machine_for_two_and_for_slurm(blocks: list[Block]) -> None:
    typed = [block.words for block in blocks if block.language == "bash"]
    assert typed == [{}, {"terminal": "store"}, {"types": "store"}, {"types": "store"}, {}]
    launched = [len(re.findall(r"zeroband launch @\d+\w", block.text)) for block in blocks]
    assert launched == [1, 0, 0, 1, 0, 1] and "zeroband join" in blocks[4].text


@pytest.mark.slow
def test_block_for_one_machine_trains_alone(env: Mapping[str, str], blocks: list[Block], folder: Path) -> None:
    with terminals(folder, {**env, "ZERO_BAND_NODE__ID": "n0"}) as opened:
        opened.type(blocks[0])
        printed = opened.output()
    assert "made-up tokens" in printed
    assert finished(folder / "runs/speed", "n0") == (STEPS, True)


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.skipif(bool(obstacle()), reason=obstacle())
@pytest.mark.parametrize(
    "names", [("one", "two"), pytest.param(("vm", "vm"), marks=pytest.mark.soak)], ids=["two names", "one name"]
)
def test_blocks_for_two_machines_train_one_model_on_both(
    env: Mapping[str, str], blocks: list[Block], tmp_path: Path, names: tuple[str, str]
) -> None:
    store, shown, both, later = blocks[1:5]
    with two_hosts(tmp_path, second=("b",), hostnames=names, env=env) as opened:
        opened.type(store)
        opened.expect(shown)
        if names[0] == names[1]:  # the doctor says so to both, and what to type; one of them does
            for terminal in ("a", "b"):
                opened.type(both.only("doctor", exit="3"), terminal)
            opened.wait_for("a", "b")
            (advice,) = re.findall(
                r"2 machines are called vm .*\n.*(export ZERO_BAND_NODE__ID=vm-[12])\n", opened.output("b")
            )
            opened.type(both.only("launch").after(advice), "b")
            opened.type(both.only("launch"), "a")
            names = ("vm", advice.partition("=")[2])
        else:
            for terminal in ("a", "b"):
                opened.type(both, terminal)
        opened.wait_for("a", "b")
        opened.type(later, "b")  # the run is complete by then: it says so
        opened.wait_for("b")
        opened.press_ctrl_c("store")
        opened.wait_for("store")
    for number, name in enumerate(names):
        run_dir = tmp_path / f"disk-{number}" / "runs/first-try"
        assert finished(run_dir, name) == (STEPS, True)
        assert [path.name for path in run_dir.iterdir() if (path / "events.jsonl").exists()] == [name]


@pytest.mark.soak
@pytest.mark.slow
def test_block_for_slurm_trains_one_model_on_all_nodes(
    env: Mapping[str, str], blocks: list[Block], folder: Path
) -> None:
    with terminals(folder, {**env, "SLURM_JOB_ID": "4711", "SLURM_NNODES": "2"}) as opened:
        opened.type(blocks[5])
    for name in ("node0", "node1"):
        assert finished(folder / "runs/4711", name) == (STEPS, True)
