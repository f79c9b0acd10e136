"""Queries about FSDP2's sharding that do not import it, and matrices gathered from their shards.

FSDP2's modules take as long to import as the rest of torch, and a single rank in float32 does not need them. A DTensor
can only exist if they are already loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeGuard

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, cat, nn
from typing_extensions import TypeIs

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


class Parameters(Protocol):
    """A model, or another collection of named parameters."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter once, always in the same order."""
        ...


@dataclass(frozen=True)
class NamedParameters:
    """Some of a model's parameters, by their names, which are equal on all nodes."""

    named: Mapping[str, nn.Parameter]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and parameters."""
        return iter(self.named.items())

    @property
    def numel(self) -> int:
        """Total number of values, including other ranks' shards."""
        return sum(parameter.numel() for parameter in self.named.values())

    @property
    def device(self) -> torch.device:
        """Device of the first parameter."""
        return next(iter(self.named.values())).device

    @property
    def shapes(self) -> dict[str, str]:
        """Shapes of the parameters, as values that all nodes must share."""
        return {f"parameter {name}": str(tuple(parameter.shape)) for name, parameter in sorted(self.named.items())}


def fingerprint_of(named: Iterable[tuple[str, Tensor]]) -> str:
    """Hash tensors of any type with their names and shapes. If they are sharded, call on all local ranks."""
    seen = xxhash.xxh3_128()
    for name, tensor in sorted(named, key=lambda pair: pair[0]):
        whole = tensor.full_tensor() if is_sharded(tensor) else tensor
        seen.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        seen.update(whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return seen.hexdigest()


def is_sharded(tensor: Tensor) -> TypeIs[DTensor]:
    """Whether a tensor is sharded over the local ranks."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def is_fsdp(module: nn.Module) -> TypeGuard[FSDPModule]:
    """Whether FSDP2 manages a module."""
    loaded = sys.modules.get("torch.distributed.fsdp")
    return loaded is not None and isinstance(module, loaded.FSDPModule)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, sharing its memory; the tensor itself if it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def local_rows(parameter: Tensor) -> slice:
    """Return the contiguous rows of a parameter that this rank holds; FSDP2 splits dim 0 like `torch.chunk`.

    Raises: ValueError for a DTensor that is not sharded along dim 0 of a one-dimensional mesh.
    """
    rows = parameter.shape[0]
    if not is_sharded(parameter):
        return slice(0, rows)
    from torch.distributed.tensor import Shard  # loaded already, as a parameter is sharded

    mesh = parameter.device_mesh
    if mesh.ndim != 1 or parameter.placements != (Shard(0),):
        raise ValueError(
            f"a parameter is placed as {parameter.placements} on a mesh of shape {mesh.shape}, not by rows"
        )
    return chunk_rows(rows, mesh.get_local_rank(), mesh.size())


def chunk_rows(rows: int, rank: int, world_size: int) -> slice:
    """Return the rows of chunk `rank` of `torch.chunk`; the last ranks may hold none."""
    size = -(-rows // world_size)
    return slice(min(rank * size, rows), min((rank + 1) * size, rows))


# -- whole matrices: FSDP2 shards dim 0, so the shards of a matrix are blocks of its rows in rank order --------------


def map_whole(
    shards: Sequence[Tensor], rows: Sequence[int], mesh: DeviceMesh, apply: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Apply a function to whole matrices, at most one per rank; returns this rank's shards of the results.

    `apply` keeps shape and type. Shapes: shards (m_i, n_i), this rank's rows of a matrix with rows[i] rows in total;
    all of one type. Only rank i gathers matrix i, so no work is done twice. Called by all ranks for the same matrices.
    """
    rank, ranks, group = mesh.get_local_rank(), mesh.size(), mesh.get_group()
    assert len(shards) == len(rows) <= ranks, (len(shards), len(rows), ranks)
    is_owner = rank < len(shards)
    sent = [shard.numel() for shard in shards] + [0] * (ranks - len(shards))
    received = [0] * ranks
    if is_owner:
        held = [chunk_rows(rows[rank], other, ranks) for other in range(ranks)]
        received = [shards[rank].shape[1] * (part.stop - part.start) for part in held]
    ours = cat([shard.reshape(-1) for shard in shards])
    whole = ours.new_empty(sum(received))
    dist.all_to_all_single(whole, ours, received, sent, group=group)  # pyright: ignore[reportUnknownMemberType]
    if is_owner:
        whole = apply(whole.view(rows[rank], -1)).reshape(-1)
    dist.all_to_all_single(ours, whole, sent, received, group=group)  # pyright: ignore[reportUnknownMemberType]
    parts = ours.split(sent)
    return [part.view(shard.shape) for part, shard in zip(parts, shards, strict=False)]
