"""Inside a node: the mesh of local ranks, sharding by FSDP2, and the small decisions that ranks take together.

Owns torch.distributed's default group, which spans one node and never two. Called from the main thread of every rank.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import Store

from zeroband.config.training import ActivationCheckpointing, DeviceKind, Placement, TrainConfig, placement
from zeroband.errors import ConfigError
from zeroband.kernels.probe import triton_problem
from zeroband.node.float8 import float8_problem, use_float8
from zeroband.node.gpus import Card, are_apart, card_of, cards_of, least_share
from zeroband.node.launched import rank_and_world_size, several_machines
from zeroband.node.rank_store import meet
from zeroband.node.sharding import Parameters, is_fsdp, is_sharded, local_part
from zeroband.observe.log import get_logger

CONTROL_TIMEOUT_S = 7 * 24 * 3600.0
"""Ranks wait so long for one another where rank 0 may be waiting for other nodes: above its longest wait for them,
which bounds itself."""

DATA_TIMEOUT_S = 600.0
"""Ranks wait so long for one another in a collective of training. None of them then waits for other nodes: they meet in
the control group before. What keeps one longer than the others is its first step, in which it compiles for minutes, and
what rank 0 alone writes between two steps. After that NCCL's watchdog aborts the process (torch's default,
TORCH_NCCL_ASYNC_ERROR_HANDLING=3), gloo raises in it, and the launcher ends the others."""

_log = get_logger(__name__)

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True)
class LocalMesh:
    """The ranks of this node. Owns the process groups that it made: `close()` ends them."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    """One dimension, over which parameters are sharded."""
    control: dist.ProcessGroup
    """gloo on CPU tensors, for decisions; never shared with the data of training."""
    cards: tuple[Card, ...] = ()
    """The GPU of each rank; several may have the same. Empty on CPUs."""
    lent: list[dist.ProcessGroup] | None = field(default=None, repr=False)
    """The groups made here, where the default group is the program's that this is a part of; None: it is ours, too."""

    @property
    def gpu_bytes(self) -> int | None:
        """Memory that each rank has of its GPU at least: the same number on all of them. None: on CPUs."""
        return least_share(self.cards)

    def twin(self) -> LocalMesh:
        """Return the same ranks with a control group of their own, for another thread. Called by all ranks together."""
        if self.world_size == 1:
            return self
        twin = replace(self, control=_control_group())
        if self.lent is not None:
            self.lent.append(twin.control)
        return twin

    def close(self) -> None:
        """End the process groups that were made here, all of this process where the default one was; once.

        A group that is open when its process ends may still have a thread, which then can abort the process.
        """
        if not dist.is_initialized():
            return
        if self.lent is None:
            dist.destroy_process_group()
            return
        while self.lent:
            dist.destroy_process_group(self.lent.pop())


def device_kind(wanted: DeviceKind | None) -> DeviceKind:
    """Return what a rank computes on here: the kind that `train.device` names, or the first that is there.

    Raises: ConfigError where this machine, or torch on it, has no such device.
    """
    kinds: list[DeviceKind] = ["cpu"]
    if torch.backends.mps.is_available():
        kinds.insert(0, "mps")
    if torch.cuda.device_count():
        kinds.insert(0, "cuda")
    if wanted is not None and wanted not in kinds:
        raise ConfigError(
            f"train.device={wanted!r}: torch {torch.__version__} finds none on this machine, but {', '.join(kinds)}; "
            "leave it out to take the first of them"
        )
    return wanted or kinds[0]


def widest_float(device: torch.device) -> torch.dtype:
    """Return the type for numbers that are to be rounded once: float64, which Apple's GPUs do not have."""
    return torch.float32 if device.type == "mps" else torch.float64


