"""E5: compute utilisation over shaped links, measured against what `zeroband plan` predicts.

Linux as root, with `ip` and a C compiler (bench/wan.py).

Real nodes in network namespaces, every access link shaped in both directions; inner steps sleep (TAKES), so that nodes
compute as machines of their own would. Both columns are for an inner step as long as it was measured to be. The store
is not behind the links, and all nodes share this machine's cores in a round: so the prediction is made.

    python bench/utilisation.py [--methods ddp diloco ...] [--mbit 1 3 10 30] [--nodes 4] [--rtt-ms 20]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from evidence import count, require
from wan import Wan

from zeroband.tools.cluster import LocalCluster, RedisServer
from zeroband.tools.compare.methods import PRESETS, Arm, flags_of
from zeroband.tools.compare.results import RunMeasurements, measured
from zeroband.tools.plan.forecast import Forecast, Job, Link, forecasts

STEP_S = 0.2
STORE_RTT_S = 5e-4
"""Redis on this machine, asked by Python."""

INNER_STEPS = 20
WARM_ROUNDS, ROUNDS = 12, 4
"""That come before and are not measured, and that are. Nodes that meet connect and measure their links, which takes
seconds where they are slow, and find a pace for them by trying; a forecast is for what comes after."""

WARM_STEPS, STEPS = 60, 24
"""The same where every step is a round, of which none takes long enough to be paced."""

PER_STEP = ("ddp", "ddp-bf16", "ddp-int8", "demo")
"""Methods that synchronise at every step."""

PREDICTED = {
    "ddp": ("ddp", "fp32"),
    "ddp-bf16": ("ddp", "bf16"),
    "ddp-int8": ("ddp", "int8"),
    "diloco": ("diloco", "int8"),
    "diloco-fp32": ("diloco", "fp32"),
    "streaming": ("streaming", "int4"),
    "eager": ("eager", "int8"),
    "demo": ("demo", "sign"),
    "sparseloco": ("sparseloco", "two_bit"),
}

MODEL = (
    *("--model.d-model", "128", "--model.n-layers", "4", "--model.n-heads", "4", "--model.tie-embeddings"),
    *("--data.seq-length", "32", "--data.source.type", "synthetic", "--data.source.documents", "200"),
    *("--train.dtype", "float32", "--train.threads", "1", "--train.batch-size", "1", "--train.micro-bs", "1"),
    *("--fault.inject", f"inner@+0=TAKES{STEP_S}", "--log-level", "WARNING"),
)


class Links:
    """Namespaces of bench/wan.py under the names of the nodes, as LocalCluster wants them."""

    def __init__(self, wan: Wan) -> None:
        self._wan = wan
        self._numbers: dict[str, int] = {}

    def _number(self, node: str) -> int:
        return self._numbers.setdefault(node, len(self._numbers))

    def prefix(self, node: str) -> list[str]:
        program, *rest = self._wan.prefix(self._number(node))
        found = shutil.which(program)  # nodes are started by an absolute path
        assert found is not None
        return [found, *rest]

    def address(self, node: str) -> str:
        return self._wan.address(self._number(node))


def run(preset: str, mbit: float, rtt_ms: float, nodes: int) -> tuple[RunMeasurements, int]:
    """What the nodes counted once they had met, up to the last round, and the model's size."""
    per_step = preset in PER_STEP
    round_steps, warm, rounds = (1, WARM_STEPS, STEPS) if per_step else (INNER_STEPS, WARM_ROUNDS, ROUNDS)
    arguments = flags_of(Arm(preset, preset), nodes=nodes, inner_steps=INNER_STEPS)
    arguments += [f"--train.total-steps={(warm + rounds + 1) * round_steps}"]
    records, params = trained(arguments, mbit, rtt_ms, nodes)
    return measured([_in_the_middle(of_node, warm) for of_node in records]), params


def trained(
    arguments: Sequence[str], mbit: float, rtt_ms: float, nodes: int
) -> tuple[list[list[dict[str, object]]], int]:
    """The metrics of each node of a run with these flags, and the model's size."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zeroband-bench-")))
        wan = stack.enter_context(Wan(nodes, rate_mbit=mbit, rtt_ms=rtt_ms))
        cluster = LocalCluster(
            folder / "runs",
            [*MODEL, *arguments, f"--data.cache-dir={folder / 'cache'}"],
            nodes=nodes,
            env={"OMP_NUM_THREADS": "1"},
            network=Links(wan),  # pyright: ignore[reportArgumentType] - it asks for these two methods only
            redis=RedisServer(),
        )
        stack.enter_context(cluster)
        for _ in range(nodes):
            cluster.start()
        codes = cluster.wait(timeout_s=1200)
        assert set(codes.values()) == {0}, cluster.describe()
        params = next(node.parameters for node in cluster.view().nodes if node.parameters)
        return [node.metrics() for node in cluster.nodes.values()], params


def _in_the_middle(records: list[dict[str, object]], warm: int) -> list[dict[str, object]]:
    """Without so many rounds in the beginning, and the last one, for which all wait whatever they overlap."""
    ends = [number for number, record in enumerate(records) if "outer/round" in record]
    assert len(ends) > warm + 1, "a node was away for some rounds: nothing to compare"
    return records[ends[warm - 1] + 1 : ends[-2] + 1]


def predict(preset: str, step_s: float, params: int, mbit: float, rtt_ms: float, nodes: int) -> Forecast:
    """The forecast of `zeroband plan` for the same job."""
    steps, cores = INNER_STEPS, min(1.0, (os.cpu_count() or 1) / nodes)
    job = Job(params, nodes, step_s, steps, sparse_steps=steps, fragments=2, overlap=1, cores=cores)
    link = Link(mbit * 1e6 / 8, mbit * 1e6 / 8, rtt_ms / 1e3, STORE_RTT_S)
    return next(f for f in forecasts(job, link) if (f.method, f.codec) == PREDICTED[preset])


def row(preset: str, mbit: float, found: RunMeasurements, said: Forecast) -> str:
    """A line of the table."""
    ours, theirs = 100 * found.compute_utilisation, 100 * said.compute_utilisation
    still = (found.blocked_s / found.steps * said.round_steps, said.own_s + said.waits_s)
    cells = [preset, f"{mbit:g}", f"{found.step_s:.3f}", f"{ours:.1f} %", f"{theirs:.1f} %", f"{ours - theirs:+.1f}"]
    return "| " + " | ".join([*cells, *(f"{s:.3f}" for s in still)]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=[name for name in PRESETS if name in PREDICTED])
    parser.add_argument("--mbit", nargs="+", type=float, default=[1, 3, 10, 30, 100])
    parser.add_argument("--nodes", type=count, default=4)
    parser.add_argument("--rtt-ms", type=float, default=20)
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    print("| method | Mbit/s | s a step | computes, measured | predicted | points | still, s a round | predicted |")
    print("|---|---|---|---|---|---|---|---|")
    for preset in arguments.methods:
        for mbit in arguments.mbit:
            found, params = run(preset, mbit, arguments.rtt_ms, arguments.nodes)
            require(found.steps > 0 and found.wall_s > 0, f"{preset} at {mbit:g} Mbit/s recorded no inner step")
            said = predict(preset, found.step_s, params, mbit, arguments.rtt_ms, arguments.nodes)
            rows.append({"mbit": mbit, "params": params, "measured": asdict(found), "predicted": asdict(said)})
            print(row(preset, mbit, found, said), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
