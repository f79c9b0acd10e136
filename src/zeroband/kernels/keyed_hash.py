"""Keyed 64-bit hashes of received contributions, by which an owner later verifies what a member claims to have sent.

The key is private to the owner, and the parts need not be kept. Implemented in `csrc/robust.inl: hash`, which the
engine calls for the shards that a node owns.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zeroband.kernels import native
from zeroband.kernels.robust import PIECE

_STRIPE = 64
_MOST_BYTES = 4 * PIECE
"""Size of a float32 piece."""


def _new_words() -> Tensor:
    return torch.frombuffer(bytearray(os.urandom(_MOST_BYTES + _STRIPE)), dtype=torch.int32)


@dataclass(frozen=True)
class HashKey:
    """A node's private hash key; without it, a collision takes about 2^32 tries."""

    words: Tensor = field(default_factory=_new_words, repr=False)

    def hash(self, data: Tensor, *, variant: int = -1) -> int:
        """Hash (nbytes,) uint8 on CPU, contiguous, at most one piece. `variant`: as for a codec."""
        assert data.numel() <= _MOST_BYTES, "a key hashes a piece"
        return native.load().zb_hash(variant, data.data_ptr(), data.numel(), self.words.data_ptr())


@dataclass(frozen=True)
class PartHashes:
    """Hashes of the parts received for one shard in one reduction."""

    key: HashKey
    start: int
    """First value of the shard."""
    chunk_numel: int
    values: Tensor
    """(members, pieces) int64, written by the native library; pieces do not cross chunks of the shard."""

    @staticmethod
    def of(key: HashKey, members: int, start: int, stop: int, chunk_numel: int) -> PartHashes:
        """Allocate the hashes for the shard [start, stop)."""
        pieces = -(-(stop - start) // chunk_numel) * -(-chunk_numel // PIECE)
        return PartHashes(key, start, chunk_numel, torch.zeros(members, pieces, dtype=torch.int64))

    def is_of(self, member: int, start: int, data: Tensor) -> bool:
        """Return whether a member sent these bytes for the piece that begins at value `start`."""
        chunk, within = divmod(start - self.start, self.chunk_numel)
        piece = chunk * -(-self.chunk_numel // PIECE) + within // PIECE
        return int(self.values[member, piece]) & (1 << 64) - 1 == self.key.hash(data)
