"""E6: held-out loss at equal tokens, and goodput, where nodes are late, join or leave, over the same run without.

Real nodes on this machine train with DiLoCo. In the steady run all are there from the beginning, and rounds wait for
all. Each other run differs in one thing:

  late     one node takes three times as long for a step; rounds wait for a tenth of their time at most, so what it
           contributes counts later
  slow     the same node, with phases by time in both runs
  joining  two nodes are there from the beginning; the others join one by one, a round and a half apart
  leaving  a node leaves every few rounds (exponential gaps, in turns asked to and killed) and is back about two rounds
           later

    python bench/churn.py [late] [slow] [joining] [leaving] [--nodes 6] [--steps 800] [--every-rounds 3] [--seeds 3]
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from evidence import count, finite, require, require_known
from held_out import curve_of, loss_at, task, trained_tokens

from zeroband.observe.view import node_id_of_member
from zeroband.tools.cluster import LocalCluster
from zeroband.tools.compare.claims import interval_of

INNER_STEPS, BATCH, LENGTH = 20, 8, 64
STEP_S, SLOWER = 0.15, 3.0
"""Least time of a step, so that two cores can carry the nodes; how many times it takes on the late node."""
KEPT = 2
"""Nodes that never leave, so that the state is never lost."""
APART_ROUNDS = 1.5
"""Between two nodes that join."""
LIMIT_S = 7200.0


@dataclass
class Run:
    """What a run left behind."""

    curve: list[tuple[int, float]] = field(default_factory=list)
    """Committed tokens and held-out loss, in order."""
    trained: int = 0
    """Tokens that nodes trained on, counted or lost."""
    wall_s: float = 0.0
    events: int = 0
    """Rounds without the late node or with the slow one, nodes that joined, or departures."""

    @property
    def goodput(self) -> float:
        """Part of the trained tokens that the committed state contains."""
        return self.curve[-1][0] / self.trained


@dataclass(frozen=True)
class Setting:
    """What all runs of a seed have in common."""

    nodes: int
    steps: int
    every_rounds: float
    """Mean gap between two departures."""
    seed: int = 0


Drive = Callable[[LocalCluster, Setting], int]
"""Does to a cluster what a run is about, until its end or earlier; returns how often."""


@dataclass(frozen=True)
class Kind:
    """A run's difference from the steady one."""

    drive: Drive
    flags: tuple[str, ...] = ()
    of_both: tuple[str, ...] = ()
    """Flags that the steady run has, too."""
    slower: float = 1.0
    """Factor of the last node's time for a step."""
    first: int | None = None
    """Nodes that are there from the beginning. None: all."""


def paced(factor: float = 1.0) -> list[str]:
    return ["--fault.inject", f"inner@+0=TAKES{STEP_S * factor}"]


def watch(cluster: LocalCluster, setting: Setting) -> int:
    """Leave the run alone."""
    cluster.wait(timeout_s=LIMIT_S)
    return 0


def count_late(cluster: LocalCluster, setting: Setting) -> int:
    """How many rounds were committed without waiting for the slow node."""
    cluster.wait(timeout_s=LIMIT_S)
    return sum(bool(event.get("late")) for event in cluster.nodes["node0"].events("round_committed"))


def watch_slow(cluster: LocalCluster, setting: Setting) -> int:
    """How many rounds the slow node was in."""
    cluster.wait(timeout_s=LIMIT_S)
    slow = list(cluster.nodes)[-1]
    committed = cluster.nodes["node0"].events("round_committed")
    return sum(slow in map(node_id_of_member, event["members"]) for event in committed)


def let_join(cluster: LocalCluster, setting: Setting) -> int:
    """Start the other nodes one after the other."""
    for number in range(KEPT, setting.nodes):
        at = APART_ROUNDS * (number - KEPT + 1)
        cluster.wait_until(lambda view, at=at: (view.round or 0) >= at, timeout_s=LIMIT_S)
        cluster.start(arguments=paced())
    cluster.wait(timeout_s=LIMIT_S)
    return setting.nodes - KEPT


def let_leave(cluster: LocalCluster, setting: Setting) -> int:
    """Have nodes leave and come back until the run is over."""
    chance = random.Random(setting.seed)
    leaves_at, back_at, left = setting.every_rounds * chance.expovariate(1.0), dict[str, float](), 0
    while cluster.running and not any(node.exit_code == 0 and n not in back_at for n, node in cluster.nodes.items()):
        now = float(cluster.view().round or 0)
        for node_id in [name for name, at in back_at.items() if now >= at and not cluster.nodes[name].is_running]:
            del back_at[node_id]
            cluster.restart(node_id)
        if now >= leaves_at:
            leaves_at = now + setting.every_rounds * chance.expovariate(1.0)
            there = [name for name in list(cluster.nodes)[KEPT:] if name not in back_at]
            if there:
                leaver = chance.choice(there)
                node = cluster.nodes[leaver]
                node.terminate() if left % 2 else node.kill()
                back_at[leaver] = now + 2 * chance.expovariate(1.0)
                left += 1
        time.sleep(0.1)
    cluster.wait(timeout_s=LIMIT_S)
    return left


