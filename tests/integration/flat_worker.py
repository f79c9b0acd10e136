"""One of three ranks of tests/integration/test_flat.py: says whether the canonical flat state is what FSDP2 shards."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO, cast

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from zeroband.checkpoint.layout import inner_header
from zeroband.checkpoint.manifest import StoredFile
from zeroband.checkpoint.own_state import load_inner
from zeroband.config.model import LlamaConfig
from zeroband.config.optim import AdamWConfig, MuonConfig, OptimConfig
from zeroband.config.training import TrainConfig
from zeroband.errors import ConfigError
from zeroband.model import Transformer, init_weights
from zeroband.model.optim import InnerOptimizer
from zeroband.node.mesh import LocalMesh, barrier, init_local_mesh, parallelize
from zeroband.node.sharding import local_part
from zeroband.state.flat import FlatLayout, ShardMap, SharedBuffers, gradient_shards, parameter_shards

VOCAB = 61  # 61 rows divide by neither two nor three
INT8 = OptimConfig(state_dtype="int8", warmup_steps=0)
MUON = OptimConfig(adamw=AdamWConfig(lr=0.02), muon=MuonConfig(), warmup_steps=0)


def build(config: LlamaConfig | None = None) -> Transformer:
    model = Transformer(config or LlamaConfig(d_model=24, n_layers=2, n_heads=2, d_ff=50), VOCAB)
    init_weights(model, seed=3)
    return model


def whole(tensors: dict[str, Tensor]) -> Tensor:
    parts = [tensors[name] for name in sorted(tensors)]
    return torch.cat([(p.full_tensor() if isinstance(p, DTensor) else p).detach().reshape(-1) for p in parts])


def shards_of(model: nn.Module, local: LocalMesh, folder: Path) -> dict[str, bool]:
    """What holds of `model`, sharded over all ranks of `local`."""
    expected, layout = whole(dict(model.named_parameters())), FlatLayout.of(model)
    parallelize(model, TrainConfig(dtype="float32"), local)
    shards, buffers = ShardMap(layout, local.rank, local.world_size), SharedBuffers(folder, layout.numel, local)
    buffers.open("params", "gradient")
    shards.store(parameter_shards(model), buffers["params"])
    tokens = torch.arange(2 * 12).view(2, 12)
    model(tokens + local.rank).square().mean().backward()
    shards.store(gradient_shards(model), buffers["gradient"])
    barrier(local)
    gradients = whole({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    seen = {
        "layout survives sharding": FlatLayout.of(model) == layout,
        "parameters stored": torch.equal(buffers["params"], expected),
        "gradients stored": torch.equal(buffers["gradient"], gradients) and bool(gradients.any()),
    }
    numbers = torch.arange(float(layout.numel))
    shards.load(parameter_shards(model), numbers)
    seen["parameters loaded"] = torch.equal(whole(dict(model.named_parameters())), numbers)
    seen["inner optimizer of other ranks loaded"] = is_inner_loaded(model, layout, local, folder)
    return seen | renewal_of(buffers, local)


def is_inner_loaded(model: nn.Module, layout: FlatLayout, local: LocalMesh, folder: Path) -> bool:
    """A file that knows no ranks, loaded into the shards of these."""
    numbers = torch.arange(float(layout.numel))
    data = inner_header(layout.slots, ("exp_avg",)) + numbers.numpy().tobytes()
    path = folder / f"inner{local.rank}"
    path.write_bytes(data)
    moments = {f"exp_avg.{name}": torch.zeros_like(p) for name, p in model.named_parameters()}
    expected = StoredFile(len(data), xxhash.xxh3_128_hexdigest(data))
    load_inner(moments, lambda: cast(BinaryIO, path.open("rb", buffering=0)), expected)
    return torch.equal(whole(moments), numbers)


def matrices_of_muon(local: LocalMesh, folder: Path) -> dict[str, bool]:
    """What Muon makes of a sharded model is what it makes of a whole one; it also goes on from that one's file."""
    seen: dict[str, bool] = {}
    for exact, name in ((True, "to the last bit"), (False, "within rounding")):
        alone, sharded, resumed = build(), build(), build()
        for model in (sharded, resumed):
            parallelize(model, TrainConfig(dtype="float32"), local)
        inner = {one: InnerOptimizer(one, MUON, total_steps=9, slice_exact=exact) for one in (alone, sharded, resumed)}
        for model in (alone, sharded):
            take_steps(model, inner[model], 0, 3)
        seen[f"Muon's steps, {name}"] = same(alone, sharded, exact=exact)

        layout, one_rank = FlatLayout.of(alone), ShardMap(FlatLayout.of(alone), 0, 1)
        go_on(inner[resumed], inner[alone], alone, folder / f"muon{local.rank}")
        params = torch.zeros(layout.numel)
        one_rank.store(parameter_shards(alone), params)
        ShardMap(layout, local.rank, local.world_size).load(parameter_shards(resumed), params)
        for model in (alone, resumed):
            take_steps(model, inner[model], 3, 2)
        seen[f"Muon's steps after those of one rank, {name}"] = same(alone, resumed, exact=exact)
    return seen


