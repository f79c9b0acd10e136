"""What a crowd of joiners costs in loss by what their inner optimizers begin with: nothing, or the members' moments.

DES-LOC (arXiv:2505.22549) averages Adam's first moment every third and its second every sixth round, so that a worker
that joins has moments. Here two nodes train by DiLoCo (`small_diloco`), and after some rounds others join, all at once.
Arms, from the same parameters, momentum and samples:

fresh       the joiners' moments are zero, and Adam's correction counts from their first step; members keep theirs
warm-up     as fresh, but the joiners' learning rate grows over their first 15 steps
averaged    the joiners begin with the mean of the members' moments; members keep theirs
des-loc     as averaged, and from then on all nodes average m every third and v every sixth round

    python bench/joiner_moments.py [--before 12] [--after 12] [--members 2] [--joiners 6] [--seeds 0 1 2]
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Sequence

from evidence import count
from shuffle import corpus
from small_diloco import Ids, Node, Run, mean

JOINER_WARMUP_STEPS = 15
ARMS = ("fresh", "warm-up", "averaged", "des-loc")
MOMENTS = {"exp_avg": 3, "exp_avg_sq": 6}
"""Rounds from one average of each moment to the next, in DES-LOC."""


def write_mean(nodes: Sequence[Node], name: str, to: Sequence[Node]) -> None:
    """Give nodes the mean of others' moments, by torch's name of the moment."""
    for values, written in zip(
        zip(*(node.moments(name) for node in nodes), strict=True),
        zip(*(node.moments(name) for node in to), strict=True),
        strict=True,
    ):
        found = mean(values)
        for value in written:
            value.copy_(found)


def join(run: Run, joiners: int, arm: str) -> None:
    """Add nodes that begin as the arm says."""
    members = list(run.nodes)
    for number in range(len(members), len(members) + joiners):
        node = Node(number, run.seed, warmup_steps=JOINER_WARMUP_STEPS if arm == "warm-up" else 0)
        if arm in ("averaged", "des-loc"):  # with the members' count of updates
            node.optimizer.load_state_dict(copy.deepcopy(members[0].optimizer.state_dict()))
            for name in MOMENTS:
                write_mean(members, name, [node])
        run.nodes.append(node)


def curve_of(start: Run, arm: str, joiners: int, rounds: int, trained: Ids, held_out: Ids) -> list[float]:
    """Held-out losses after each round with the joiners."""
    run, curve = copy.deepcopy(start), list[float]()
    join(run, joiners, arm)
    for _ in range(rounds):
        run.round(trained)
        for name, every in MOMENTS.items() if arm == "des-loc" else ():
            if run.rounds % every == 0:
                write_mean(run.nodes, name, run.nodes)
        curve.append(run.held_out_loss(held_out))
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=count, default=12, help="rounds of the members alone")
    parser.add_argument("--after", type=count, default=12, help="rounds of all")
    parser.add_argument("--members", type=count, default=2)
    parser.add_argument("--joiners", type=count, default=6)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    trained, held_out = corpus()
    ratios: dict[str, list[list[float]]] = {arm: [] for arm in ARMS[1:]}
    print("| seed | arm | before | " + " | ".join(f"round {r + 1}" for r in range(arguments.after)) + " |")
    print("|---" * (arguments.after + 3) + "|")
    for seed in arguments.seeds:
        start = Run(arguments.members, seed)
        for _ in range(arguments.before):
            start.round(trained)
        before, fresh = start.held_out_loss(held_out), list[float]()
        for arm in ARMS:
            curve = curve_of(start, arm, arguments.joiners, arguments.after, trained, held_out)
            print(
                f"| {seed} | {arm} | {before:.4f} | " + " | ".join(f"{loss:.4f}" for loss in curve) + " |", flush=True
            )
            fresh = fresh or curve
            if arm in ratios:
                ratios[arm].append([loss / other for loss, other in zip(curve, fresh, strict=True)])
    for arm, seen in ratios.items():
        for what, place in (("in the first round", 0), ("at the end", -1)):
            found = [curve[place] for curve in seen]
            print(f"{arm} over fresh {what}: {statistics.mean(found):.4f} ({min(found):.4f} to {max(found):.4f})")


if __name__ == "__main__":
    main()
