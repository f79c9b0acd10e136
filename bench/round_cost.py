"""What a round costs a member whatever the size of the model: processor time and calls to the store, of real nodes.

Nodes of one rank with a tiny model make rounds as fast as they can, once with few inner steps in each and once with
more: what is left of a round without its inner steps is the fixed cost. The processor time is the trainer's, with all
of its threads; leases are long, so that few calls to the store belong to anything else.

    python bench/round_cost.py --nodes 2 4
    python bench/round_cost.py --against /path/to/another/checkout   # at the same time as that one, which is `before`
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from elastic import TINY
from evidence import count, require

from zeroband.tools.cluster import LocalCluster, NodeProcess

SOURCES = Path(__file__).resolve().parents[1] / "src"
FEW, MANY = 1, 9
"""Inner steps of a round."""
WARM_ROUNDS, START_S = 30, 120.0
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Cost:
    """What a round costs one member, with its inner steps."""

    cpu_s: float
    calls: float
    """To the store."""
    seconds: float


def cpu_s(node: NodeProcess) -> float:
    """Processor time of a node's ranks up to here."""
    spent = 0
    for pid in node.rank_pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        spent += int(fields[11]) + int(fields[12])
    return spent / TICKS_A_SECOND


class Run:
    """Nodes of one rank with the package in `sources`, which make rounds of so many inner steps."""

    def __init__(self, stack: ExitStack, sources: Path, nodes: int, steps: int, arguments: Sequence[str]) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="zeroband-bench-"))
        given = (*TINY, "--fault.detect-s", "10", "--outer.inner-steps", str(steps), *arguments)
        cached = ("--data.cache-dir", f"{folder}/cache")
        script, env = sources / "zeroband" / "train.py", {"OMP_NUM_THREADS": "1"}
        self._cluster = stack.enter_context(
            LocalCluster(Path(folder), (*given, *cached), nodes=nodes, script=script, env=env)
        )
        for _ in range(nodes):
            self._cluster.start(env={"PYTHONPATH": str(sources)})
        assert self._cluster.redis is not None
        self._client = stack.enter_context(redis.Redis.from_url(self._cluster.redis.local_url))

    def warm_up(self) -> None:
        """Wait until its first rounds are over."""
        self._cluster.wait_until(lambda run: (run.round or 0) >= WARM_ROUNDS, timeout_s=START_S)

    def now(self) -> tuple[float, float, int]:
        """The time, and the processor seconds of its ranks and their calls up to here."""
        info: dict[str, Any] = self._client.info("commandstats")  # type: ignore[assignment]
        return time.time(), sum(map(cpu_s, self._cluster.nodes.values())), info["cmdstat_evalsha"]["calls"]

    def cost(self, before: tuple[float, float, int], after: tuple[float, float, int]) -> Cost:
        """What a round cost between two of `now`."""
        nodes = self._cluster.nodes.values()
        records = [r for node in nodes for r in node.metrics() if before[0] <= r["at_s"] < after[0]]
        rounds = sum("outer/round" in record for record in records)  # of all members
        took_s, spent_s, calls = (b - a for a, b in zip(before, after, strict=True))
        require(rounds >= 10 * len(nodes), f"{rounds} rounds in {took_s:g} s")
        return Cost(spent_s / rounds, calls / rounds, took_s * len(nodes) / rounds)


def costs_of(
    sides: Mapping[str, Path], nodes: int, steps: int, seconds: float, arguments: Sequence[str]
) -> dict[str, Cost]:
    """Run the packages of all sides at one time, so that they share what else the machine does, for `seconds`."""
    with ExitStack() as stack:
        runs = {side: Run(stack, sources, nodes, steps, arguments) for side, sources in sides.items()}
        for run in runs.values():
            run.warm_up()
        before = {side: run.now() for side, run in runs.items()}
        time.sleep(seconds)
        return {side: run.cost(before[side], run.now()) for side, run in runs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=count, nargs="+", default=[2])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--repeats", type=count, default=2)
    parser.add_argument("--against", type=Path, help="another checkout, whose C++ is built")
    options, arguments = parser.parse_known_args()
    sides = {"now": SOURCES}
    if options.against is not None:
        sides = {"before": options.against.resolve() / "src", **sides}
    print("nodes | | a round without its inner steps: ms of processor | calls to the store | an inner step, ms")
    for nodes in options.nodes:
        found: dict[tuple[str, int], list[Cost]] = {}
        for _ in range(options.repeats):
            for steps in (FEW, MANY):
                for side, cost in costs_of(sides, nodes, steps, options.seconds, arguments).items():
                    found.setdefault((side, steps), []).append(cost)
        for side in sides:
            few, many = (statistics.median(cost.cpu_s for cost in found[side, steps]) for steps in (FEW, MANY))
            step_s, calls = (many - few) / (MANY - FEW), statistics.median(cost.calls for cost in found[side, FEW])
            print(f"{nodes} | {side} | {1e3 * (few - FEW * step_s):.1f} | {calls:.1f} | {1e3 * step_s:.2f}", flush=True)


if __name__ == "__main__":
    main()
