"""How a model runs on the ranks of a node: in float8, compiled, sharded by FSDP2; and its gradient's norm over them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeroband.config.training import Float8Recipe, Placement, TrainConfig, placement
from zeroband.errors import ConfigError
from zeroband.kernels.probe import triton_problem
from zeroband.model.language_model import LanguageModel
from zeroband.node.mesh import LocalMesh, all_ok
from zeroband.node.sharding import Parameters, is_fsdp, is_sharded, local_part

_LEAST_FLOAT8_CAPABILITY = (8, 9)


def parallelize(model: LanguageModel, train: TrainConfig, mesh: LocalMesh) -> Placement:
    """Shard a model over the local ranks in place: each block, the embedding and the head separately.

    Compute runs in `train.dtype`; parameters and gradients are float32, and so are sums over the ranks unless
    `train.reduce_dtype` says otherwise. Parameter names do not change. A model on the meta device is sharded without
    memory; call `allocate` afterwards and initialise it. A single rank in float32 leaves the model unchanged. Returns
    what the ranks keep between the passes of a step. Raises ConfigError for a model without layers that must be
    sharded, and for another dtype than float32 on mps, where FSDP2 does not cast.
    """
    if mesh.device.type == "mps" and train.dtype != "float32":
        raise ConfigError(
            f"train.dtype={train.dtype!r}: mps supports float32 only; set train.dtype = "
            '"float32" on it (other nodes may differ), or train.device = "cpu"'
        )
    model.recompute(train.activation_checkpointing)
    if train.float8 is not None and _serves_all(float8_problem, mesh):
        use_float8(model.blocks, train.float8)
    if compiles(train, mesh):
        _compile(model)
    params = sum(parameter.numel() for parameter in model.parameters())
    placed = placement(train, params=params, ranks=mesh.world_size, gpu_bytes=mesh.gpu_bytes)
    if mesh.world_size > 1 or train.dtype != "float32":
        require_cuts(model, mesh)
        _shard(model, train, mesh, placed)
    return placed


def require_cuts(model: LanguageModel, mesh: LocalMesh) -> None:
    """Raise ConfigError if the ranks cannot each hold a part of the model."""
    if mesh.world_size > 1 and not model.blocks:
        raise ConfigError(
            f"the model has no nn.ModuleList of layers, so {mesh.world_size} ranks cannot shard it; keep its layers in "
            "one, or start a node of one rank for each GPU"
        )
    for name, parameter in model.named_parameters():
        if not parameter.ndim:
            raise ConfigError(f"parameter {name} is a scalar, which ranks cannot shard; give it shape (1,)")


def compiles(train: TrainConfig, mesh: LocalMesh) -> bool:
    """Whether all ranks compile the model: on GPUs if each can, on CPUs if asked to. All ranks call it."""
    if mesh.device.type == "cuda":
        return train.compile is not False and _serves_all(triton_problem, mesh)
    return bool(train.compile)


def _serves_all(problem: Callable[[torch.device], str], mesh: LocalMesh) -> bool:
    """Whether no rank's device has a problem: unequal cards do what the least capable can."""
    serves = not problem(mesh.device)
    return all_ok(serves, mesh) if mesh.device.type == "cuda" else serves


def _compile(model: LanguageModel) -> None:
    """Compile each block, and the loss. One graph serves all blocks, and any number of documents."""
    for block in model.blocks:  # compile the forward, not the module: FSDP2's hooks stay outside
        block.forward = torch.compile(block.forward, fullgraph=model.compiles_whole)
    model.logits_loss = torch.compile(model.logits_loss, fullgraph=True)
    model.register_forward_pre_hook(_mark_documents_dynamic)


def _mark_documents_dynamic(_model: nn.Module, inputs: tuple[Tensor | None, ...]) -> None:
    if len(inputs) > 1 and inputs[1] is not None:
        torch._dynamo.mark_dynamic(inputs[1], 0)  # pyright: ignore[reportPrivateUsage]


