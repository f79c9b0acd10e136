"""The model on a GPU: attention, loss, sharding and compilation give what plain float32 on a CPU gives."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from zeroband.config.model import LlamaConfig
from zeroband.config.optim import OptimConfig
from zeroband.config.training import Float8Recipe, ProfileConfig, TrainConfig
from zeroband.model import Transformer, attend_plain, attention_on, init_weights, linear_loss
from zeroband.model.optim import InnerOptimizer
from zeroband.model.parallel import allocate, clip_grad_norm_, float8_problem, parallelize
from zeroband.node.mesh import LocalMesh
from zeroband.node.sharding import is_sharded, local_part
from zeroband.runtime.profile import StepProfiler

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

CONFIG = LlamaConfig(d_model=256, n_layers=3, n_heads=4, n_kv_heads=2, d_ff=512)
V, B, T = 512, 2, 384
BORDERS = [0, 100, 101, 300, T, T + 250, 2 * T]
BF16 = 2**-8
"""Half a unit in the last place of bfloat16, relative to the value."""


@pytest.fixture(autouse=True)
def compiles_anew() -> Iterator[None]:
    yield
    torch.compiler.reset()


def heads_of(device: torch.device, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, T, 4, 64), (B, T, 2, 64), (B, T, 2, 64))
    return tuple(
        torch.randn(shape, generator=generator).to(device, torch.bfloat16).requires_grad_() for shape in shapes
    )


def attended(attend: object, heads: tuple[Tensor, ...], borders: Tensor) -> list[Tensor]:
    """What comes out, and the gradients of query, key and value."""
    out = attend(*heads, borders)  # pyright: ignore[reportCallIssue]
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), heads)]


def test_attention_of_the_trainer_is_that_of_float32(device: torch.device) -> None:
    attend, why_slower = attention_on(device, torch.bfloat16, CONFIG)
    assert not why_slower
    heads = heads_of(device)
    exact = tuple(h.detach().float().requires_grad_() for h in heads)
    borders = torch.tensor(BORDERS, dtype=torch.int32, device=device)
    for found, expected in zip(attended(attend, heads, borders), attended(attend_plain, exact, borders), strict=True):
        assert (found - expected).norm() < 4 * BF16 * expected.norm()


def test_another_first_document_changes_no_bit_of_the_second(device: torch.device) -> None:
    attend, _ = attention_on(device, torch.bfloat16, CONFIG)
    borders = torch.tensor(BORDERS, dtype=torch.int32, device=device)
    one, other = heads_of(device), heads_of(device, seed=1)
    with torch.no_grad():
        mixed = tuple(h.clone() for h in one)
        for ours, theirs in zip(mixed, other, strict=True):
            ours[0, :100] = theirs[0, :100]
        before, after = attend(*one, borders), attend(*mixed, borders)
    assert torch.equal(before[0, 100:], after[0, 100:]) and torch.equal(before[1], after[1])
    assert not torch.equal(before[0, :100], after[0, :100])


def trained(mesh: LocalMesh, steps: int, **train: object) -> tuple[list[float], list[float], Transformer]:
    """Losses and gradient norms of some steps, and the model."""
    settings = TrainConfig(**train)
    with torch.device("meta"):
        model = Transformer(CONFIG, V, attention_on(mesh.device, getattr(torch, settings.dtype), CONFIG)[0])
    parallelize(model, settings, mesh)
    allocate(model, mesh)
    init_weights(model, seed=0)
    optimizer = InnerOptimizer(model, OptimConfig(warmup_steps=0), total_steps=100)
    losses, norms = list[float](), list[float]()
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, V, (B, T), generator=generator).to(mesh.device)
        borders = torch.tensor(BORDERS[step:], dtype=torch.int32, device=mesh.device)
        borders[0] = 0
        loss = model(tokens, borders, tokens.roll(-1, 1), 1e-4)
        (loss.objective / tokens.numel()).backward()
        norms.append(float(clip_grad_norm_(model, 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.cross_entropy.item() / tokens.numel())
    return losses, norms, model


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("compiles", [False, True])
def test_steps_of_a_sharded_bfloat16_model_follow_plain_float32(
    mesh: LocalMesh, checkpointing: str, compiles: bool
) -> None:
    expected_losses, expected_norms, _ = trained(mesh, 4, dtype="float32", compile=False)
    losses, norms, model = trained(mesh, 4, activation_checkpointing=checkpointing, compile=compiles)
    assert all(is_sharded(parameter) for parameter in model.parameters())
    assert all(local_part(parameter).dtype == torch.float32 for parameter in model.parameters())
    assert losses == pytest.approx(expected_losses, rel=0.01)
    assert norms == pytest.approx(expected_norms, rel=0.05)


@pytest.mark.parametrize("recipe", get_args(Float8Recipe))
def test_steps_in_float8_follow_plain_float32(mesh: LocalMesh, recipe: Float8Recipe) -> None:
    pytest.importorskip("torchao")
    if why := float8_problem(mesh.device):
        pytest.skip(why)
    expected_losses, _, _ = trained(mesh, 4, dtype="float32", compile=False)
    losses, _, model = trained(mesh, 4, float8=recipe)
    assert "Float8Linear" in {type(module).__name__ for module in model.modules()}
    assert losses == pytest.approx(expected_losses, rel=0.03) and losses != expected_losses


def test_trace_has_what_the_gpu_did(device: torch.device, tmp_path: Path) -> None:
    profiler = StepProfiler(ProfileConfig(steps=(1, 1)), tmp_path, rank=0, device=device)
    profiler.begin(1)
    torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
    profiler.end(1)
    (file,) = tmp_path.iterdir()
    kinds = {event.get("cat") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
    assert ("kernel" if device.type == "cuda" else "cpu_op") in kinds


def test_head_and_loss_of_the_10b_model_take_at_most_four_gigabytes(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("counts the memory of a GPU")
    x = torch.randn(1, 8192, 4096, dtype=torch.bfloat16, device=device, requires_grad=True)
    weight = torch.randn(128_256, 4096, dtype=torch.bfloat16, device=device, requires_grad=True)
    targets = torch.randint(0, 128_256, (1, 8192), device=device)
    torch.cuda.reset_peak_memory_stats()
    linear_loss(x, weight, targets, z_loss=1e-4).objective.mul(1e-4).backward()
    assert torch.cuda.max_memory_allocated() <= 4e9
