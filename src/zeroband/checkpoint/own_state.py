"""A node's own state in a checkpoint: its inner optimizer and its random states.

The inner optimizer's file holds whole tensors, so that it can be read on any number of local ranks: each copies its
rows. torch's HuggingFaceStorageReader reads it as well.

Saves torch's random states of the local ranks, so that a resumed node draws the same numbers. Nothing else in a trainer
draws random numbers: the order of the data follows from the seed. The initial states follow from the seed as well,
since torch 2.13 starts differently in every process.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zeroband.checkpoint.layout import read_header
from zeroband.checkpoint.manifest import FileHash, StoredFile
from zeroband.errors import CheckpointDamaged
from zeroband.node.mesh import LocalMesh
from zeroband.node.sharding import local_part, local_rows
from zeroband.state.slot import Slot, bytes_of

OWN_FILE = "rank_{rank}.safetensors"
"""File of a local rank's `pack`."""


class OwnState(Protocol):
    """An inner optimizer for checkpoints. Call the methods on all local ranks together."""

    @property
    def moment_names(self) -> tuple[str, ...]:
        """Moments that are saved as flat buffers, to be read on any number of ranks."""
        ...

    def moments(self) -> Mapping[str, Any]:
        """Return this rank's shards of them."""
        ...

    def named_moments(self) -> Mapping[str, Tensor]:
        """Return `MOMENT.PARAMETER`, sharded like the parameters; writing to them sets them."""
        ...

    def counters(self) -> Mapping[str, Any]:
        """Return its progress as JSON."""
        ...

    def pack(self) -> bytes | None:
        """Return this rank's other state as a file, if it has any."""
        ...

    def restore(self, counters: Mapping[str, Any], packed: bytes | None) -> bool:
        """Load the results of `counters` and `pack`, after the moments; returns whether they fit."""
        ...

    def seek(self, step: int) -> None:
        """Move the schedule to this inner step."""
        ...

    def forget_moments(self) -> None:
        """Reset the moments, but not the schedule."""
        ...


def views_of(slots: Sequence[Slot], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return views `buffer.parameter` of all slots of flat buffers, (slot.shape) each."""
    return {
        f"{name}.{slot.name}": buffer[slot.start : slot.start + slot.numel].view(slot.shape)
        for name, buffer in buffers.items()
        for slot in slots
    }


def load_inner(
    tensors: Mapping[str, Tensor],
    open_file: Callable[[], BinaryIO],
    expected: StoredFile,
    on_piece: Callable[[], object] = lambda: None,
) -> None:
    """Fill tensors by name in place, each rank its own rows of those that FSDP2 shards.

    `on_piece`: called after every few megabytes. Raises OSError if the file cannot be read, CheckpointDamaged or
    EOFError if it is not the expected one, lacks a tensor, or has another shape.
    """
    seen = FileHash.like(expected)
    with open_file() as file:
        stored = read_header(file, expected.size, seen)
        shapes = {tensor.name: tensor.shape for tensor in stored}
        for name, target in tensors.items():
            if shapes.get(name) != tuple(target.shape):
                there = "it lacks" if name not in shapes else f"it has shape {list(shapes[name])} of"
                raise CheckpointDamaged(f"it does not fit: {there} {name} {list(target.shape)}")
        buffer = torch.empty(max((tensor.size for tensor in stored), default=0) // 4)
        for tensor in stored:
            whole = buffer[: tensor.size // 4]
            seen.read(file, bytes_of(whole), on_piece)
            if tensor.name in tensors:
                _copy_own_rows(whole.view(tensor.shape), tensors[tensor.name])
        if file.read(1):
            raise CheckpointDamaged(f"it has more than {expected.size} bytes")
    seen.require(expected)


def _copy_own_rows(whole: Tensor, target: Tensor) -> None:
    rows, shard = whole[local_rows(target)] if whole.ndim else whole, local_part(target).detach()
    if rows.numel():
        shard.copy_(rows.to(shard.device))  # moments in int8 round on their device


def seed_random_state(seed: int, node_id: str, local_rank: int) -> None:
    """Seed this rank's random numbers, different from other ranks' and reproducible for a seed."""
    digest = hashlib.blake2b(f"draws/{seed}/{node_id}/{local_rank}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)


def gather_random_states(local: LocalMesh) -> list[str]:
    """Return the random states of all local ranks in order. Called by all local ranks."""
    own = torch.cat(_states(local.device))
    states = [torch.empty_like(own) for _ in range(local.world_size)]
    dist.all_gather(states, own, group=local.control)
    return [base64.b64encode(state.numpy().tobytes()).decode() for state in states]


def set_random_state(states: list[str], local: LocalMesh) -> bool:
    """Set this rank's gathered state; returns whether ranks and devices match."""
    if len(states) != local.world_size:
        return False
    state = torch.frombuffer(bytearray(base64.b64decode(states[local.rank])), dtype=torch.uint8)
    lengths = [part.numel() for part in _states(local.device)]
    if sum(lengths) != state.numel():
        return False
    cpu, *gpu = state.split(lengths)
    torch.set_rng_state(cpu)
    if gpu:
        torch.cuda.set_rng_state(gpu[0], local.device)
    return True


def _states(device: torch.device) -> list[Tensor]:
    """Return the random states, each (n,) uint8 on CPU."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
