"""Many nodes that are lost or join at once, in virtual time by the rules of production (`bench/virtual_run.py`).

128 nodes train 1B parameters over 500 Mbit/s. In their sixth round 30 % of them are lost for good, 50 new ones join, or
both, while all train or while a round is transferred; beside it the same run without.

    python -m bench.crowds [--nodes 128] [--lost 0.3] [--joining 50] [--rounds 20] [--seeds 5]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

from bench.evidence import count, require
from bench.virtual_models import NodeModel, RunModel
from bench.virtual_run import SimulationResult, VirtualRun

from zeroband.kernels.formats import FORMATS

PARAMS, STEP_S, STEPS, MBIT_S = 10**9, 1.0, 50, 500
STRUCK_ROUND = 5
"""Rounds that are over before."""


def model_of(nodes: int, *, overlaps: bool) -> RunModel:
    """Lost nodes stay away."""
    encoded_bytes = FORMATS["int8"].encoded_size(PARAMS)
    return RunModel(
        (NodeModel(STEP_S, MBIT_S),) * nodes, STEPS, encoded_bytes, 8 * PARAMS, overlaps=overlaps, away_s=1e9
    )


def play(model: RunModel, rounds: int, seeds: int, at_s: float, lost: int, joining: int) -> Sequence[SimulationResult]:
    found: list[SimulationResult] = []
    for seed in range(seeds):
        run = VirtualRun(model, seed=seed)
        run.lose_at(at_s, *range(lost))
        run.join_at(at_s, joining)
        found.append(run.play(rounds))
    return found


def tell(overlaps: bool, when: str, what: str, found: Sequence[SimulationResult], calm_s: float) -> None:
    joined = [max(one.joined_s) for one in found if one.joined_s]
    rows = (
        *("yes" if overlaps else "no", when, what, f"{statistics.mean(one.reopened for one in found):g}"),
        f"{statistics.mean(one.seconds for one in found) - calm_s:+.0f} s",
        f"{statistics.mean(joined):.0f} s, {max(joined):.0f} s" if joined else "",
        *(f"{found[0].members / found[0].rounds:.1f}", f"{statistics.mean(one.goodput for one in found):.1%}"),
    )
    print(f"| {' | '.join(rows)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("nodes", 128), ("joining", 50), ("rounds", 20), ("seeds", 5)):
        parser.add_argument(f"--{name}", type=count, default=default)
    parser.add_argument("--lost", type=float, default=0.3, help="part of the nodes")
    asked = parser.parse_args()
    require(asked.rounds > STRUCK_ROUND + 1, f"--rounds {asked.rounds} are over before the nodes are struck")
    lost = int(asked.lost * asked.nodes)
    print("| overlap | while | what | opened again | the run took | all train after, mean, most | members | goodput |")
    print("|" + "---|" * 8)
    for overlaps in (False, True):
        model = model_of(asked.nodes, overlaps=overlaps)
        calm = play(model, asked.rounds, asked.seeds, 0.0, 0, 0)
        calm_s = statistics.mean(one.seconds for one in calm)
        tell(overlaps, "", "nothing", calm, calm_s)
        begins_s = STRUCK_ROUND * calm_s / asked.rounds
        for when, at_s in {"training": 0.5 * STEPS * STEP_S, "transferring": 1.2 * STEPS * STEP_S}.items():
            for what, gone, new in (
                (f"{lost} lost", lost, 0),
                (f"{asked.joining} join", 0, asked.joining),
                (f"{lost} lost, {asked.joining} join", lost, asked.joining),
            ):
                tell(overlaps, when, what, play(model, asked.rounds, asked.seeds, begins_s + at_s, gone, new), calm_s)


if __name__ == "__main__":
    main()