def init_local_mesh(
    environ: Mapping[str, str] | None = None, *, gpu: torch.device | None = None, kind: DeviceKind | None = None
) -> LocalMesh:
    """Join the node's other ranks as torchrun's environment says; without torchrun this process is the only rank.

    Each rank takes `gpu`; None: a device of `device_kind(kind)`. Of the GPUs that it sees that is the one of its
    number, or it shares one where there are fewer than ranks. NCCL refuses two ranks on one GPU, so where the ranks'
    cards are not all different ones they talk through gloo, as they do on CPUs, and a warning says so.
    Raises: ConfigError when torchrun spans several nodes: nodes are joined by [outer], not by torchrun; where its
    variables do not fit together; where ranks do not come; where there is no such device; for several ranks on mps;
    where some ranks see a GPU and others do not.
    """
    environ = os.environ if environ is None else environ
    _stay_on_this_machine()
    rank, world_size = rank_and_world_size(environ)
    kind = "cuda" if gpu is not None else device_kind(kind)
    gpus = torch.cuda.device_count() if kind == "cuda" else 0
    if kind == "mps" and world_size > 1:
        raise ConfigError(
            f"train.device='mps': {world_size} ranks cannot share parameters on it; start one rank, or set "
            'train.device = "cpu"'
        )
    device = gpu or (torch.device("cuda", rank % gpus) if gpus else torch.device(kind))
    if gpus:
        torch.cuda.set_device(device)
    store = meet(environ, rank, world_size, CONTROL_TIMEOUT_S)
    cards = _compare_cards(store, rank, world_size, card_of(device))
    backend = "cpu:gloo,cuda:nccl" if are_apart(cards) else "gloo"
    if cards and backend == "gloo" and rank == 0:
        fields = {"ranks": world_size, "cards": len({card.bus for card in cards})}
        _log.warning("ranks share a GPU, so they exchange through gloo, which is slow", extra={"fields": fields})
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=DATA_TIMEOUT_S),
        device_id=device if "nccl" in backend else None,  # a GPU that NCCL cannot use fails here, not at the first step
    )
    over = "cuda" if gpus else "cpu"  # of the one rank on mps nothing is sharded
    mesh = init_device_mesh(over, (world_size,), mesh_dim_names=("shard",))
    # each group costs a thread that wakes a hundred times a second, and a single rank has no partner
    control = cast(dist.ProcessGroup, dist.group.WORLD) if world_size == 1 else _control_group()
    return LocalMesh(rank, world_size, device, mesh, control, cards)


def join_local_mesh(device: torch.device) -> LocalMesh:
    """The ranks of a program that is not ours: as it has set torch.distributed up, else as `init_local_mesh` does.

    `device`: of its parameters. Called by all its ranks. Raises ConfigError where it spans several nodes.
    """
    if not dist.is_initialized():
        return init_local_mesh(gpu=device if device.type == "cuda" else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if (here := int(os.environ.get("LOCAL_WORLD_SIZE") or world_size)) != world_size:
        raise several_machines(world_size, here)
    _stay_on_this_machine()
    control = _control_group()
    mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    local = LocalMesh(rank, world_size, device, mesh, control, lent=[control])
    said = gather_json(_to_json(card_of(device)), local)
    return replace(local, cards=cards_of([_from_json(each) for each in said]))


def _compare_cards(store: Store, rank: int, world_size: int, own: Card | None) -> tuple[Card, ...]:
    """Tell the other ranks this one's card before there is a process group, and learn theirs; as `cards_of`."""
    store.set(f"card/{rank}", _to_json(own))
    return cards_of([_from_json(store.get(f"card/{other}")) for other in range(world_size)])


def _to_json(card: Card | None) -> str:
    return json.dumps(None if card is None else asdict(card))


def _from_json(said: str | bytes) -> Card | None:
    record = json.loads(said)
    return None if record is None else Card(**record)


def _stay_on_this_machine() -> None:
    """Have gloo and NCCL listen on loopback: what the ranks of a node say to one another stays on this machine.

    Left to themselves they listen where the host's name leads. Network cards that the environment names are for groups
    over several machines, which torch has none of here, and may not be there: the groups between nodes choose an
    address of their own.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = _LOOPBACK
    os.environ["NCCL_SOCKET_IFNAME"] = f"={_LOOPBACK}"


def _control_group() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=CONTROL_TIMEOUT_S))  # pyright: ignore[reportUnknownMemberType]
    assert isinstance(group, dist.ProcessGroup)
    return group


def broadcast_json(value: Any, mesh: LocalMesh, *, source: int = 0) -> Any:
    """A rank's value on every rank, as it comes back from JSON: tuples become lists. Other ranks' values are unused."""
    if mesh.world_size == 1:
        return value if isinstance(value, bool) else json.loads(json.dumps(value))
    payload = json.dumps(value).encode() if mesh.rank == source else b""
    length = torch.tensor([len(payload)])
    dist.broadcast(length, group_src=source, group=mesh.control)
    content = torch.empty(int(length), dtype=torch.uint8)
    if mesh.rank == source:
        content.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    dist.broadcast(content, group_src=source, group=mesh.control)
    return json.loads(content.numpy().tobytes())


def gather_json(value: Any, mesh: LocalMesh) -> list[Any]:
    """The values of all ranks on every rank, in their order, as they come back from JSON."""
    return [broadcast_json(value, mesh, source=rank) for rank in range(mesh.world_size)]


def all_ok(flag: bool, mesh: LocalMesh) -> bool:
    """True on every rank when it is true on all of them."""
    return each_ok([flag], mesh)[0]


def each_ok(flags: Sequence[bool], mesh: LocalMesh) -> list[bool]:
    """Combine several flags over the ranks as `all_ok` does one, as many on all ranks."""
    if mesh.world_size == 1:
        return [bool(flag) for flag in flags]
    votes = torch.tensor([int(flag) for flag in flags])
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=mesh.control)  # pyright: ignore[reportUnknownMemberType]
    return [bool(vote) for vote in votes.tolist()]


def max_over_ranks(value: float, mesh: LocalMesh) -> float:
    """The largest of the ranks' numbers, on every rank."""
    if mesh.world_size == 1:
        return value
    most = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=mesh.control)  # pyright: ignore[reportUnknownMemberType]
    return float(most.item())