GRACE = ("--outer.straggler-grace=0.1",)
BY_TIME = (f"--outer.inner-steps={10 * INNER_STEPS}", f"--outer.inner-seconds={STEP_S * INNER_STEPS:g}")
STEADY = Kind(watch)
KINDS: Mapping[str, Kind] = {
    "late": Kind(count_late, flags=GRACE, slower=SLOWER),
    "slow": Kind(watch_slow, flags=GRACE, of_both=BY_TIME, slower=SLOWER),
    "joining": Kind(let_join, first=KEPT),
    "leaving": Kind(let_leave),
}


@contextmanager
def cluster_of(folder: Path, kind: Kind, setting: Setting) -> Iterator[LocalCluster]:
    learns = task(folder / "ck", d_model=64, length=LENGTH, batch=BATCH, inner_steps=INNER_STEPS, steps=setting.steps)
    arguments = (*learns, *kind.of_both, *kind.flags, "--fault.detect-s=3", f"--run.seed={setting.seed}")
    environment = {"OMP_NUM_THREADS": "1"}
    first = setting.nodes if kind.first is None else kind.first
    with LocalCluster(folder / "runs", arguments, nodes=first, run_id="run", env=environment) as cluster:
        for number in range(first):
            cluster.start(arguments=paced(kind.slower if number == setting.nodes - 1 else 1.0))
        yield cluster


def train(kind: Kind, setting: Setting) -> Run:
    found = Run()
    with tempfile.TemporaryDirectory(prefix="zeroband-bench-") as name:
        folder = Path(name)
        with cluster_of(folder, kind, setting) as cluster:
            began_s = time.monotonic()
            found.events = kind.drive(cluster, setting)
            found.wall_s = time.monotonic() - began_s
            codes = {node_id: node.exit_code for node_id, node in cluster.nodes.items()}
            assert 0 in codes.values(), cluster.describe()
            assert not cluster.view().disagreements, "nodes held different states"
            found.trained = trained_tokens(cluster, length=LENGTH, batch=BATCH)
        found.curve = curve_of(folder / "ck", "run")
    require(bool(found.curve), "the run left no checkpoint")
    return found


def tell(name: str, pairs: Sequence[tuple[Run, Run]]) -> None:
    """A row: this kind of run beside the steady ones of the same seeds."""
    ratios, all_tokens = [], []
    for steady, found in pairs:
        require(found.events > 0, f"nothing happened in a run of {name}; raise --steps or lower --every-rounds")
        tokens = min(steady.curve[-1][0], found.curve[-1][0])
        ratio = loss_at(found.curve, tokens) / loss_at(steady.curve, tokens)
        ratios.append(finite(ratio, f"the ratio of the losses at {tokens} tokens"))
        all_tokens.append(tokens)
    runs = [found for _, found in pairs]
    cells = (
        *(name, sum(run.events for run in runs), round(statistics.mean(all_tokens)), interval_of(ratios)),
        ", ".join(f"{ratio:.3f}" for ratio in ratios),
        f"{statistics.mean(run.goodput for run in runs):.1%}",
        f"{statistics.mean(run.wall_s for run in runs) / statistics.mean(steady.wall_s for steady, _ in pairs):.2f}",
    )
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="KIND", help=", ".join(KINDS))
    for name, default in (("nodes", 6), ("steps", 800), ("seeds", 3)):
        parser.add_argument(f"--{name}", type=count, default=default)
    parser.add_argument("--every-rounds", type=float, default=3.0, help="mean gap between two departures")
    asked = parser.parse_args()
    require_known(parser, asked.what, KINDS)
    settings = [Setting(asked.nodes, asked.steps, asked.every_rounds, seed) for seed in range(asked.seeds)]
    steady = [train(STEADY, setting) for setting in settings]
    losses = ", ".join(f"{run.curve[-1][1]:.4f}" for run in steady)
    print(f"{os.cpu_count()} cores, {asked.nodes} nodes; steady: {losses} after {steady[0].curve[-1][0]} tokens")
    print("| run | events | tokens | loss over steady | of each seed | goodput | time over steady |\n|" + "---|" * 7)
    for name in asked.what or KINDS:
        kind = KINDS[name]
        beside = [train(replace(STEADY, of_both=kind.of_both), one) for one in settings] if kind.of_both else steady
        tell(name, list(zip(beside, (train(kind, setting) for setting in settings), strict=True)))


if __name__ == "__main__":
    main()
