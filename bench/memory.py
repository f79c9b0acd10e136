"""What a node of CPUs takes in memory, by file and by kind, beside what the doctor counts on before it starts.

Two nodes of one rank train with DiLoCo in int8 on this machine: 203 M parameters by default, 14 GB of memory. Looked at
once a second; the most of each is shown. Linux only.

    python bench/memory.py [--d-model 1024] [--layers 16]
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from pathlib import Path

from evidence import count, require

from zeroband.checks.needs import CPU_PROCESS_BYTES
from zeroband.tools.cluster import LocalCluster
from zeroband.tools.plan.memory import planned_config, planned_needs

STEPS, INNER_STEPS = 24, 3
LIMIT_S = 3600.0
KINDS = {"Pss_Anon": "not shared", "Pss_Shmem": "shared memory"}


def task(d_model: int, layers: int) -> tuple[str, ...]:
    """Arguments of the nodes: large parameters and hardly any activations."""
    return (
        *(f"--model.d-model={d_model}", f"--model.n-layers={layers}", f"--model.n-heads={d_model // 64}"),
        *("--data.seq-length=32", "--train.batch-size=1", "--train.micro-bs=1", "--train.dtype=float32"),
        *("--train.threads=1", "--outer.type=diloco", f"--outer.inner-steps={INNER_STEPS}", "--comm.codec=int8"),
        *(f"--train.total-steps={STEPS}", "--fault.detect-s=30", "--log-level=WARNING"),
    )


def kinds_of(pid: int) -> dict[str, int]:
    """Bytes of a process by kind; empty once it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return {}
    return {kind: 1024 * int(found[1]) for kind in KINDS if (found := re.search(rf"^{kind}:\s+(\d+)", text, re.M))}


def files_of(folder: Path) -> dict[str, int]:
    """Bytes of a node's files in shared memory."""
    return {path.name: 512 * path.stat().st_blocks for path in folder.glob("*") if path.is_file()}


def watch(arguments: tuple[str, ...]) -> tuple[dict[str, int], dict[str, int]]:
    """Run the nodes; returns the most bytes of the first one by file, and of its trainer by kind."""
    files, kinds = dict[str, int](), dict[str, int]()
    with tempfile.TemporaryDirectory() as folder, LocalCluster(Path(folder), arguments, nodes=2) as cluster:
        first, _ = cluster.start(), cluster.start()
        until_s = time.monotonic() + LIMIT_S
        while cluster.running:
            require(time.monotonic() < until_s, f"the nodes trained for longer than {LIMIT_S:g} s")
            trainers = [kinds_of(pid) for pid in first.rank_pids[:1]]
            for most, found in ((files, [files_of(first.spec.memory)]), (kinds, trainers)):
                for seen in found:
                    most.update({name: max(size, most.get(name, 0)) for name, size in seen.items()})
            time.sleep(1.0)
        require(set(cluster.wait(timeout_s=60).values()) == {0}, cluster.describe())
    return files, kinds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d-model", type=count, default=1024)
    parser.add_argument("--layers", type=count, default=16)
    arguments = parser.parse_args()
    asked = task(arguments.d_model, arguments.layers)
    needs = planned_needs(planned_config(asked))
    files, kinds = watch(asked)
    require(bool(files and kinds), "the first node had ended before it was looked at")
    counted = {"Pss_Anon": needs.training_bytes + CPU_PROCESS_BYTES, "Pss_Shmem": needs.shared_bytes}
    print(f"{needs.params:,} parameters\n\n| | counted on, MB | most seen, MB | seen / counted |\n|---|---|---|---|")
    for kind, name in KINDS.items():
        print(f"| {name} | {counted[kind] / 1e6:,.0f} | {kinds[kind] / 1e6:,.0f} | {kinds[kind] / counted[kind]:.3f} |")
    total, seen = sum(counted.values()), sum(kinds.values())
    print(f"| a trainer | {total / 1e6:,.0f} | {seen / 1e6:,.0f} | {seen / total:.3f} |\n")
    for name, size in sorted(files.items(), key=lambda item: -item[1]):
        print(f"{size / 1e6:10,.1f} MB  {name}")


if __name__ == "__main__":
    main()
