"""A memory that never leaves its node: DeMo's momentum, SparseLoCo's error buffer. Others see what is packed of it.

The local ranks share it as a flat buffer: each adds to its rows, then each packs its share of the chunks. What a
payload took out is kept until the payload counts; where it never does, it goes back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from zeroband.elastic.rounds.interfaces import OuterParts
from zeroband.kernels.scan import all_finite
from zeroband.node.mesh import all_ok, barrier


class MemoryRule(Protocol):
    """How a memory takes in what a node learned, and gives out payloads. `SparseResidual` is one."""

    def accumulate(self, memory: Tensor, values: Tensor, *, scale: float = 1.0) -> None:
        """Add values to the same slice of the memory, in place."""
        ...

    def pack(self, memory: Tensor, *, out: Tensor, rank: int, world_size: int) -> Any:
        """Write this rank's share of a payload, and take that out of the memory; what was taken."""
        ...

    def restore(self, memory: Tensor, taken: Any) -> None:
        """Put back what `pack` took."""
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
        """What `pack` took out for a payload that may still count; None: nothing."""

    def accumulate(self, shards: Mapping[str, Tensor], *, scale: float = 1.0) -> bool:
        """Add this rank's shards of a gradient or pseudo-gradient.

        False on all local ranks where a value became too large for float32; then the memory begins anew.
        """
        is_finite = True
        for name, part in self._shards.parts(self.buffer, shards):
            self._rules[0].accumulate(part, shards[name].detach().to("cpu").reshape(-1), scale=scale)
            is_finite &= all_finite(part)
        if all_ok(is_finite, self._local):  # also: all ranks have added theirs
            return True
        self.forget()
        return False

    def pack(self, fragment_index: int, payload: Tensor) -> None:
        """Take the largest of a fragment out into the node's payload, (nbytes,) uint8, after `accumulate`."""
        rank, world_size, self._fragment_index = self._local.rank, self._local.world_size, fragment_index
        self._taken = self._rules[fragment_index].pack(self.buffer, out=payload, rank=rank, world_size=world_size)
        barrier(self._local)

    def settle(self) -> None:
        """The payload counts: what it took out is with the others."""
        self._taken = None

    def restore(self) -> None:
        """The payload will never count: what it took out goes back."""
        if self._taken is not None:
            self._rules[self._fragment_index].restore(self.buffer, self._taken)
        self._taken = None
        barrier(self._local)

    def forget(self) -> None:
        """Begin anew."""
        self._taken = None
        barrier(self._local)
        if self._local.rank == 0:
            self.buffer.zero_()
        barrier(self._local)
