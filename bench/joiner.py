"""What a joiner's first contributions should count for, with fragments that are synchronised in turn.

Two or more nodes train the problem of tests/oracles by Streaming DiLoCo without overlap; one of them joins at the end
of the second turn, with the outer parameters. Prints the mean loss of the outer parameters, averaged over the rounds of
the joiner's first turns, for each way to count it, beside runs that it never joined and was in from the start.

    python -m bench.joiner
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean

import torch
from tests.oracles.problem import Problem
from torch import Tensor

SEEDS, PHASE, OUTER_LR, MOMENTUM = 24, 10, 0.4, 0.9
WAYS = {
    "never joins": "the run without it",
    "as a member": "equal weights: every contribution counts alike",
    "by its steps": "weights in proportion to the steps behind a contribution",
    "not at all": "weight 0 until it has a whole turn behind it",
    "from a donor": "equal weights; it begins with the inner parameters of another node",
    "by the step": "the sum of contributions over the sum of steps, times the steps of a turn",
    "always there": "the run with it from the start",
}


@dataclass
class Trial:
    problem: Problem
    fragments: int
    way: str

    def __post_init__(self) -> None:
        self.outer, self.v = self.problem.start(), torch.zeros(self.problem.numel)
        count = self.problem.nodes - (self.way != "always there")
        self.thetas = {node: self.outer.clone() for node in range(count)}
        self.steps = {node: [0] * self.fragments for node in self.thetas}

    def losses(self) -> list[float]:
        """After each round of the joiner's first turns."""
        found: list[float] = []
        for round in range(3 * self.fragments):
            for step in range(1 + round * PHASE, 1 + (round + 1) * PHASE):
                self.thetas = {n: self.problem.inner_step(n, step, theta) for n, theta in self.thetas.items()}
            self.synchronise(round % self.fragments)
            if round + 1 == 2 * self.fragments and self.way not in ("never joins", "always there"):
                joiner, start = self.problem.nodes - 1, self.outer if self.way != "from a donor" else self.thetas[0]
                self.thetas[joiner], self.steps[joiner] = start.clone(), [0] * self.fragments
            if round >= 2 * self.fragments:
                found.append(self.loss())
        return found

    def synchronise(self, turn: int) -> None:
        here = torch.arange(turn, self.problem.numel, self.fragments)
        for steps in self.steps.values():
            steps[:] = [n + PHASE for n in steps]
        steps = {node: steps[turn] for node, steps in self.steps.items()}
        deltas = {node: self.outer[here] - theta[here] for node, theta in self.thetas.items()}
        mean_delta = sum(share * deltas[n] for n, share in self.shares(steps).items())
        self.v[here] = MOMENTUM * self.v[here] + mean_delta
        self.outer[here] -= OUTER_LR * (MOMENTUM * self.v[here] + mean_delta)
        for node, theta in self.thetas.items():
            theta[here] = self.outer[here]
            self.steps[node][turn] = 0

    def shares(self, steps: dict[int, int]) -> dict[int, float]:
        longest = max(steps.values())
        match self.way:
            case "by its steps":
                return {n: s / sum(steps.values()) for n, s in steps.items()}
            case "not at all":
                whole = [n for n, s in steps.items() if s == longest]
                return {n: (n in whole) / len(whole) for n in steps}
            case "by the step":
                return {n: longest / sum(steps.values()) for n in steps}
            case _:
                return {n: 1 / len(steps) for n in steps}

    def loss(self) -> float:
        problem = self.problem
        targets = [problem._noise(2) + 0.3 * problem._noise(100 + node) for node in range(problem.nodes)]
        off: Tensor = self.outer - sum(targets) / len(targets)
        return float(((0.5 + problem._noise(1).abs()) * off.square()).sum() / 2)


def main() -> None:
    torch.set_num_threads(1)
    cases = [(2, 2), (2, 4), (2, 8), (4, 4), (8, 4)]
    print("nodes, fragments".ljust(16), *(f"{nodes}, {fragments}".rjust(8) for nodes, fragments in cases))
    for way, words in WAYS.items():
        row: list[float] = []
        for nodes, fragments in cases:
            trials = [Trial(Problem(nodes, lr=0.005, seed=seed), fragments, way) for seed in range(SEEDS)]
            row.append(mean(mean(trial.losses()) for trial in trials))
        print(way.ljust(16), *(f"{loss:8.2f}" for loss in row), f"  {words}")


if __name__ == "__main__":
    main()
