"""Models of a few parameters, and an inner optimizer of each kind over them."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn

from zeroband.config.optim import AdamWConfig, LinearSchedule, MuonConfig, OptimConfig
from zeroband.model.optim import InnerOptimizer

OPTIM = OptimConfig(adamw=AdamWConfig(lr=0.1), schedule=LinearSchedule(type="linear"), warmup_steps=2)


def muon_optim(**muon: Any) -> OptimConfig:
    return OPTIM.model_copy(update={"adamw": AdamWConfig(lr=0.02), "muon": MuonConfig(**muon)})


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Tiny(nn.Module):
    """A matrix and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(values(4, 3))
        self.norm = nn.Parameter(values(3, seed=1))


SHAPES = [(8, 5), (5, 8), (6, 6), (40, 24)]


class Matrices(nn.Module):
    """An embedding, a matrix of each form, experts in one stack, a convolution, a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.tall, self.wide, self.square = (nn.Parameter(values(*shape, seed=1)) for shape in SHAPES[:3])
        self.experts = nn.Parameter(values(3, 4, 6, seed=2))
        self.conv = nn.Conv1d(4, 4, 3, bias=False)
        self.norm = nn.Parameter(values(5, seed=3))
        self.embed.weight.data = values(7, 5, seed=4)
        self.conv.weight.data = values(4, 4, 3, seed=5)


KINDS: dict[str, tuple[type[nn.Module], OptimConfig, dict[str, Any]]] = {
    "fused": (Tiny, OPTIM, {}),
    "slice by slice": (Tiny, OPTIM, {"slice_exact": True}),
    "signs": (Tiny, OPTIM, {"rule": "sign"}),
    "muon": (Matrices, muon_optim(), {}),
    "exact muon": (Matrices, muon_optim(), {"slice_exact": True}),
}


def made(kind: str) -> tuple[nn.Module, InnerOptimizer]:
    """A model and its inner optimizer."""
    model_of, optim, options = KINDS[kind]
    model = model_of()
    return model, InnerOptimizer(model, optim, total_steps=20, **options)


def set_gradients(model: nn.Module, step: int) -> None:
    """Gradients that depend on the step's number alone."""
    for number, (_, parameter) in enumerate(sorted(model.named_parameters())):
        parameter.grad = values(*parameter.shape, seed=100 * step + number)


def train(model: nn.Module, optimizer: InnerOptimizer | torch.optim.Optimizer, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        set_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()


def take_over(model: nn.Module, optimizer: InnerOptimizer, donor: nn.Module, its: InnerOptimizer) -> None:
    """Continue where another one is, as from a checkpoint."""
    model.load_state_dict(donor.state_dict())
    for name, moment in its.named_moments().items():
        optimizer.named_moments()[name].copy_(moment)
    optimizer.seek(its.step_count)
    assert optimizer.restore(json.loads(json.dumps(its.counters())), None)


def are_equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
