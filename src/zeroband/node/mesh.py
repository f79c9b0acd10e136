"""The ranks of a node: their device mesh, sharding by FSDP2, and small collectives for common decisions.

Owns torch.distributed's default group, which never spans two nodes. Main thread of every rank.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
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
from zeroband.node.gpus import Card, card_of, cards_of, have_own_gpus, smallest_share
from zeroband.node.launched import machines, rank_and_world_size, several_machines
from zeroband.node.rank_store import rendezvous
from zeroband.node.sharding import Parameters, is_fsdp, is_sharded, local_part
from zeroband.observe.log import get_logger

CONTROL_TIMEOUT_S = 7 * 24 * 3600.0
"""Timeout of the control group, where ranks wait while rank 0 waits for other nodes. Above rank 0's longest wait, which
has its own bound."""

DATA_TIMEOUT_S = 600.0
"""Timeout of training collectives, in which no rank waits for other nodes: they meet in the control group before.

A first step compiles for minutes, and rank 0 writes files between steps. After the timeout NCCL's watchdog aborts the
process (torch's default, TORCH_NCCL_ASYNC_ERROR_HANDLING=3), gloo raises, and the launcher ends the other ranks."""

_log = get_logger(__name__)

_SIOCGIFADDR = 0x8915
"""Linux's request for an interface's address."""

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True)
class LocalMesh:
    """The ranks of this node. `close()` ends the process groups that were created here."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    """One dimension, over which parameters are sharded."""
    control: dist.ProcessGroup
    """gloo group on CPU tensors for decisions, separate from training data."""
    cards: tuple[Card, ...] = ()
    """The GPU of each rank; ranks may share one. Empty on CPUs."""
    own_groups: list[dist.ProcessGroup] | None = field(default=None, repr=False)
    """The groups created here if the default group is the user's program's; None if this process created that."""
    machines: int = 1
    """Machines of this node, with equally many ranks each. The outer state is in the memory of the first one."""

    @property
    def ranks_here(self) -> int:
        """Ranks on this machine."""
        return self.world_size // self.machines

    @property
    def local_rank(self) -> int:
        """This rank's number among the ranks on this machine."""
        return self.rank % self.ranks_here

    @property
    def has_state(self) -> bool:
        """Whether this rank is on the machine with the outer state."""
        return self.rank < self.ranks_here

    @property
    def remote_ranks(self) -> range:
        """The ranks on the other machines than the first."""
        return range(self.ranks_here, self.world_size)

    def part_of(self, numel: int) -> tuple[int, int]:
        """This rank's part [start, stop) of work on the outer state; empty on the other machines than the first."""
        if not self.has_state:
            return 0, 0
        return numel * self.rank // self.ranks_here, numel * (self.rank + 1) // self.ranks_here

    @property
    def gpu_bytes(self) -> int | None:
        """The smallest GPU share of a rank, equal on all ranks; None on CPUs."""
        return smallest_share(self.cards)

    def twin(self) -> LocalMesh:
        """Return the same ranks with another control group, for another thread. Called by all ranks together."""
        if self.world_size == 1:
            return self
        twin = replace(self, control=_control_group())
        if self.own_groups is not None:
            self.own_groups.append(twin.control)
        return twin

    def close(self) -> None:
        """End the process groups that were created here.

        A group that is open at the end of the process may still have a thread, which then can abort the process.
        """
        if not dist.is_initialized():
            return
        if self.own_groups is None:
            dist.destroy_process_group()
            return
        while self.own_groups:
            dist.destroy_process_group(self.own_groups.pop())


def device_kind(wanted: DeviceKind | None) -> DeviceKind:
    """Return the device kind to compute on: that of `train.device`, or the best available.

    Raises ConfigError if this machine, or torch on it, has no such device.
    """
    kinds: list[DeviceKind] = ["cpu"]
    if torch.backends.mps.is_available():
        kinds.insert(0, "mps")
    if torch.cuda.device_count():
        kinds.insert(0, "cuda")
    if wanted is not None and wanted not in kinds:
        raise ConfigError(
            f"train.device={wanted!r}: torch {torch.__version__} finds none on this machine, but {', '.join(kinds)}; "
            "remove it to use the first of them"
        )
    return wanted or kinds[0]