def add_up(values: torch.Tensor, mesh: LocalMesh) -> None:
    """Add a tensor of the host up over the ranks, in place."""
    if mesh.world_size > 1:
        dist.all_reduce(values, group=mesh.control)  # pyright: ignore[reportUnknownMemberType]


def barrier(mesh: LocalMesh) -> None:
    """Return once every local rank has called this."""
    if mesh.world_size > 1:
        dist.barrier(group=mesh.control)  # pyright: ignore[reportUnknownMemberType]


class Shardable(Protocol):
    """A model as far as sharding it over the ranks is concerned; `model/language_model.py` says what each is."""

    compiles_whole: bool
    casts_inputs: bool
    logits_loss: Callable[..., Any]

    @property
    def blocks(self) -> Sequence[nn.Module]: ...

    @property
    def ends(self) -> Sequence[nn.Module]: ...

    def recompute(self, how: ActivationCheckpointing) -> None: ...


def parallelize(model: nn.Module, train: TrainConfig, mesh: LocalMesh) -> Placement:
    """Shard a `Shardable` over the local ranks in place: each of its blocks, embedding and head by itself.

    Compute runs in `train.dtype`; parameters, their gradients and the reduction are float32. Parameter names do not
    change. A model on the meta device is sharded without memory; then call `make_room` and give it its values.
    One rank in float32 has nothing to shard and nothing to cast: its model stays as it is. Returns what the ranks keep
    between the passes of a step. Raises ConfigError for a model that has no layers where it has to be sharded, and for
    another type than float32 on mps, where FSDP2 does not cast.
    """
    if mesh.device.type == "mps" and train.dtype != "float32":
        raise ConfigError(
            f"train.dtype={train.dtype!r}: this node computes on mps, and there in float32 alone; set train.dtype = "
            '"float32" on it (other nodes may differ), or train.device = "cpu"'
        )
    parts = cast(Shardable, model)
    parts.recompute(train.activation_checkpointing)
    if train.float8 is not None and _serves_all(float8_problem, mesh):
        use_float8(parts.blocks, train.float8)
    if compiles(train, mesh):
        _compile(model)
    params = sum(parameter.numel() for parameter in model.parameters())
    placed = placement(train, params=params, ranks=mesh.world_size, gpu_bytes=mesh.gpu_bytes)
    if mesh.world_size > 1 or train.dtype != "float32":
        require_cuts(model, mesh)
        _shard(model, train, mesh, placed)
    return placed


def require_cuts(model: nn.Module, mesh: LocalMesh) -> None:
    """Raise ConfigError where the ranks cannot each hold a part of a `Shardable`."""
    if mesh.world_size > 1 and not cast(Shardable, model).blocks:
        raise ConfigError(
            f"the model has no nn.ModuleList of layers, so {mesh.world_size} ranks cannot share it out; keep its "
            "layers in one, or start a node of one rank for each GPU"
        )
    for name, parameter in model.named_parameters():
        if not parameter.ndim:
            raise ConfigError(f"parameter {name} is a single number, which ranks cannot share out; give it shape (1,)")


