"""A node's own state in a checkpoint: its inner optimizer and its random states.

Saves torch's random states of the local ranks, so that a resumed node draws the same numbers. Nothing else in a trainer
draws random numbers: the order of the data follows from the seed. The initial states follow from the seed as well,
since torch 2.13 starts differently in every process.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zeroband.node.mesh import LocalMesh

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