def moments_in_int8(local: LocalMesh, folder: Path) -> dict[str, bool]:
    """Steps of a sharded model are those of a whole one; it also goes on from that one's file of float32 moments."""
    alone, sharded, resumed = (build(LlamaConfig(d_model=128, n_layers=1, n_heads=2, d_ff=256)) for _ in range(3))
    for model in (sharded, resumed):
        parallelize(model, TrainConfig(dtype="float32"), local)
    inner = {one: InnerOptimizer(one, INT8, total_steps=9) for one in (alone, sharded, resumed)}
    for model in (alone, sharded):
        take_steps(model, inner[model], 0, 3)
    seen = {"steps with int8 moments": same(alone, sharded, exact=False)}
    go_on(inner[resumed], inner[alone], alone, folder / f"int8-{local.rank}")
    seen["int8 moments of one rank loaded"] = all(
        torch.allclose(
            local_part(moment).dequantize(),
            inner[alone].named_moments()[name].dequantize().chunk(local.world_size)[local.rank],
            rtol=0.02,  # rounded once more: a block's largest value moves by 0.7 %, a code by half a step
            atol=1e-2 * float(inner[alone].named_moments()[name].dequantize().abs().max()),
        )
        for name, moment in inner[resumed].named_moments().items()
    )
    types = {type(local_part(moment)).__name__ for moment in inner[resumed].named_moments().values()}
    seen["matrices alone are in int8"] = types == {"OptimState8bit", "Tensor"}
    return seen


def go_on(resumed: InnerOptimizer, alone: InnerOptimizer, model: nn.Module, path: Path) -> None:
    """Load the moments of an optimizer on one rank from their file."""
    layout = FlatLayout.of(model)
    buffers = {moment: torch.zeros(layout.numel) for moment in alone.moment_names}
    for moment, shards in alone.moments().items():
        ShardMap(layout, 0, 1).store(shards, buffers[moment])
    data = inner_header(layout.slots, list(buffers)) + b"".join(flat.numpy().tobytes() for flat in buffers.values())
    path.write_bytes(data)
    expected = StoredFile(len(data), xxhash.xxh3_128_hexdigest(data))
    load_inner(resumed.named_moments(), lambda: cast(BinaryIO, path.open("rb", buffering=0)), expected)
    resumed.seek(alone.step_count, update_count=alone.update_count)


def take_steps(model: nn.Module, inner: InnerOptimizer, first: int, steps: int) -> None:
    """By gradients that depend on names, shapes and the number of the step."""
    for step in range(first, first + steps):
        for number, (_, parameter) in enumerate(sorted(model.named_parameters())):
            gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * step + number))
            is_cut = isinstance(parameter, DTensor)
            parameter.grad = distribute_tensor(gradient, parameter.device_mesh, [Shard(0)]) if is_cut else gradient
        inner.step()
        inner.zero_grad()


def same(alone: nn.Module, sharded: nn.Module, *, exact: bool) -> bool:
    one, other = (whole(dict(model.named_parameters())) for model in (alone, sharded))
    return torch.equal(one, other) if exact else torch.allclose(one, other, rtol=0.0, atol=1e-5)


def renewal_of(buffers: SharedBuffers, local: LocalMesh) -> dict[str, bool]:
    old = buffers["params"]
    buffers.renew("params")
    barrier(local)
    old.fill_(float("nan"))
    if local.rank == local.world_size - 1:
        buffers["params"].fill_(5)
    barrier(local)
    return {"renewed buffer is shared and apart from the old one": bool((buffers["params"] == 5).all())}


def refusal_of_small_memory(local: LocalMesh, folder: Path) -> str:
    """Memory is full on rank 0, which is the only one that makes buffers."""

    def full(_descriptor: int, _offset: int, _length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if local.rank == 0:
        os.posix_fallocate = full
    try:
        SharedBuffers(folder, 1000, local).open("params")
    except ConfigError as error:
        return str(error)
    return "no error"


def main(out: Path) -> None:
    local = init_local_mesh()
    three, pair, full = out / "three", out / "pair", out / "full"
    if local.rank == 0:
        for folder in (three, pair, full):
            folder.mkdir()
    barrier(local)
    seen = {"three": shards_of(build(), local, three) | matrices_of_muon(local, three)}
    pair_group = dist.new_group([0, 1], backend="gloo")
    if local.rank < 2:
        two = replace(local, world_size=2, mesh=DeviceMesh.from_group(pair_group, "cpu"), control=pair_group)
        seen["two"] = shards_of(build(), two, pair)
        if find_spec("torchao") is not None:
            seen["two"] |= moments_in_int8(two, pair)
    barrier(local)
    seen["refusal"] = refusal_of_small_memory(local, full)
    (out / f"rank{local.rank}.json").write_text(json.dumps(seen))
    local.close()