def widest_float(device: torch.device) -> torch.dtype:
    """Return the widest float type of a device, for values that are rounded once: Apple's GPUs have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def init_local_mesh(
    environ: Mapping[str, str] | None = None, *, gpu: torch.device | None = None, kind: DeviceKind | None = None
) -> LocalMesh:
    """Join the node's ranks according to torchrun's environment; without one this process is the only rank.

    Each rank uses `gpu`, or else a device of `device_kind(kind)`: the GPU of its number, shared if there are fewer GPUs
    than ranks. NCCL refuses two ranks on one GPU, so ranks that share GPUs use gloo, as on CPUs, with a warning.
    Raises ConfigError if torchrun spans several nodes (nodes are joined by [outer]), if its variables are inconsistent,
    if ranks are missing, without such a device, for several ranks on mps, and if only some ranks see a GPU.
    """
    environ = os.environ if environ is None else environ
    rank, world_size = rank_and_world_size(environ)
    if (count := machines(environ)) > 1:
        _listen_towards(environ["MASTER_ADDR"])
    else:
        _stay_on_this_machine()
    kind = "cuda" if gpu is not None else device_kind(kind)
    gpus = torch.cuda.device_count() if kind == "cuda" else 0
    if kind == "mps" and world_size > 1:
        raise ConfigError(
            f"train.device='mps': {world_size} ranks cannot share parameters on it; start one rank, or set "
            'train.device = "cpu"'
        )
    number = rank % (world_size // count)
    device = gpu or (torch.device("cuda", number % gpus) if gpus else torch.device(kind))
    if gpus:
        torch.cuda.set_device(device)
    store = rendezvous(environ, rank, world_size, CONTROL_TIMEOUT_S)
    card = card_of(device)
    if card is not None and count > 1:
        card = replace(card, bus=f"{rank // (world_size // count)}/{card.bus}")  # unique in the node
    cards = _compare_cards(store, rank, world_size, card)
    backend = "cpu:gloo,cuda:nccl" if have_own_gpus(cards) else "gloo"
    if cards and backend == "gloo" and rank == 0:
        fields = {"ranks": world_size, "cards": len({card.bus for card in cards})}
        _log.warning("ranks share a GPU, so they exchange through gloo, which is slow", extra={"fields": fields})
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=DATA_TIMEOUT_S),
        device_id=device if "nccl" in backend else None,  # an unusable GPU fails here, not at the first step
    )
    over = "cuda" if gpus else "cpu"  # mps has a single rank, so nothing is sharded
    mesh = init_device_mesh(over, (world_size,), mesh_dim_names=("shard",))
    # each group costs a thread that wakes a hundred times a second, and a single rank needs none
    control = cast(dist.ProcessGroup, dist.group.WORLD) if world_size == 1 else _control_group()
    return LocalMesh(rank, world_size, device, mesh, control, cards, machines=count)


def join_local_mesh(device: torch.device) -> LocalMesh:
    """Use the ranks of the user's program: its torch.distributed if it is set up, else as `init_local_mesh`.

    `device`: of its parameters. Called by all its ranks. Raises ConfigError if it spans several nodes.
    """
    if not dist.is_initialized():
        return init_local_mesh(gpu=device if device.type == "cuda" else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if (here := int(os.environ.get("LOCAL_WORLD_SIZE") or world_size)) != world_size:
        raise several_machines(world_size, here)
    _stay_on_this_machine()
    control = _control_group()
    mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    local = LocalMesh(rank, world_size, device, mesh, control, own_groups=[control])
    said = gather_json(_to_json(card_of(device)), local)
    return replace(local, cards=cards_of([_from_json(each) for each in said]))


def _compare_cards(store: Store, rank: int, world_size: int, own: Card | None) -> tuple[Card, ...]:
    """Exchange the ranks' cards before there is a process group; returns what `cards_of` does."""
    store.set(f"card/{rank}", _to_json(own))
    return cards_of([_from_json(store.get(f"card/{other}")) for other in range(world_size)])


def _to_json(card: Card | None) -> str:
    return json.dumps(None if card is None else asdict(card))


def _from_json(said: str | bytes) -> Card | None:
    record = json.loads(said)
    return None if record is None else Card(**record)


def _stay_on_this_machine() -> None:
    """Make gloo and NCCL listen on loopback: traffic between the ranks of a node stays on the machine.

    By default they listen on the address of the host's name. Interfaces named in the environment are meant for groups
    over several machines and may be missing; the groups between nodes choose their own address.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = _LOOPBACK
    os.environ["NCCL_SOCKET_IFNAME"] = f"={_LOOPBACK}"


def _listen_towards(host: str) -> None:
    """Make gloo and NCCL listen on the interface towards the first machine of this node, unless the user names one."""
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = interface_towards(host)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={os.environ['GLOO_SOCKET_IFNAME']}")


def interface_towards(host: str) -> str:
    """Return the network interface by which this machine reaches a host. Raises ConfigError if none does."""
    try:
        family, *_, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing
            own = probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(f"--master-addr {host}: this machine does not reach it ({error.strerror})") from error
    found = next((name for _, name in socket.if_nameindex() if _address_of(name) == own), None)
    if found is None:
        raise ConfigError(
            f"--master-addr {host}: no interface of this machine has the IPv4 address {own}; name one in "
            "GLOO_SOCKET_IFNAME"
        )
    return found


def _address_of(interface: str) -> str | None:
    """Return an interface's IPv4 address; None without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, contextlib.suppress(OSError):
        answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None


def _control_group() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=CONTROL_TIMEOUT_S))  # pyright: ignore[reportUnknownMemberType]
    assert isinstance(group, dist.ProcessGroup)
    return group


