"""One rank of tests/integration/test_parallel.py: trains each scenario and writes what rank 0 sees of it.

The node's batch is the same whatever the number of ranks; a rank takes its contiguous share.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from zeroband.config.model import LlamaConfig
from zeroband.config.optim import AdamWConfig, OptimConfig
from zeroband.config.training import Placement, TrainConfig
from zeroband.data.tokenizer import ByteTokenizer
from zeroband.export.directory import TrainedModel, whole_parameters, write_directory
from zeroband.export.hub_files import start_from
from zeroband.model import (
    IGNORE_INDEX,
    Transformer,
    evaluating,
    generate,
    gradient_scale,
    init_weights,
)
from zeroband.model.blueprint import LlamaBlueprint
from zeroband.model.loss import sums_by_source
from zeroband.model.optim import InnerOptimizer
from zeroband.node.mesh import (
    LocalMesh,
    all_ok,
    allocate,
    barrier,
    begin_micro_batch,
    broadcast_json,
    clip_grad_norm_,
    gather_json,
    init_local_mesh,
    parallelize,
)
from zeroband.node.sharding import is_sharded

import_module("torch._dynamo")  # a second, for recomputation: here before the ranks are forked, not in each of them

VOCAB, BATCH, LENGTH, STEPS = 61, 8, 16, 3  # 61 rows do not divide by two: uneven shards
OPTIM = OptimConfig(adamw=AdamWConfig(lr=3e-3), warmup_steps=2, clip_norm=1.0, z_loss=1e-3)


@dataclass(frozen=True)
class Scenario:
    micro_bs: int = BATCH
    train: tuple[tuple[str, Any], ...] = ()
    tied: bool = False
    by_source: bool = False
    """Rows come of two sources in turn, whose losses are told apart."""
    comes_back: bool = False
    """Its weights are written to a directory and read from it."""


SCENARIOS = {
    "plain": Scenario(),
    "micro_batches": Scenario(micro_bs=1),
    "by_source": Scenario(micro_bs=1, by_source=True),
    "recompute": Scenario(train=(("activation_checkpointing", "full"),)),
    "reduced_each_time": Scenario(micro_bs=1, train=(("reduce_gradients", "micro_batch"),)),
    "kept_gathered": Scenario(micro_bs=2, train=(("reshard_after_forward", False),), comes_back=True),
    "tied": Scenario(tied=True, comes_back=True),
    "bfloat16": Scenario(train=(("dtype", "bfloat16"),)),
    "reduced_in_bfloat16": Scenario(
        micro_bs=1, train=(("reduce_dtype", "bfloat16"), ("reduce_gradients", "micro_batch"))
    ),
}


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """The whole node's tokens and targets of one step; the last sequences are mostly padding."""
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    targets = tokens[:, 1:].clone()
    targets[5:, 3:] = IGNORE_INDEX
    return tokens[:, :-1], targets


def documents_of(rows: int) -> Tensor:
    """cu_seqlens of rows whose documents have 7 tokens, and the last one what is left."""
    begins = torch.arange(LENGTH) % 7 == 0
    return torch.cat((begins.repeat(rows).nonzero().flatten(), torch.tensor([rows * LENGTH]))).to(torch.int32)


def backward(model: Transformer, placed: Placement, mesh: LocalMesh, scenario: Scenario, step: int) -> Tensor:
    """Gradient of one inner step from this rank's share of the batch. Gives the nats of its sources."""
    tokens, targets = batch_of(step)
    scale = gradient_scale(int((targets != IGNORE_INDEX).sum()), mesh.world_size)
    share = BATCH // mesh.world_size
    rows = slice(mesh.rank * share, (mesh.rank + 1) * share)
    sources = torch.arange(BATCH) % 2
    parts = [part[rows].split(scenario.micro_bs) for part in (tokens, targets, sources)]
    nats = torch.zeros(2)
    for index, (micro_tokens, micro_targets, micro_sources) in enumerate(zip(*parts, strict=True)):
        begin_micro_batch(model, placed, is_last=index == len(parts[0]) - 1)
        borders = documents_of(len(micro_tokens))
        loss = model(micro_tokens, borders, micro_targets, OPTIM.z_loss, scenario.by_source)
        (loss.objective * scale).backward()
        if scenario.by_source:
            nats += sums_by_source(loss.per_target, micro_sources, 2)
    return nats


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return (tensor.full_tensor() if is_sharded(tensor) else tensor).detach().clone()


