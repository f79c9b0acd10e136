"""What the oracles train: a linear model on data of each node, by plain gradient descent; all nodes in one process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from zeroband.state.flat import FlatLayout, Slot

SHAPES = {
    "embed.weight": (11, 6),
    "layers.0.bias": (13,),
    "layers.0.weight": (8, 12),
    "layers.1.bias": (13,),
    "layers.1.weight": (8, 12),
    "layers.2.weight": (7, 9),
    "layers.3.weight": (7, 9),
    "norm.weight": (6,),
}
"""Names in the order of the flat state; lengths that chunks divide, and lengths that they do not."""


def layout_of(shapes: dict[str, tuple[int, ...]]) -> FlatLayout:
    slots: list[Slot] = []
    start = 0
    for name, shape in sorted(shapes.items()):
        slots.append(Slot(name, shape, start))
        start += math.prod(shape)
    return FlatLayout(tuple(slots))


LAYOUT = layout_of(SHAPES)


@dataclass(frozen=True)
class Problem:
    """Node m wants its own targets; each step sees them with noise of its own."""

    nodes: int
    lr: float = 0.05
    seed: int = 0
    numel: int = LAYOUT.numel

    def start(self) -> Tensor:
        return self._noise(0).clone()

    def gradient(self, node: int, step: int, theta: Tensor) -> Tensor:
        """Of node `node` in inner step `step`, which counts from 1."""
        curvature = 0.5 + self._noise(1).abs()
        target = self._noise(2) + 0.3 * self._noise(100 + node)
        return curvature * (theta - target) + 0.2 * self._noise(1000 * step + node)

    def inner_step(self, node: int, step: int, theta: Tensor) -> Tensor:
        return theta - self.lr * self.gradient(node, step, theta)

    def inner_steps(self, node: int, first: int, count: int, theta: Tensor) -> Tensor:
        """The parameters of a node after `count` steps, the first of which has the number `first`."""
        for step in range(first, first + count):
            theta = self.inner_step(node, step, theta)
        return theta

    def _noise(self, key: int) -> Tensor:
        return noise(7919 * self.seed + key, self.numel)


class Pooled(Problem):
    """One node that has the data of `nodes` nodes: each step it sees as many samples as all of them."""

    def gradient(self, node: int, step: int, theta: Tensor) -> Tensor:
        samples = [self._noise(2) + 0.3 * self._noise(100 + m) for m in range(self.nodes)]
        shaken = [0.2 * self._noise(1000 * step + m) for m in range(self.nodes)]
        return (0.5 + self._noise(1).abs()) * (theta - mean(samples)) + mean(shaken)


class Steady(Problem):
    """A node sees the same noise in every step, whatever its number."""

    def gradient(self, node: int, step: int, theta: Tensor) -> Tensor:
        return super().gradient(node, 1, theta)


class Forgetful(Problem):
    """What a node learns in a step does not depend on where it stands."""

    def gradient(self, node: int, step: int, theta: Tensor) -> Tensor:
        return super().gradient(node, step, torch.zeros(self.numel))


class Converging(Problem):
    """Every round of a node ends at its own optimum, whatever the outer parameters were."""

    def inner_steps(self, node: int, first: int, count: int, theta: Tensor) -> Tensor:
        return self._noise(2) + 0.3 * self._noise(100 + node)


@cache
def noise(key: int, numel: int) -> Tensor:
    """Nobody writes to it."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(key))


def mean(tensors: list[Tensor], weights: Sequence[int] | None = None) -> Tensor:
    """Added up in the order of the nodes; exact to divide for 1, 2, 4, 8 nodes. `weights`: None: equal."""
    if weights is not None:
        tensors = [tensor * (len(weights) * w / sum(weights)) for tensor, w in zip(tensors, weights, strict=True)]
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total / len(tensors)


def nesterov(theta: Tensor, v: Tensor, delta: Tensor, lr: float, mu: float) -> tuple[Tensor, Tensor]:
    """torch.optim.SGD(nesterov=True, dampening=0) as it is written."""
    v = mu * v + delta
    return theta - lr * (mu * v + delta), v


class ProblemModel(nn.Module):
    """The problem's parameters under their names."""

    def __init__(self) -> None:
        super().__init__()
        start = Problem(1).start()
        for slot in LAYOUT.slots:
            *path, leaf = slot.name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            value = start[slot.start : slot.start + slot.numel].view(SHAPES[slot.name])
            module.register_parameter(leaf, nn.Parameter(value.clone()))
