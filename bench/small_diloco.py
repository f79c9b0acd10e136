"""DiLoCo among nodes that all live in this process, as it is written: plain torch, no transport, no store.

For questions about the algorithm alone that a real run would answer more slowly: models of 0.13 M parameters, bytes of
the standard library's sources; every fiftieth file is held out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from evidence import finite
from shuffle import LENGTH
from torch import Tensor

from zeroband.config.model import LlamaConfig
from zeroband.model import Transformer, init_weights

BATCH, INNER_STEPS, WARMUP_STEPS = 8, 30, 40
LR, OUTER_LR, OUTER_MOMENTUM = 2e-3, 0.7, 0.9
EVALUATED = 256

Ids = npt.NDArray[np.uint16]
Combine = Callable[[Sequence[Tensor]], Tensor]
"""Combines the nodes' pseudo-gradients of one parameter."""


def mean(parts: Sequence[Tensor]) -> Tensor:
    """Return the plain mean."""
    return torch.stack(list(parts)).mean(0)


class Node:
    """A model with its inner optimizer. `warmup_steps`: own steps over which its rate grows, besides the run's."""

    def __init__(self, number: int, seed: int, *, warmup_steps: int = 0) -> None:
        self.model = Transformer(LlamaConfig(d_model=64, n_layers=2, n_heads=4), 320)
        init_weights(self.model, seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
        self._draw = np.random.default_rng([seed, number])
        self._warmup_steps, self._made_steps = warmup_steps, 0

    def train(self, ids: Ids, outer: Sequence[Tensor], first_step: int) -> list[Tensor]:
        """Make a phase of inner steps from the outer parameters; returns the pseudo-gradient."""
        load(self.model, outer)
        for step in range(first_step, first_step + INNER_STEPS):
            self._made_steps += 1
            own = self._made_steps / self._warmup_steps if self._warmup_steps else 1.0
            self.optimizer.param_groups[0]["lr"] = LR * min(1.0, own, (step + 1) / WARMUP_STEPS)
            loss = loss_of(self.model, ids, self._draw.integers(0, len(ids) - LENGTH - 1, BATCH))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return [value - inner.detach() for value, inner in zip(outer, self.model.parameters(), strict=True)]

    def moments(self, name: str) -> list[Tensor]:
        """Return a moment of each parameter, by torch's name."""
        return [self.optimizer.state[parameter][name] for parameter in self.model.parameters()]


class Run:
    """Nodes that train together, each phase from the outer parameters."""

    def __init__(self, members: int, seed: int, *, outer_lr: float = OUTER_LR) -> None:
        self.nodes = [Node(number, seed) for number in range(members)]
        self.seed = seed
        self.outer_lr = outer_lr
        self.outer = [parameter.detach().clone() for parameter in self.nodes[0].model.parameters()]
        self.momentum = [torch.zeros_like(value) for value in self.outer]
        self.rounds = 0

    def round(self, ids: Ids, combine: Combine = mean) -> None:
        """Train a phase on every node, and take the outer step (SGD with Nesterov momentum)."""
        deltas = [node.train(ids, self.outer, self.rounds * INNER_STEPS) for node in self.nodes]
        for value, momentum, *parts in zip(self.outer, self.momentum, *deltas, strict=True):
            delta = combine(parts)
            momentum.mul_(OUTER_MOMENTUM).add_(delta)
            value.sub_(self.outer_lr * (delta + OUTER_MOMENTUM * momentum))
        self.rounds += 1

    def held_out_loss(self, ids: Ids) -> float:
        """Nats per byte of the outer parameters."""
        model, starts = self.nodes[0].model, np.linspace(0, len(ids) - LENGTH - 1, EVALUATED).astype(np.int64)
        load(model, self.outer)
        with torch.no_grad():
            return finite(loss_of(model, ids, starts).item(), "the held-out loss")


def load(model: Transformer, values: Sequence[Tensor]) -> None:
    """Write the parameters of a model."""
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)


def loss_of(model: Transformer, ids: Ids, starts: npt.NDArray[np.int64]) -> Tensor:
    """Mean nats per byte of the samples that begin there."""
    tokens = torch.as_tensor(np.stack([ids[start : start + LENGTH + 1] for start in starts]).astype(np.int64))
    loss = model(tokens[:, :-1], None, tokens[:, 1:])
    return loss.objective / loss.targets