def imported(held: dict[str, Tensor], config: LlamaConfig, out: Path, mesh: LocalMesh) -> dict[str, Tensor]:
    """What rank 0 wrote as a directory, read back by all ranks into another sharded model."""
    folder = Path(broadcast_json(tempfile.mkdtemp(dir=out), mesh)) / "model"
    if mesh.rank == 0:
        trained = TrainedModel(LlamaBlueprint(config, VOCAB), ByteTokenizer(), LENGTH, held.__getitem__)
        write_directory(trained, folder, "float32", max_bytes=4000)
    barrier(mesh)
    with torch.device("meta"):
        model = Transformer(config, VOCAB)
    parallelize(model, TrainConfig(dtype="float32"), mesh)
    allocate(model, mesh)
    start_from(model, folder, used_ids=VOCAB)
    return {name: whole(p) for name, p in model.named_parameters()}


def run_scenario(scenario: Scenario, mesh: LocalMesh, out: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = LlamaConfig(d_model=24, n_layers=2, n_heads=2, tie_embeddings=scenario.tied)
    with torch.device("meta"):
        model = Transformer(config, VOCAB)
    placed = parallelize(model, TrainConfig(**{"dtype": "float32", **dict(scenario.train)}), mesh)
    allocate(model, mesh)
    init_weights(model, seed=3)
    tensors = {f"initial/{name}": whole(p) for name, p in model.named_parameters()}
    optimizer = InnerOptimizer(model, OPTIM, total_steps=50)
    norms: list[float] = []
    for step in range(STEPS):
        beside = torch.cat([torch.tensor([mesh.rank + 1.0]), backward(model, placed, mesh, scenario, step)])
        norms.append(clip_grad_norm_(model, OPTIM.clip_norm, also=beside).item())
        optimizer.step()
        optimizer.zero_grad()
    backward(model, placed, mesh, scenario, STEPS)
    tensors |= {f"gradient/{name}": whole(p.grad) for name, p in model.named_parameters()}
    tensors |= {f"final/{name}": whole(p) for name, p in model.named_parameters()}
    held = whole_parameters(model, keeps=mesh.rank == 0)
    tensors |= {f"export/{name}": value for name, value in held.items()}
    if scenario.comes_back:
        tensors |= {f"import/{name}": value for name, value in imported(held, config, out, mesh).items()}
    tokens, targets = batch_of(STEPS + 1)
    with evaluating(model):
        held_out = model(tokens, documents_of(BATCH), targets).cross_entropy.item()
    sample = generate(model, torch.tensor([1, 2, 3]), max_new_tokens=8, temperature=0.8, seed=0, context=LENGTH)
    shard_rows = {name: first.shape[0] for name, first in optimizer.moments()["exp_avg"].items()}
    seen = {
        "norms": norms,
        "beside": beside.tolist(),
        "held_out": held_out,
        "sample": sample.tolist(),
        "shard_rows": shard_rows,
    }
    return seen, tensors


def decisions(mesh: LocalMesh) -> dict[str, Any]:
    last = mesh.world_size - 1
    barrier(mesh)
    return {
        "broadcast": broadcast_json({"from": mesh.rank, "text": "é" * 1000}, mesh),
        "gathered": gather_json({"from": mesh.rank}, mesh),
        "all_true": all_ok(True, mesh),
        "last_false": all_ok(mesh.rank != last, mesh),
    }


def main(out: Path) -> None:
    mesh = init_local_mesh()
    seen: dict[str, Any] = {"decisions": decisions(mesh)}
    for name, scenario in SCENARIOS.items():
        seen[name], tensors = run_scenario(scenario, mesh, out)
        if mesh.rank == 0:
            save_file(tensors, out / f"{name}.safetensors")
    (out / f"rank{mesh.rank}.json").write_text(json.dumps(seen))
    mesh.close()
