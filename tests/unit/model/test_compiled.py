"""The model as a GPU runs it, sharded, compiled whole and in bfloat16, traced and run on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, get_args

import pytest
import torch
from tests.unit.model import varlen_on_cpu

from zeroband.config.model import LlamaConfig
from zeroband.config.optim import OptimConfig
from zeroband.config.training import ActivationCheckpointing, TrainConfig
from zeroband.model import Transformer, attend_plain, evaluating, generate, init_weights, varlen_attention
from zeroband.model.optim import InnerOptimizer
from zeroband.node.mesh import LocalMesh, clip_grad_norm_, make_room, parallelize, set_gradient_sync
from zeroband.node.sharding import is_sharded

pytestmark = pytest.mark.slow

V, T = 128, 32
CONFIG = LlamaConfig(d_model=32, n_layers=1, n_heads=4, n_kv_heads=2, d_ff=64)
ROWS = (2, 3)
"""Of the micro-batches of a step: the last one may have others than those before it."""


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Trace as for a GPU, but make no code; gives the sizes of the graphs."""
    varlen_on_cpu.register()
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(len(graph.graph.nodes))
        return aot_eager(graph, examples)

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    yield graphs
    torch.compiler.reset()


def batch(step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, borders of another number of documents at each step, and targets."""
    generator = torch.Generator().manual_seed(10 * step + rows)
    tokens = torch.randint(0, V, (rows, T), generator=generator)
    cuts = torch.randint(1, rows * T, (step + 1,), generator=generator).tolist()
    borders = torch.tensor(sorted({0, *range(T, rows * T, T), rows * T, *cuts}), dtype=torch.int32)
    return tokens, borders, tokens.roll(-1, 1)


def run(local: LocalMesh, attend: Any, **train: object) -> tuple[list[float], torch.Tensor]:
    """Train, evaluate and sample in turns, as a run does: the losses of all, and what was sampled."""
    settings = TrainConfig(**train)
    with torch.device("meta"):
        model = Transformer(CONFIG, V, attend)
    parallelize(model, settings, local)
    assert all(is_sharded(parameter) == settings.compile for parameter in model.parameters())
    make_room(model, local)
    init_weights(model, seed=0)
    optimizer = InnerOptimizer(model, OptimConfig(warmup_steps=0), total_steps=100)
    losses: list[float] = []
    sampled = torch.empty(0)
    for step in range(2):
        total, count = 0.0, sum(ROWS) * T
        for rows in ROWS:
            set_gradient_sync(model, rows == ROWS[-1])
            loss = model(*batch(step, rows), 1e-4, False)
            (loss.objective / count).backward()
            total += loss.cross_entropy.item()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with evaluating(model):
            held_out = [model(*batch(9, rows), 0.0, True).cross_entropy for rows in (4, 1)]
        losses += [total / count, sum(float(nats.sum()) for nats in held_out)]
        prompt = torch.arange(1 + step)
        sampled = generate(model, prompt, max_new_tokens=6, temperature=0.0, seed=0, context=T // 8)
    return losses, sampled


@pytest.mark.parametrize("checkpointing", get_args(ActivationCheckpointing))
def test_compiled_steps_evaluations_and_samples_are_those_of_plain_float32(
    checkpointing: ActivationCheckpointing, local: LocalMesh, compiled: list[int]
) -> None:
    expected, _ = run(local, attend_plain, dtype="float32", compile=False)
    assert not compiled
    losses, sampled = run(
        local, varlen_attention(), dtype="bfloat16", compile=True, activation_checkpointing=checkpointing
    )
    assert losses == pytest.approx(expected, rel=0.02) and len(set(losses)) == len(losses)
    assert sampled.shape == (2 + 6,)
    assert compiled
