"""The compiled model: one graph for all blocks and one for the loss, whole, whatever the step brings."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from zeroband.config.model import LlamaConfig
from zeroband.config.training import ActivationCheckpointing, TrainConfig
from zeroband.model import Transformer, init_weights
from zeroband.node.mesh import LocalMesh, init_local_mesh, parallelize

ROWS, T, V = 2, 24, 64


@pytest.fixture(scope="module")
def mesh() -> Iterator[LocalMesh]:
    mesh = init_local_mesh(environ={})
    yield mesh
    mesh.close()


def model_of(mesh: LocalMesh, **train: object) -> Transformer:
    model = Transformer(LlamaConfig(d_model=32, n_layers=2, n_heads=4, n_kv_heads=2), V)
    init_weights(model, seed=0)
    parallelize(model, TrainConfig(**train), mesh)
    return model


def gradients(model: Transformer, borders: list[int], seed: int, by_target: bool) -> list[Tensor]:
    tokens = torch.randint(0, V, (ROWS, T), generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    model(tokens, torch.tensor(borders, dtype=torch.int32), tokens, 1e-4, by_target).objective.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpointing", "dtype", "by_target"),
    [("none", "bfloat16", False), ("selective", "bfloat16", False), ("full", "float32", True)],
)
def test_compiled_step_is_two_whole_graphs_for_any_documents(
    mesh: LocalMesh,
    monkeypatch: pytest.MonkeyPatch,
    checkpointing: ActivationCheckpointing,
    dtype: str,
    by_target: bool,
) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    compiled = model_of(mesh, dtype=dtype, activation_checkpointing=checkpointing, compile=True)
    plain = model_of(mesh, dtype=dtype)
    for seed, borders in enumerate(([0, 5, T, T + 9, 2 * T], [0, T, 2 * T], [0, 3, 4, 9, T, 2 * T - 2, 2 * T])):
        found, expected = (gradients(model, borders, seed, by_target) for model in (compiled, plain))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2 if dtype == "bfloat16" else 1e-5)
    assert counter.frame_count == 2
