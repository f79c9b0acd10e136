"""Which tensors and modules FSDP2 has sharded, asked without loading it.

Its modules take as long to import as the rest of torch (sympy is among what they load), and a node of one rank in
float32 does without them: a DTensor can only be there where they are loaded already.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeGuard

import torch
import xxhash
from torch import Tensor, nn
from typing_extensions import TypeIs

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


class Parameters(Protocol):
    """A model, or whatever else names parameters."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter once, always in the same order."""
        ...


@dataclass(frozen=True)
class NamedParameters:
    """Some of a model's parameters, by the names under which all nodes know them."""

    named: Mapping[str, nn.Parameter]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and parameters, as a model does."""
        return iter(self.named.items())

    @property
    def numel(self) -> int:
        """Number of values in all of them, shards of other ranks included."""
        return sum(parameter.numel() for parameter in self.named.values())

    @property
    def device(self) -> torch.device:
        """Device of the first of them."""
        return next(iter(self.named.values())).device

    @property
    def shapes(self) -> dict[str, str]:
        """What nodes that do not share a model are told: each parameter with its shape."""
        return {f"parameter {name}": str(tuple(parameter.shape)) for name, parameter in sorted(self.named.items())}


def fingerprint_of(named: Iterable[tuple[str, Tensor]]) -> str:
    """One value for tensors of any type, their names and shapes. Called by all local ranks where they are sharded."""
    seen = xxhash.xxh3_128()
    for name, tensor in sorted(named, key=lambda pair: pair[0]):
        whole = tensor.full_tensor() if is_sharded(tensor) else tensor
        seen.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        seen.update(whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return seen.hexdigest()


def is_sharded(tensor: Tensor) -> TypeIs[DTensor]:
    """Whether a tensor is cut over the ranks of this node."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def is_fsdp(module: nn.Module) -> TypeGuard[FSDPModule]:
    """Whether FSDP2 gathers the parameters of a module and reduces their gradients."""
    loaded = sys.modules.get("torch.distributed.fsdp")
    return loaded is not None and isinstance(module, loaded.FSDPModule)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, sharing its memory; all of it where it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor
