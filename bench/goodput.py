"""Goodput of a run whose nodes fail and stand still, in virtual time (`bench/virtual_run.py`), in two accounts.

Training: part of the nodes' time in which they train, whatever counts of it later. Counted: part of the possible tokens
that committed rounds hold. Between the two lies what was trained in vain. "Phases for each failure": the loss beyond
the absence, from the counted account, in phases of a node.

Below it, with the same failures: data parallelism in which every failure stops all nodes until the node is back, and
one that goes on without it after a pause.

Defaults: 64 nodes, each of which fails every 841 s and is then down for 35 s. With `--by-time` phases end after that
time (`outer.inner_seconds`), not after a number of steps; with `--overlap` rounds travel during training
(`outer.overlap`).

`--published`: the settings of Decoupled DiLoCo (arXiv:2604.21428), as many learners and chips, instead of all this.

    python -m bench.goodput [--nodes 64] [--mtbf-s 841] [--down-s 35] [--pause-s 5.5] [--phase-s 60] [--grace 0.1]
    python -m bench.goodput --published [--rounds 400] [--seed 0]
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # where it runs as a file: `python bench/goodput.py`

from bench.evidence import count, require
from bench.virtual_models import NodeModel, RunModel
from bench.virtual_run import SimulationResult, VirtualRun

STEPS = 30
"""Inner steps of a phase."""
MBIT_S = 1000
"""Of every link; how long a transfer takes is given, so it stands for no real one."""
YEAR_S = 365.25 * 24 * 3600


class Published(NamedTuple):
    """A row of the paper's table: chips of which each fails once a year, as equal learners, and their goodput."""

    learners: int
    chips: int
    goodput: float

    @property
    def mtbf_s(self) -> float:
        """Between two failures of a learner."""
        return YEAR_S * self.learners / self.chips

    @property
    def down_s(self) -> float:
        """The longest that a learner can be away after a failure: as if that were all that was lost."""
        return self.mtbf_s * (1 / self.goodput - 1)


PUBLISHED = (
    Published(8, 1_200_000, 0.88),
    Published(16, 1_200_000, 0.93),
    Published(8, 2_400_000, 0.80),
    Published(16, 2_400_000, 0.86),
)
SEEDS = 5
"""Failures come by chance: so often a published setting is played."""
PUBLISHED_PHASE_S, PUBLISHED_TRANSFER_S = 30.0, 0.5
"""Not in the paper: shorter phases lose less, and a transfer of nothing is the best case."""
CAUSES = {
    "absent": "away",
    "joining": "joining",
    "waiting": "waiting",
    "transferring": "transferring",
    "retrying": "retrying",
    "frozen": "frozen",
}
"""Columns of seconds, and what nodes did in them."""


def loss_s(run: SimulationResult) -> dict[str, float]:
    """Seconds of nodes for each failure in which nothing was trained that counts, by what they did."""
    spent_s = sum(run.spent_s.values())
    causes = {name: run.spent_s.get(doing, 0.0) for name, doing in CAUSES.items()}
    in_vain_s = (run.training - run.goodput) * spent_s
    return {name: seconds / run.losses for name, seconds in {**causes, "trained in vain": in_vain_s}.items()}


CAUSE_COLUMNS = " | ".join(["for each: absent, s", *(f"{cause}, s" for cause in [*CAUSES, "trained in vain"][1:])])


def seconds_told(found: Sequence[Mapping[str, float]]) -> str:
    """The mean seconds of each cause, as cells."""
    return " | ".join(f"{sum(one[cause] for one in found) / len(found):.1f}" for cause in found[0])


def phases_lost(run: SimulationResult, phase_s: float) -> float:
    """Phases of a node that a failure costs beyond the absence, by what counts."""
    return sum(seconds for name, seconds in loss_s(run).items() if name != "absent") / phase_s


def data_parallel(nodes: int, mtbf_s: float, down_s: float, pause_s: float | None, until_s: float, seed: int) -> float:
    """Goodput where all nodes step together, and a failure stops them all: for a pause, or until it is back."""
    chance, now_s, useful_s, down = random.Random(seed), 0.0, 0.0, list[float]()
    while now_s < until_s:
        down = [back_at_s for back_at_s in down if back_at_s > now_s]
        there = nodes - len(down)
        gap_s = chance.expovariate(max(there, 1) / mtbf_s)
        back_s = min(down, default=math.inf) - now_s
        useful_s += there * min(gap_s, back_s, until_s - now_s)
        now_s += min(gap_s, back_s)
        if gap_s > back_s:
            now_s += pause_s or 0.0  # who is back is taken in
        elif pause_s is None:
            now_s += down_s
        else:
            down.append(now_s + down_s)
            now_s += pause_s
    return useful_s / (nodes * until_s)


def as_published(rounds: int, seed: int) -> None:
    """Print what the rules of production make of the published settings, phases by time and rounds beside training."""
    columns = "learners | chips | a learner fails every | is down for | published | training | counted"
    print(f"| {columns} | phases for each failure, beyond the absence | {CAUSE_COLUMNS} |\n|{'---|' * 15}")
    for row in PUBLISHED:
        model = RunModel(
            nodes=(NodeModel(PUBLISHED_PHASE_S / STEPS, MBIT_S),) * row.learners,
            inner_steps=2 * STEPS,
            inner_seconds=PUBLISHED_PHASE_S,
            encoded_bytes=0,
            state_bytes=0,
            rtt_ms=0,
            agreement_s=PUBLISHED_TRANSFER_S,
            detect_s=5.0,
            overlaps=True,
            mtbf_s=row.mtbf_s,
            away_s=row.down_s,
            straggler_grace=0.1,
        )
        runs = [VirtualRun(model, seed=seed + i).play(rounds) for i in range(SEEDS)]
        require(all(run.losses > 0 for run in runs), "no node failed")
        times = f"{row.mtbf_s:.0f} s | {row.down_s:.1f} s"
        training, counted = ranged([run.training for run in runs]), ranged([run.goodput for run in runs])
        lost = ranged([phases_lost(run, PUBLISHED_PHASE_S) for run in runs], digits=2)
        ours = f"{training} | {counted} | {lost} | {seconds_told([loss_s(run) for run in runs])}"
        print(f"| {row.learners} | {row.chips / 1e6:g}M | {times} | {row.goodput:.2f} | {ours} |", flush=True)


def ranged(values: Sequence[float], digits: int = 3) -> str:
    """The mean, with the least and the most."""
    return f"{sum(values) / len(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=count, default=64)
    parser.add_argument("--rounds", type=count, default=400)
    for name, default in (
        *(("mtbf", 841.0), ("down", 35.0), ("pause", 5.5), ("phase", 60.0), ("transfer", 2.0), ("detect", 5.0)),
        *(("freeze-every", 600.0), ("freeze", 20.0)),
    ):
        parser.add_argument(f"--{name}-s", type=float, default=default)
    parser.add_argument("--grace", type=float, default=0.1)
    parser.add_argument("--by-time", action="store_true")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--published", action="store_true")
    asked = parser.parse_args()
    if asked.published:
        return as_published(asked.rounds, asked.seed)
    waiting = RunModel(
        nodes=(NodeModel(asked.phase_s / STEPS, MBIT_S),) * asked.nodes,
        inner_steps=2 * STEPS if asked.by_time else STEPS,
        inner_seconds=asked.phase_s if asked.by_time else None,
        encoded_bytes=0,
        state_bytes=0,
        rtt_ms=0,
        agreement_s=asked.transfer_s,
        detect_s=asked.detect_s,
        overlaps=asked.overlap,
        mtbf_s=asked.mtbf_s,
        away_s=asked.down_s,
    )
    freezing = replace(waiting, freeze_every_s=asked.freeze_every_s, freeze_s=asked.freeze_s)
    columns = "run | training | counted | phases for each failure, beyond the absence | rounds | opened again | late"
    print(f"| {columns} | failures | {CAUSE_COLUMNS} |\n|{'---|' * 15}")
    hours = []
    for name, model in {
        f"failures, grace {asked.grace:g}": replace(waiting, straggler_grace=asked.grace),
        "failures, waiting for all that live": waiting,
        f"failures and freezes, grace {asked.grace:g}": replace(freezing, straggler_grace=asked.grace),
        "failures and freezes, waiting for all that live": freezing,
    }.items():
        run = VirtualRun(model, seed=asked.seed).play(asked.rounds)
        require(run.losses > 0, "no node failed")
        accounts = f"{run.training:.3f} | {run.goodput:.3f} | {phases_lost(run, asked.phase_s):.2f}"
        told = f"{accounts} | {run.rounds} | {run.reopened} | {run.late} | {run.losses} | {seconds_told([loss_s(run)])}"
        print(f"| {name} | {told} |", flush=True)
        hours.append(run.seconds)
    for name, pause_s in (("data parallel, elastic", asked.pause_s), ("data parallel", None)):
        goodput = data_parallel(asked.nodes, asked.mtbf_s, asked.down_s, pause_s, max(hours), asked.seed)
        print(f"| failures, {name} | {goodput:.3f} |{' |' * 14}")


if __name__ == "__main__":
    main()
