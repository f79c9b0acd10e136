"""A memory local to its node: DeMo's momentum, SparseLoCo's error buffer. Other nodes see only payloads made from it.

The local ranks share it as a flat buffer: each adds to its rows, then packs its share of the chunks. Values that a
payload took out are kept until it counts; if it never does, they are put back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from zeroband.elastic.rounds.interfaces import OuterParts
from zeroband.kernels.scan import all_finite
from zeroband.node.async_copy import host_copies
from zeroband.node.mesh import all_ok, barrier


class MemoryRule(Protocol):
    """How gradients are accumulated in a memory and payloads taken out of it, for example `SparseResidual`."""

    def accumulate(self, memory: Tensor, values: Tensor, *, scale: float = 1.0) -> None:
        """Add values to the same slice of the memory, in place."""
        ...

    def pack(self, memory: Tensor, *, out: Tensor, rank: int, world_size: int) -> Any:
        """Write this rank's share of a payload and take it out of the memory; returns the values taken."""
        ...

    def restore(self, memory: Tensor, taken: Any) -> None:
        """Put back the values that `pack` took."""
        ...


class LocalMemory:
    """One memory. Every method is called by all local ranks. `rules`: one for each fragment of the model."""

    def __init__(self, parts: OuterParts, name: str, rules: Sequence[MemoryRule]) -> None:
        parts.buffers.open(name)
        self.buffer = parts.buffers[name]
        """(n,) float32, shared by the local ranks."""
        self._local = parts.mesh.local
        self._shards = parts.shards
        self._rules = rules
        self._fragment_index = 0
        """The fragment that was packed last."""
        self._taken: Any = None
        """Values that `pack` took for a payload that may still count; None: none."""

    def accumulate(self, shards: Mapping[str, Tensor], *, scale: float = 1.0) -> bool:
        """Add this rank's shards of a gradient or pseudo-gradient.

        False on all local ranks if a value became too large for float32; the memory is then zeroed.
        """
        is_finite = True
        own = dict(self._shards.parts(self.buffer, shards))
        for part, values in zip(own.values(), host_copies(shards[name] for name in own), strict=True):
            self._rules[0].accumulate(part, values.reshape(-1), scale=scale)
            is_finite &= all_finite(part)
        if all_ok(is_finite, self._local):  # also: all ranks have added theirs
            return True
        self.forget()
        return False

    def pack(self, fragment_index: int, payload: Tensor) -> None:
        """Move a fragment's largest values into the node's payload, (nbytes,) uint8, after `accumulate`."""
        rank, world_size, self._fragment_index = self._local.rank, self._local.world_size, fragment_index
        self._taken = self._rules[fragment_index].pack(self.buffer, out=payload, rank=rank, world_size=world_size)
        barrier(self._local)

    def settle(self) -> None:
        """Drop the taken values: the payload counts."""
        self._taken = None

    def restore(self) -> None:
        """Put the taken values back: the payload will never count."""
        if self._taken is not None:
            self._rules[self._fragment_index].restore(self.buffer, self._taken)
        self._taken = None
        barrier(self._local)

    def forget(self) -> None:
        """Zero the memory."""
        self._taken = None
        barrier(self._local)
        if self._local.rank == 0:
            self.buffer.zero_()
        barrier(self._local)
