"""What sites save on the links between them: bytes that leave them, and the time of a round.

Real nodes in namespaces of their own, two at each of four sites, which have one link of a rate to the others; their
inner steps sleep, so that two cores can carry them. The same with sites off, and with one node at each. Linux as root.

    python bench/sites.py [--outer sparseloco] [--rounds 10] [--mbit 30] [--only off named auto alone]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from evidence import count

from zeroband.elastic.membership.records import Verdict
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.tools.cluster import LocalCluster, Network

SITES, NODES_AT_EACH = ("lab-a", "lab-b", "lab-c", "lab-d"), 2
STEP_S, INNER_STEPS, BATCH, LENGTH = 0.2, 5, 2, 32
FIRST = 4
"""Rounds before it are not counted: links are measured, and processes start."""
LIMIT_S = 900.0

TASK = (
    *("--model.d-model", "384", "--model.n-layers", "2", "--model.n-heads", "4", "--model.tie-embeddings"),
    *("--data.seq-length", str(LENGTH), "--train.batch-size", str(BATCH), "--train.micro-bs", str(BATCH)),
    *("--train.dtype", "float32", "--train.threads", "1"),
    *("--outer.inner-steps", str(INNER_STEPS), "--log-level", "WARNING", "--fault.inject", f"inner@+0=TAKES{STEP_S}"),
    *("--elastic.start-timeout-s", "300"),
)

OUTER = {
    "diloco": ("--outer.type", "diloco"),
    "sparseloco": ("--outer.type", "sparseloco", "--outer.k", "512"),  # else its payloads are over in no time
}

RUNS = {
    "off": (NODES_AT_EACH, ("--comm.sites=off",), False),
    "named": (NODES_AT_EACH, ("--comm.sites=named",), True),
    "auto": (NODES_AT_EACH, (), False),
    "alone": (1, ("--comm.sites=off",), False),
}
"""Nodes at each site, what they are told, and whether they name their site."""


@dataclass
class SimulationResult:
    """What a run showed."""

    committed: list[tuple[Verdict, float, int]] = field(default_factory=list[tuple[Verdict, float, int]])
    """Committed rounds, when they were seen, and the bytes that had left all sites by then."""

    @property
    def counted(self) -> list[tuple[Verdict, float, int]]:
        return [row for row in self.committed if row[0].round >= FIRST - 1]


def run(name: str, outer: str, rounds: int, mbit: float) -> SimulationResult:
    """One run to its end."""
    nodes_at_each, arguments, names_them = RUNS[name]
    found, nodes = SimulationResult(), nodes_at_each * len(SITES)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zeroband-bench-")))
        network = stack.enter_context(Network())
        total = (*TASK, *OUTER[outer], f"--train.total-steps={rounds * INNER_STEPS * nodes}", *arguments)
        cluster = LocalCluster(folder, total, nodes=nodes, env={"OMP_NUM_THREADS": "1"}, network=network)
        stack.enter_context(cluster)
        for number in range(nodes):
            site = SITES[number % len(SITES)]
            network.settle(f"node{number}", site, mbit)
            cluster.start(f"node{number}", arguments=[f"--node.site={site}"] if names_them else [])
        assert cluster.redis is not None
        store = RedisStore(cluster.redis.local_url, cluster.run_id, retry_s=30.0)
        stack.callback(store.close)
        end_s = time.monotonic() + LIMIT_S
        while not found.committed or found.committed[-1][0].round < rounds - 1:
            committed = store.view(0).committed
            if committed is not None and (not found.committed or committed.round > found.committed[-1][0].round):
                left = sum(network.sent_by_site(site) for site in SITES)
                found.committed.append((committed, time.monotonic(), left))
            if time.monotonic() > end_s or len(cluster.running) < nodes:
                raise TimeoutError(cluster.describe())
            time.sleep(0.02)
    for verdict, _, _ in found.counted:  # a verdict says that all its members voted for one digest
        assert len(verdict.members) == nodes, f"round {verdict.round} has {len(verdict.members)} of {nodes} members"
    return found


def tell(runs: dict[str, SimulationResult]) -> None:
    print("| sites | nodes | speak | bytes that leave sites in a round, MB | round, median s |\n|" + "---|" * 5)
    for name, found in runs.items():
        pairs = list(pairwise(found.counted))
        took_s = statistics.median(after[1] - before[1] for before, after in pairs)
        rounds = found.counted[-1][0].round - found.counted[0][0].round
        wide = (found.counted[-1][2] - found.counted[0][2]) / rounds / 1e6
        last = found.counted[-1][0].plan
        speak = len(set(last.sites)) or len(last.members)
        print(f"| {name} | {len(last.members)} | {speak} | {wide:.2f} | {took_s:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outer", choices=OUTER, default="diloco")
    parser.add_argument("--rounds", type=count, default=10)
    parser.add_argument("--mbit", type=float, default=30.0)
    parser.add_argument("--only", nargs="*", choices=RUNS, default=list(RUNS))
    asked = parser.parse_args()
    names: Sequence[str] = asked.only
    runs = dict[str, SimulationResult]()
    for name in names:
        runs[name] = run(name, asked.outer, asked.rounds, asked.mbit)
        tell({name: runs[name]})
    tell(runs)


if __name__ == "__main__":
    main()
