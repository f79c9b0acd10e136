"""How the pseudo-gradients of many nodes are combined: their mean, or length and direction apart.

Radial-directional averaging is Decoupled DiLoCo's (arXiv:2604.21428, as summarised by others; read second-hand): the
mean of the lengths, times the normalised mean of the normalised pseudo-gradients, tensor by tensor, and the plain mean
for embeddings. A mean of nearly orthogonal pseudo-gradients is shorter than each, by up to the root of their number;
so this rule lets one outer learning rate serve any number of nodes. Hence both rules are shown with several rates.

    python bench/merging.py [--nodes 8] [--rounds 20] [--outer-lrs 0.1 0.2 0.4 0.7 1.0] [--seeds 0 1]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from evidence import count
from shuffle import corpus
from small_diloco import Combine, Ids, Run, mean
from torch import Tensor

LEAST = 1e-3
"""Shorter means of directions have no direction: the plain mean is taken."""


def radial_directional(parts: Sequence[Tensor]) -> Tensor:
    """Return the mean length times the mean direction. Embeddings have as many rows as the vocabulary."""
    lengths = torch.stack([part.norm() for part in parts])
    if parts[0].shape[0] == 320 or not lengths.gt(0).all():
        return mean(parts)
    direction = mean([part / length for part, length in zip(parts, lengths, strict=True)])
    return mean(parts) if direction.norm() < LEAST else lengths.mean() * direction / direction.norm()


RULES: dict[str, Combine] = {"mean": mean, "radial-directional": radial_directional}


def curve_of(rule: Combine, nodes: int, rounds: int, outer_lr: float, seed: int, ids: Ids, held_out: Ids) -> float:
    """Held-out loss at the end: nats per byte."""
    run = Run(nodes, seed, outer_lr=outer_lr)
    for _ in range(rounds):
        run.round(ids, rule)
    return run.held_out_loss(held_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=count, default=8)
    parser.add_argument("--rounds", type=count, default=20)
    parser.add_argument("--outer-lrs", type=float, nargs="+", default=[0.1, 0.2, 0.4, 0.7, 1.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    arguments = parser.parse_args()
    trained, held_out = corpus()
    print("| nodes | seed | rule | " + " | ".join(f"outer lr {lr}" for lr in arguments.outer_lrs) + " |")
    print("|---" * (3 + len(arguments.outer_lrs)) + "|")
    for seed in arguments.seeds:
        for name, rule in RULES.items():
            losses = [
                curve_of(rule, arguments.nodes, arguments.rounds, lr, seed, trained, held_out)
                for lr in arguments.outer_lrs
            ]
            row = " | ".join(f"{loss:.4f}" for loss in losses)
            print(f"| {arguments.nodes} | {seed} | {name} | {row} |", flush=True)


if __name__ == "__main__":
    main()
