"""What a node saves besides the sections of the state: its inner optimizer, and its random states.

Torch's random states of the local ranks are saved, so that a resumed node draws the numbers that it would have drawn.
Nothing else in a trainer draws numbers that training depends on: the order of the data is a function of the seed. They
begin with a function of the seed, too: torch 2.13 begins with another state in every process.
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
"""What `pack` gave on a local rank."""


class OwnState(Protocol):
    """An inner optimizer as its checkpoints see it. All local ranks call the methods together."""

    @property
    def moment_names(self) -> tuple[str, ...]:
        """Moments that are saved as flat buffers, on whatever number of ranks they are read again."""
        ...

    def moments(self) -> Mapping[str, Any]:
        """This rank's shards of them."""
        ...

    def named_moments(self) -> Mapping[str, Tensor]:
        """`MOMENT.PARAMETER`, sharded as the parameters; writing into them sets them."""
        ...

    def counters(self) -> Mapping[str, Any]:
        """How far it is; JSON."""
        ...

    def pack(self) -> bytes | None:
        """What else this rank has, as a file; None: nothing."""
        ...

    def restore(self, counters: Mapping[str, Any], packed: bytes | None) -> bool:
        """Take over what `counters` and `pack` gave, after the moments were; whether it fits."""
        ...

    def seek(self, step: int) -> None:
        """Go on with the schedule at this inner step."""
        ...

    def forget_moments(self) -> None:
        """Start the moments anew, at the same place of the schedule."""
        ...


def seed_random_state(seed: int, node_id: str, local_rank: int) -> None:
    """Have this rank draw other numbers than the others, the same ones in every run of this seed."""
    digest = hashlib.blake2b(f"draws/{seed}/{node_id}/{local_rank}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)


def gather_random_states(local: LocalMesh) -> list[str]:
    """The state of each local rank, in their order, on all of them. Called by all local ranks."""
    own = torch.cat(_states(local.device))
    states = [torch.empty_like(own) for _ in range(local.world_size)]
    dist.all_gather(states, own, group=local.control)
    return [base64.b64encode(state.numpy().tobytes()).decode() for state in states]


def set_random_state(states: list[str], local: LocalMesh) -> bool:
    """Take this rank's state of those that were gathered; whether it fits the ranks and the devices of then."""
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
    """Each (n,) uint8 on CPU."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
