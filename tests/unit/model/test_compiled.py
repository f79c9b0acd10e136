"""The model as a GPU runs it, sharded, compiled whole and in bfloat16, traced and run on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from tests.unit.model import varlen_on_cpu

from zeroband.config.model import LlamaConfig
from zeroband.config.optim import OptimConfig
from zeroband.config.training import ActivationCheckpointing, Placement, TrainConfig
from zeroband.model import Transformer, attend_plain, evaluating, generate, init_weights, varlen_attention
from zeroband.model.optim import InnerOptimizer
from zeroband.node.mesh import LocalMesh, allocate, begin_micro_batch, clip_grad_norm_, parallelize
from zeroband.node.sharding import is_sharded, local_part

pytestmark = pytest.mark.slow

V, T = 128, 32
CONFIG = LlamaConfig(d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=64)
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


def built(local: LocalMesh, attend: Any, config: LlamaConfig = CONFIG, **train: object) -> Transformer:
    """A model that was made without values, sharded, and given them."""
    settings = TrainConfig(**train)
    with torch.device("meta"):
        model = Transformer(config, V, attend)
    parallelize(model, settings, local)
    assert all(is_sharded(parameter) == (settings.dtype == "bfloat16") for parameter in model.parameters())
    allocate(model, local)
    init_weights(model, seed=0)
    return model


def gradients(model: Transformer, step: int, rows: int, by_target: bool) -> list[torch.Tensor]:
    model.zero_grad()
    (model(*batch(step, rows), 1e-4, by_target).objective / (rows * T)).backward()
    return [local_part(parameter.grad).clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(
    ("checkpointing", "dtype", "by_target", "least_alike"),
    [("none", "bfloat16", False, 0.05), ("full", "float32", True, 1e-5)],
)
def test_compiled_step_is_two_whole_graphs_for_any_documents(
    checkpointing: ActivationCheckpointing,
    dtype: str,
    by_target: bool,
    least_alike: float,
    local: LocalMesh,
    compiled: list[int],
) -> None:
    """One of all blocks and one of the loss, with the gradients of a plain model; other rows may trace again.

    The test below has selective checkpointing; a graph that is not whole would end it.
    """
    plain = built(local, attend_plain, dtype="float32", compile=False)
    attend = varlen_attention()
    model = built(local, attend, dtype=dtype, compile=True, activation_checkpointing=checkpointing)
    for step, rows in enumerate((2, 2, 2, 3)):
        found, expected = gradients(model, step, rows, by_target), gradients(plain, step, rows, by_target)
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours - theirs).norm() < least_alike * theirs.norm()
        assert rows != 2 or len(compiled) == 2


def test_evaluations_and_samples_between_compiled_steps_are_those_of_plain_float32(
    local: LocalMesh, compiled: list[int]
) -> None:
    config = CONFIG.model_copy(
        update={"n_layers": 1}
    )  # the test above has several; each is traced for each of the modes
    expected, _ = run(built(local, attend_plain, config, dtype="float32", compile=False))
    assert not compiled
    how = {"dtype": "bfloat16", "compile": True, "activation_checkpointing": "selective"}
    losses, sampled = run(built(local, varlen_attention(), config, **how))
    assert losses == pytest.approx(expected, rel=0.02) and len(set(losses)) == len(losses)
    assert sampled.shape == (2 + 6,)


def run(model: Transformer) -> tuple[list[float], torch.Tensor]:
    """Train, evaluate and sample in turns, as a run does: the losses of all, and what was sampled."""
    optimizer = InnerOptimizer(model, OptimConfig(warmup_steps=0), total_steps=100)
    losses: list[float] = []
    sampled = torch.empty(0)
    for step in range(2):
        total, count = 0.0, sum(ROWS) * T
        for rows in ROWS:
            begin_micro_batch(model, Placement(True, False), is_last=rows == ROWS[-1])
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
