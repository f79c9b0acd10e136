"""What a round costs a member whatever the size of the model: processor time and calls to the store, of real nodes.

Nodes of one rank with a tiny model make rounds as fast as they can, once with few inner steps in each and once with
more: what is left of a round without its inner steps is the fixed cost. The processor time is the trainer's, with all
of its threads; leases are long, so that few calls to the store belong to anything else.

    python bench/round_cost.py --nodes 2 4
    python bench/round_cost.py --against /path/to/another/checkout   # in turns with that one, which is `before`
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
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


def cost_of(sources: Path, nodes: int, steps: int, seconds: float, arguments: Sequence[str]) -> Cost:
    """Run `nodes` nodes with the package in `sources`, and measure their rounds for `seconds`."""
    with tempfile.TemporaryDirectory(prefix="zeroband-bench-") as folder:
        given = (*TINY, "--fault.detect-s", "10", "--outer.inner-steps", str(steps), *arguments)
        cached = ("--data.cache-dir", f"{folder}/cache")
        script, env = sources / "zeroband" / "train.py", {"OMP_NUM_THREADS": "1"}
        with LocalCluster(Path(folder), (*given, *cached), nodes=nodes, script=script, env=env) as cluster:
            for _ in range(nodes):
                cluster.start(env={"PYTHONPATH": str(sources)})
            cluster.wait_until(lambda run: (run.round or 0) >= WARM_ROUNDS, timeout_s=START_S)
            assert cluster.redis is not None
            client, running = redis.Redis.from_url(cluster.redis.local_url), list(cluster.nodes.values())

            def now() -> tuple[float, float, int]:
                info: dict[str, Any] = client.info("commandstats")  # type: ignore[assignment]
                return time.time(), sum(map(cpu_s, running)), info["cmdstat_evalsha"]["calls"]

            before = now()
            time.sleep(seconds)
            after = now()
            client.close()
            records = [r for node in running for r in node.metrics() if before[0] <= r["at_s"] < after[0]]
        rounds = sum("outer/round" in record for record in records)  # of all members
        require(rounds >= 10 * nodes, f"{rounds} rounds in {seconds:g} s")
        took_s, spent_s, calls = (b - a for a, b in zip(before, after, strict=True))
        return Cost(spent_s / rounds, calls / rounds, took_s * nodes / rounds)


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
                for side, sources in sides.items():
                    cost = cost_of(sources, nodes, steps, options.seconds, arguments)
                    found.setdefault((side, steps), []).append(cost)
        for side in sides:
            few, many = (statistics.median(cost.cpu_s for cost in found[side, steps]) for steps in (FEW, MANY))
            step_s, calls = (many - few) / (MANY - FEW), statistics.median(cost.calls for cost in found[side, FEW])
            print(f"{nodes} | {side} | {1e3 * (few - FEW * step_s):.1f} | {calls:.1f} | {1e3 * step_s:.2f}", flush=True)


if __name__ == "__main__":
    main()
