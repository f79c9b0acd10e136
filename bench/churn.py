"""E6: nodes that leave and join at random against a run that none leaves: held-out loss at equal tokens, and goodput.

Eight real nodes on this machine train with DiLoCo; one takes three times as long for an inner step. In the second run a
node leaves every few rounds (exponential gaps, in turns asked to and killed) and comes back about two rounds later.

    python bench/churn.py [--nodes 8] [--steps 800] [--every-rounds 3] [--seed 0]
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from evidence import count, finite, require
from held_out import curve_of, loss_at, task, trained_tokens

from zeroband.tools.cluster import LocalCluster

INNER_STEPS, BATCH, LENGTH = 20, 8, 64
SLOW_STEP_S = 1.5
"""Of the straggler; about three times what a step of eight nodes on two cores takes."""
KEPT = 2
"""Nodes that never leave, so that the state is never lost."""
LIMIT_S = 7200.0


@dataclass
class Run:
    """What a run left behind."""

    curve: list[tuple[int, float]] = field(default_factory=list)
    """Committed tokens and held-out loss, in order."""
    trained: int = 0
    """Tokens that nodes trained on, counted or lost."""
    wall_s: float = 0.0
    departures: int = 0

    @property
    def goodput(self) -> float:
        """Part of the trained tokens that the committed state contains."""
        return self.curve[-1][0] / self.trained


@contextmanager
def cluster_of(folder: Path, nodes: int, steps: int) -> Iterator[LocalCluster]:
    learns = task(folder / "ck", d_model=64, length=LENGTH, batch=BATCH, inner_steps=INNER_STEPS, steps=steps)
    arguments = (*learns, "--outer.straggler-deadline-s=5", "--fault.detect-s=3")
    with LocalCluster(folder / "runs", arguments, nodes=nodes, run_id="run", env={"OMP_NUM_THREADS": "1"}) as cluster:
        for number in range(nodes):
            slow = ["--fault.inject", f"inner@+0=TAKES{SLOW_STEP_S}"] if number == nodes - 1 else []
            cluster.start(arguments=slow)
        yield cluster


def train(nodes: int, steps: int, every_rounds: float | None, seed: int) -> Run:
    """A run, with departures where there is a gap for them."""
    found = Run()
    with tempfile.TemporaryDirectory(prefix="zeroband-bench-") as name:
        folder = Path(name)
        with cluster_of(folder, nodes, steps) as cluster:
            began_s = time.monotonic()
            if every_rounds is not None:
                found.departures = churn(cluster, every_rounds, random.Random(seed))
            codes = cluster.wait(timeout_s=LIMIT_S)
            assert 0 in codes.values(), cluster.describe()
            found.wall_s = time.monotonic() - began_s
            assert not cluster.view().disagreements, "nodes held different states"
            found.trained = trained_tokens(cluster, length=LENGTH, batch=BATCH)
        found.curve = curve_of(folder / "ck", "run")
    require(bool(found.curve), "the run left no checkpoint")
    return found


def churn(cluster: LocalCluster, every_rounds: float, chance: random.Random) -> int:
    """Have nodes leave and come back until the run is over; how often one left."""
    leaves_at, back_at, count = every_rounds * chance.expovariate(1.0), dict[str, float](), 0
    while cluster.running and not any(node.exit_code == 0 and n not in back_at for n, node in cluster.nodes.items()):
        now = float(cluster.view().round or 0)
        for node_id in [name for name, at in back_at.items() if now >= at and not cluster.nodes[name].is_running]:
            del back_at[node_id]
            cluster.restart(node_id)
        if now >= leaves_at:
            leaves_at = now + every_rounds * chance.expovariate(1.0)
            there = [name for name in list(cluster.nodes)[KEPT:] if name not in back_at]
            if there:
                leaver = chance.choice(there)
                node = cluster.nodes[leaver]
                node.terminate() if count % 2 else node.kill()
                back_at[leaver] = now + 2 * chance.expovariate(1.0)
                count += 1
        time.sleep(0.1)
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=count, default=8)
    parser.add_argument("--steps", type=count, default=800)
    parser.add_argument("--every-rounds", type=float, default=3.0, help="mean gap between two departures")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    static = train(arguments.nodes, arguments.steps, None, arguments.seed)
    moving = train(arguments.nodes, arguments.steps, arguments.every_rounds, arguments.seed)
    require(moving.departures > 0, "no node left; raise --steps or lower --every-rounds")
    tokens = min(static.curve[-1][0], moving.curve[-1][0])
    at_static, at_moving = loss_at(static.curve, tokens), loss_at(moving.curve, tokens)
    print(f"{os.cpu_count()} cores, {arguments.nodes} nodes, {moving.departures} departures")
    print("| run | tokens | held-out loss there | of static | goodput | wall |\n|---|---|---|---|---|---|")
    for name, found, loss in (("static", static, at_static), ("churn", moving, at_moving)):
        finite(loss, f"the loss of the {name} run at {tokens} tokens")
        ratio = f"{loss:.4f} | {loss / at_static:.4f}"
        print(f"| {name} | {tokens} | {ratio} | {100 * found.goodput:.1f} % | {found.wall_s:.0f} s |")


if __name__ == "__main__":
    main()