def broadcast_json(value: Any, mesh: LocalMesh, *, source: int = 0) -> Any:
    """Return a rank's value on every rank, converted through JSON: tuples become lists. Others' values are ignored."""
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
    """Return the values of all ranks in rank order on every rank, converted through JSON."""
    return [broadcast_json(value, mesh, source=rank) for rank in range(mesh.world_size)]


def all_ok(flag: bool, mesh: LocalMesh) -> bool:
    """Whether the flag is true on all ranks; every rank gets the answer."""
    return each_ok([flag], mesh)[0]


def each_ok(flags: Sequence[bool], mesh: LocalMesh) -> list[bool]:
    """Combine several flags as `all_ok` does one. All ranks pass the same number."""
    if mesh.world_size == 1:
        return [bool(flag) for flag in flags]
    votes = torch.tensor([int(flag) for flag in flags])
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=mesh.control)  # pyright: ignore[reportUnknownMemberType]
    return [bool(vote) for vote in votes.tolist()]


def max_over_ranks(value: float, mesh: LocalMesh) -> float:
    """Return the largest of the ranks' numbers on every rank."""
    if mesh.world_size == 1:
        return value
    most = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=mesh.control)  # pyright: ignore[reportUnknownMemberType]
    return float(most.item())


def sum_on_host(values: torch.Tensor, mesh: LocalMesh) -> None:
    """Sum a CPU tensor over the ranks in place."""
    if mesh.world_size > 1:
        dist.all_reduce(values, group=mesh.control)  # pyright: ignore[reportUnknownMemberType]


def barrier(mesh: LocalMesh) -> None:
    """Wait until every local rank has called this."""
    if mesh.world_size > 1:
        dist.barrier(group=mesh.control)  # pyright: ignore[reportUnknownMemberType]


class Shardable(Protocol):
    """What `parallelize` needs of a model; `model/language_model.py` describes it."""

    compiles_whole: bool
    casts_inputs: bool
    logits_loss: Callable[..., Any]

    @property
    def blocks(self) -> Sequence[nn.Module]: ...

    @property
    def ends(self) -> Sequence[nn.Module]: ...

    def recompute(self, how: ActivationCheckpointing) -> None: ...


def parallelize(model: nn.Module, train: TrainConfig, mesh: LocalMesh) -> Placement:
    """Shard a `Shardable` over the local ranks in place: each block, the embedding and the head separately.

    Compute runs in `train.dtype`; parameters and gradients are float32, and so are sums over the ranks unless
    `train.reduce_dtype` says otherwise. Parameter names do not change. A
    model on the meta device is sharded without memory; call `allocate` afterwards and initialise it. A single rank in
    float32 leaves the model unchanged. Returns what the ranks keep between the passes of a step. Raises ConfigError for
    a model without layers that must be sharded, and for another dtype than float32 on mps, where FSDP2 does not cast.
    """
    if mesh.device.type == "mps" and train.dtype != "float32":
        raise ConfigError(
            f"train.dtype={train.dtype!r}: mps supports float32 only; set train.dtype = "
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
    """Raise ConfigError if the ranks cannot each hold a part of a `Shardable`."""
    if mesh.world_size > 1 and not cast(Shardable, model).blocks:
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


def _compile(model: nn.Module) -> None:
    """Compile each block, and the loss. One graph serves all blocks, and any number of documents."""
    parts = cast(Shardable, model)
    for block in parts.blocks:  # compile the forward, not the module: FSDP2's hooks stay outside
        block.forward = torch.compile(block.forward, fullgraph=parts.compiles_whole)
    parts.logits_loss = torch.compile(parts.logits_loss, fullgraph=True)
    model.register_forward_pre_hook(_mark_documents_dynamic)


def _mark_documents_dynamic(_model: nn.Module, inputs: tuple[Tensor | None, ...]) -> None:
    if len(inputs) > 1 and inputs[1] is not None:
        torch._dynamo.mark_dynamic(inputs[1], 0)  # pyright: ignore[reportPrivateUsage]


def _shard(model: nn.Module, train: TrainConfig, mesh: LocalMesh, placed: Placement) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # takes two seconds to import, see `sharding`

    parts = cast(Shardable, model)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if train.dtype == "bfloat16" else None,
        reduce_dtype=torch.bfloat16 if train.reduce_dtype == "bfloat16" else torch.float32,
        cast_forward_inputs=parts.casts_inputs,
    )
    shard = partial(fully_shard, mesh=mesh.mesh, mp_policy=policy)
    for block in parts.blocks:
        shard(block, reshard_after_forward=placed.reshard_after_forward)
    if parts.ends:  # otherwise the embedding is tied to the head, and stays with the root
        embedding, head = parts.ends
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


def sum_over_ranks(value: Tensor, mesh: LocalMesh) -> None:
    """Sum a tensor over the ranks in place, on its device, without waiting for it."""
    if mesh.world_size > 1:
        dist.all_reduce(value, group=mesh.mesh.get_group())  # pyright: ignore[reportUnknownMemberType]
