"""DeMo, arXiv:2411.19870, tensor by tensor and chunk by chunk in float64; imports nothing but torch.

One step of a node, with decay β, learning rate η, weight decay λ, chunk length s and k values a chunk:

    m <- β m + η g;  q = the k largest coefficients of the DCT of each chunk of m;  m <- m - IDCT(q)
    Q = IDCT(mean of the gathered q, of each coefficient over the nodes that sent it);  θ <- (1 - ηλ) θ - η sign(Q)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Sent = list[dict[int, float]]
"""Of each chunk of a tensor: place of a coefficient -> its value."""


@dataclass(frozen=True)
class Published:
    """Settings of a run, by the letters of the paper. `lr`: η of a step, which counts from 1."""

    lr: Callable[[int], float]
    chunk: int = 64
    k: int = 32
    decay: float = 0.999
    weight_decay: float = 0.0
    decays_vectors: bool = True
    is_padded: bool = False
    """Cut a length that `chunk` does not divide into as few equal chunks as possible, the last filled up with zeros,
    instead of by its largest divisor."""


def published_demo(
    start: Mapping[str, Tensor],
    gradient: Callable[[int, int, Tensors], Tensors],
    nodes: int,
    steps: int,
    run: Published,
) -> list[Tensors]:
    """Return the parameters after each step. `gradient` is that of (node, step from 1, parameters)."""
    theta = {name: value.clone() for name, value in start.items()}
    momenta = [{name: torch.zeros_like(value, dtype=torch.float64) for name, value in theta.items()}] * nodes
    history: list[Tensors] = []
    for step in range(1, steps + 1):
        lr = run.lr(step)
        grown = [accumulated(momenta[n], gradient(n, step, theta), run.decay, lr) for n in range(nodes)]
        moved: Tensors = {}
        left: list[Tensors] = [{} for _ in range(nodes)]
        for name, value in theta.items():
            waves = Waves(value.shape, run.chunk, is_padded=run.is_padded)
            sent = [waves.largest(momentum[name], run.k) for momentum in grown]
            for n in range(nodes):
                left[n][name] = grown[n][name] - waves.decoded(sent[n])
            update = waves.decoded(mean_over_senders(sent))
            keep = 1 - lr * run.weight_decay if value.dim() > 1 or run.decays_vectors else 1.0
            moved[name] = keep * value - lr * update.sign().to(value.dtype)
        theta, momenta = moved, left
        history.append(theta)
    return history


def accumulated(momentum: Tensors, gradient: Tensors, decay: float, lr: float) -> Tensors:
    return {name: decay * value + lr * gradient[name].double() for name, value in momentum.items()}


def mean_over_senders(sent: Sequence[Sent]) -> Sent:
    means: Sent = []
    for of_a_chunk in zip(*sent, strict=True):
        places = sorted({place for values in of_a_chunk for place in values})
        of = {place: [values[place] for values in of_a_chunk if place in values] for place in places}
        means.append({place: sum(values) / len(values) for place, values in of.items()})
    return means


class Waves:
    """Chunks of a matrix or a vector, and their cosine transform of type II with orthonormal waves."""

    def __init__(self, shape: Sequence[int], chunk: int, *, is_padded: bool) -> None:
        self.shape = tuple(shape)
        rows, columns = self.shape if len(self.shape) == 2 else (1, *self.shape)
        self.matrix = (rows, columns)
        cut = evenly_cut if is_padded else divided
        (self.down, self.height), (self.across, self.width) = cut(rows, chunk), cut(columns, chunk)
        self.of_rows, self.of_columns = waves_of(self.height), waves_of(self.width)

    def largest(self, tensor: Tensor, k: int) -> Sent:
        padded = torch.zeros(self.down * self.height, self.across * self.width, dtype=torch.float64)
        padded[: self.matrix[0], : self.matrix[1]] = tensor.reshape(self.matrix)
        sent: Sent = []
        for top in range(0, padded.shape[0], self.height):
            for side in range(0, padded.shape[1], self.width):
                chunk = padded[top : top + self.height, side : side + self.width]
                found = (self.of_rows @ chunk @ self.of_columns.T).flatten().tolist()
                order = sorted(range(len(found)), key=lambda place: (-abs(found[place]), place))
                sent.append({place: found[place] for place in order[:k]})
        return sent

    def decoded(self, sent: Sent) -> Tensor:
        padded = torch.zeros(self.down * self.height, self.across * self.width, dtype=torch.float64)
        chunks = iter(sent)
        for top in range(0, padded.shape[0], self.height):
            for side in range(0, padded.shape[1], self.width):
                chunk = torch.zeros(self.height * self.width, dtype=torch.float64)
                for place, value in next(chunks).items():
                    chunk[place] = value
                values = self.of_rows.T @ chunk.view(self.height, self.width) @ self.of_columns
                # Zeros of a cosine, as in the middle of a chunk, are 6e-17 in floats: their sign would be anybody's.
                values[values.abs() < 1e-12 * chunk.abs().max()] = 0
                padded[top : top + self.height, side : side + self.width] = values
        return padded[: self.matrix[0], : self.matrix[1]].reshape(self.shape)


def divided(length: int, chunk: int) -> tuple[int, int]:
    """Return the number of chunks and their length, the largest divisor that is not above `chunk`."""
    size = max(divisor for divisor in range(1, min(length, chunk) + 1) if length % divisor == 0)
    return length // size, size


def evenly_cut(length: int, chunk: int) -> tuple[int, int]:
    count = math.ceil(length / chunk)
    return count, math.ceil(length / count)


def waves_of(length: int) -> Tensor:
    """(u, i): value i of wave u."""
    at = torch.arange(length, dtype=torch.float64)
    waves = torch.cos(math.pi * (2 * at + 1) * at[:, None] / (2 * length)) * math.sqrt(2 / length)
    waves[0] = math.sqrt(1 / length)
    return waves


# -- a three-layer network to train ----------------------------------------------------------------------------------


MLP_SHAPES = {
    "0.bias": (24,),
    "0.weight": (24, 67),
    "2.bias": (96,),
    "2.weight": (96, 24),
    "4.bias": (10,),
    "4.weight": (10, 96),
}
"""Named as by torch.nn.Sequential. Chunks of 64 divide none of these lengths: 96 has the divisor 48, 67 only 1."""


def mlp_start(seed: int = 0) -> Tensors:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw) / math.sqrt(shape[-1]) for name, shape in MLP_SHAPES.items()}


def mlp_gradient(node: int, step: int, theta: Tensors) -> Tensors:
    """Return the gradient of a mean squared error on data of this node and step."""
    draw = torch.Generator().manual_seed(1000 * step + node)
    x = torch.randn(32, 67, generator=draw)
    target = torch.sin(3 * x[:, :10] + 0.2 * node)
    leaves = {name: value.clone().requires_grad_() for name, value in theta.items()}
    hidden = torch.tanh(x @ leaves["0.weight"].T + leaves["0.bias"])
    hidden = torch.tanh(hidden @ leaves["2.weight"].T + leaves["2.bias"])
    found = hidden @ leaves["4.weight"].T + leaves["4.bias"]
    loss = (found - target).square().mean()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
