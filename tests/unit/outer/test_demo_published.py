"""DeMo as four nodes of a run make it, against a reference of the published algorithm that shares no code with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.oracles.demo import MLP_SHAPES, Published, Tensors, mlp_gradient, mlp_start, published_demo
from torch import Tensor, nn

from zeroband.config import load_config
from zeroband.config.optim import AdamWConfig, LinearSchedule, OptimConfig
from zeroband.config.outer import DemoConfig

pytestmark = pytest.mark.slow

STEPS, TOTAL, WARMUP, LR = 12, 40, 4, 1e-3
NAMES = ("a", "b", "c", "d")
PRESET = Path(__file__).parents[3] / "configs/debug/demo-published.toml"


def lr_of(step: int) -> float:
    """Grow over four steps, then fall to 0 at step 40. Counts from 1."""
    return LR * step / WARMUP if step <= WARMUP else LR * (TOTAL - step + 1) / (TOTAL - WARMUP)


def three_layers() -> nn.Module:
    model = nn.Sequential(nn.Linear(67, 24), nn.Tanh(), nn.Linear(24, 96), nn.Tanh(), nn.Linear(96, 10))
    model.load_state_dict(mlp_start())
    return model


def flat(tensors: Tensors) -> Tensor:
    return torch.cat([tensors[name].reshape(-1) for name in sorted(tensors)])


def by_name(values: Tensor) -> Tensors:
    sizes = [torch.Size(MLP_SHAPES[name]) for name in sorted(MLP_SHAPES)]
    parts = values.split([size.numel() for size in sizes])
    return {name: part.view(size) for name, part, size in zip(sorted(MLP_SHAPES), parts, sizes, strict=True)}


def train(start_run: Callable[..., Any], config: DemoConfig, adamw: AdamWConfig) -> list[Tensor]:
    """Return the parameters of all nodes, which are the same, after each step."""
    optim = OptimConfig(adamw=adamw, schedule=LinearSchedule(type="linear"), warmup_steps=WARMUP, clip_norm=None)
    run = start_run(config, *NAMES, model=three_layers, optim=optim, total_steps=TOTAL)
    history: list[Tensor] = []
    for step in range(1, STEPS + 1):
        gradients = [flat(mlp_gradient(n, step, by_name(run[name].params))) for n, name in enumerate(NAMES)]
        run.together(**{n: partial(run[n].gradient_step, g) for n, g in zip(NAMES, gradients, strict=True)})
        assert len({node.outer.state_digest for node in run.nodes.values()}) == 1
        history.append(run["a"].params)
    return history


def assert_equal_histories(ours: list[Tensor], theirs: list[Tensors]) -> None:
    """A sign that differed would show as twice the learning rate, 2e-3; what may differ is float32's last bits."""
    assert len(ours) == len(theirs) == STEPS
    for ours_then, theirs_then in zip(ours, theirs, strict=True):
        torch.testing.assert_close(ours_then, flat(theirs_then), rtol=1e-6, atol=1e-7)


def test_preset_of_demo_as_published_is_the_published_algorithm(start_run: Callable[..., Any]) -> None:
    config = load_config([f"@{PRESET}", "--store.url=redis://nowhere"])
    demo, adamw = config.outer, config.optim.adamw.model_copy(update={"lr": LR})
    assert isinstance(demo, DemoConfig)
    assert adamw.weight_decay > 0, "the decay of vectors would not show"
    theirs = published_demo(mlp_start(), mlp_gradient, 4, STEPS, Published(lr_of, weight_decay=adamw.weight_decay))
    assert_equal_histories(train(start_run, demo, adamw), theirs)


def test_demo_that_pads_and_decays_no_vectors_is_the_reference_that_does_so(start_run: Callable[..., Any]) -> None:
    """Our own defaults, with fewer values sent of smaller chunks."""
    demo = DemoConfig(type="demo", k=6, chunk=32, values="float32", decay=0.9)
    assert demo.uneven == "pad"
    ours = train(start_run, demo, AdamWConfig(lr=LR, weight_decay=0.3))
    run = Published(lr_of, chunk=32, k=6, decay=0.9, weight_decay=0.3, decays_vectors=False, is_padded=True)
    assert_equal_histories(ours, published_demo(mlp_start(), mlp_gradient, 4, STEPS, run))