def compiles(train: TrainConfig, mesh: LocalMesh) -> bool:
    """Whether all ranks compile the model: on GPUs where each can, on CPUs where it is asked for. All ranks call it."""
    if mesh.device.type == "cuda":
        return train.compile is not False and _serves_all(triton_problem, mesh)
    return bool(train.compile)


def _serves_all(problem: Callable[[torch.device], str], mesh: LocalMesh) -> bool:
    """Whether no rank's device has a problem: ranks on unequal cards do what the least of them can."""
    serves = not problem(mesh.device)
    return all_ok(serves, mesh) if mesh.device.type == "cuda" else serves


def _compile(model: nn.Module) -> None:
    """Compile each block, and the loss. One graph serves all blocks alike, and all numbers of documents."""
    parts = cast(Shardable, model)
    for block in parts.blocks:  # not the module: FSDP2's hooks stay outside
        block.forward = torch.compile(block.forward, fullgraph=parts.compiles_whole)
    parts.logits_loss = torch.compile(parts.logits_loss, fullgraph=True)
    model.register_forward_pre_hook(_leave_documents_open)


def _leave_documents_open(_model: nn.Module, inputs: tuple[Tensor | None, ...]) -> None:
    if len(inputs) > 1 and inputs[1] is not None:
        torch._dynamo.mark_dynamic(inputs[1], 0)  # pyright: ignore[reportPrivateUsage]


def _shard(model: nn.Module, train: TrainConfig, mesh: LocalMesh, placed: Placement) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # two seconds, see `sharding`

    parts = cast(Shardable, model)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if train.dtype == "bfloat16" else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=parts.casts_inputs,
    )
    shard = partial(fully_shard, mesh=mesh.mesh, mp_policy=policy)
    for block in parts.blocks:
        shard(block, reshard_after_forward=placed.reshard_after_forward)
    if parts.ends:  # else the embedding is used at both ends, and stays with the root
        embedding, head = parts.ends
        shard(embedding, reshard_after_forward=placed.reshard_after_forward)
        shard(head, reshard_after_forward=False)  # its backward pass comes next
    shard(model, reshard_after_forward=False)


def make_room(model: nn.Module, mesh: LocalMesh) -> None:
    """Give what is on the meta device memory on this rank's device; it has no values yet. What is tied stays tied."""
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
    for of_one in places.values():  # `to_empty` asks torch's compiler, seconds to load, how the memory is laid out
        meta = getattr(*of_one[0])
        room = torch.empty(meta.shape, dtype=meta.dtype, device=mesh.device)
        parameter = nn.Parameter(room, requires_grad=meta.requires_grad)
        for module, name in of_one:
            setattr(module, name, parameter)
    buffers: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffers.setdefault(id(buffer), torch.empty_like(buffer, device=mesh.device)))


def set_gradient_sync(model: nn.Module, on: bool) -> None:
    """Whether the next backward passes reduce gradients over the ranks; off for all micro-batches but the last.

    While it is off every rank keeps the whole gradient, in float32. A model that is not sharded always does.
    """
    if is_fsdp(model):
        model.set_requires_gradient_sync(on)


def clip_grad_norm_(model: Parameters, max_norm: float | None, *, also: Tensor | None = None) -> Tensor:
    """Return the global norm of the gradient over all shards; scale the gradient to `max_norm` where it is larger.

    None only measures. A gradient whose norm is not finite is left alone: the caller decides. Shapes: the norm ()
    float32, on the gradient's device, which is not waited for here. `also`: (k,) float32 there, numbers of this
    rank, each of which becomes its sum over the ranks in the same exchange.
    Every local rank calls this; all get the same number.
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


def sum_over_ranks(value: Tensor, mesh: LocalMesh) -> None:
    """Replace a tensor of this rank by its sum over the ranks, on its device, which is not waited for here."""
    if mesh.world_size > 1:
        dist.all_reduce(value, group=mesh.mesh.get_group())  # pyright: ignore[reportUnknownMemberType]