def _shard(model: LanguageModel, train: TrainConfig, mesh: LocalMesh, placed: Placement) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # takes two seconds to import, see `sharding`

    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if train.dtype == "bfloat16" else None,
        reduce_dtype=torch.bfloat16 if train.reduce_dtype == "bfloat16" else torch.float32,
        cast_forward_inputs=model.casts_inputs,
    )
    shard = partial(fully_shard, mesh=mesh.mesh, mp_policy=policy)
    for block in model.blocks:
        shard(block, reshard_after_forward=placed.reshard_after_forward)
    if model.ends:  # otherwise the embedding is tied to the head, and stays with the root
        embedding, head = model.ends
        shard(embedding, reshard_after_forward=placed.reshard_after_forward)
        shard(head, reshard_after_forward=False)  # its backward pass comes next
    shard(model, reshard_after_forward=False)


def allocate(model: nn.Module, mesh: LocalMesh) -> None:
    """Allocate uninitialised memory on this rank's device for a model on the meta device. Ties are kept."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((module, name))
    if any(is_sharded(parameter) for parameter in model.parameters()):
        model.to_empty(device=mesh.device)
        for (first, name), *others in places.values():
            for module, other in others:
                setattr(module, other, getattr(first, name))
        return
    for of_one in places.values():  # `to_empty` would load torch's compiler, for seconds, to ask for strides
        meta = getattr(*of_one[0])
        room = torch.empty(meta.shape, dtype=meta.dtype, device=mesh.device)
        parameter = nn.Parameter(room, requires_grad=meta.requires_grad)
        for module, name in of_one:
            setattr(module, name, parameter)
    buffers: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffers.setdefault(id(buffer), torch.empty_like(buffer, device=mesh.device)))


def begin_micro_batch(model: nn.Module, placed: Placement, *, is_last: bool) -> None:
    """Set what the ranks exchange in the next forward and backward pass; called before each micro-batch of a step.

    Gradients are reduced after the last one, or after each. Until then every rank keeps the whole gradient in float32,
    as a model that is not sharded always does. Parameters that stay gathered between forward and backward stay so
    until the last backward pass, so that a step gathers them once.
    """
    if is_fsdp(model):
        model.set_requires_gradient_sync(is_last or placed.reduces_micro_batches)
        model.set_reshard_after_backward(is_last or placed.reshard_after_forward)


def widest_float(device: torch.device) -> torch.dtype:
    """Return the widest float type of a device, for values that are rounded once: Apple's GPUs have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def clip_grad_norm_(model: Parameters, max_norm: float | None, *, also: Tensor | None = None) -> Tensor:
    """Return the gradient's global norm over all shards; scale the gradient down to `max_norm` if it is larger.

    None only measures. A gradient whose norm is not finite is left unchanged: the caller decides. Does not wait for the
    device. Shapes: the norm () float32 on the gradient's device; `also` (k,) float32, summed over the ranks in the same
    collective. Called by every local rank; all get the same number.
    """
    gradients = [parameter.grad for _, parameter in model.named_parameters() if parameter.grad is not None]
    local = [local_part(gradient) for gradient in gradients]
    norm = torch.nn.utils.get_total_norm(local)
    if gradients and is_sharded(gradients[0]) and gradients[0].device_mesh.size() > 1:
        square = norm.square().view(1)
        shares = square if also is None else torch.cat([square, also])
        dist.all_reduce(shares, group=gradients[0].device_mesh.get_group())  # pyright: ignore[reportUnknownMemberType]
        norm = shares[0].sqrt()
        if also is not None:
            also.copy_(shares[1:])
    if max_norm is not None and local:
        limit = torch.full_like(norm, max_norm, dtype=widest_float(norm.device))  # one rounding, to float32
        scale = torch.where(norm.isfinite(), (limit / norm).clamp(max=1.0).to(norm.dtype), 1.0)
        torch._foreach_mul_(local, scale)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
    return norm


# -- float8 --------------------------------------------------------------------------------------------------------


def float8_problem(device: torch.device) -> str:
    """Return why a device cannot multiply in float8; empty if it can."""
    if device.type != "cuda":
        return "there is no GPU"
    if torch.cuda.get_device_capability(device) < _LEAST_FLOAT8_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.9"
    return ""


def use_float8(blocks: Iterable[nn.Module], recipe: Float8Recipe) -> None:
    """Make the blocks' linear layers multiply in float8, in all three products of a step, in place.

    Parameters keep their names, types and values, also on the meta device. Call before `torch.compile` and FSDP2.
    """
    torchao: Any = importlib.import_module("torchao.float8")  # has no types
    config = torchao.Float8LinearConfig.from_recipe_name(recipe)
    for block in blocks:
        torchao.convert_to_float8_training(block, config=config)
