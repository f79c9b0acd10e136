"""What an owner remembers of the parts that it was sent: 64 bits of each piece, by a key that it alone knows.

With these it can tell later whether a member shows what it sent, without keeping the parts. The C++ is
`csrc/robust.inl: hash`; the engine calls it for the shards that a node owns.
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
"""The size of a piece in float32."""


def _new_words() -> Tensor:
    return torch.frombuffer(bytearray(os.urandom(_MOST_BYTES + _STRIPE)), dtype=torch.int32)


@dataclass(frozen=True)
class HashKey:
    """A node's own key for hashes: who does not know it finds other bytes with one hash once in 2^32 tries."""

    words: Tensor = field(default_factory=_new_words, repr=False)

    def hash(self, data: Tensor, *, variant: int = -1) -> int:
        """The hash of bytes: (nbytes,) uint8 on CPU, contiguous, a piece at most. `variant`: as for a codec."""
        assert data.numel() <= _MOST_BYTES, "a key hashes a piece"
        return native.load().zb_hash(variant, data.data_ptr(), data.numel(), self.words.data_ptr())


@dataclass(frozen=True)
class PartHashes:
    """Hashes of the parts that came for one shard in one reduction."""

    key: HashKey
    start: int
    """Where the shard begins in the reduction."""
    chunk_numel: int
    values: Tensor
    """(members, pieces) int64, written by the native library; a piece never spans two chunks of the shard."""

    @staticmethod
    def of(key: HashKey, members: int, start: int, stop: int, chunk_numel: int) -> PartHashes:
        """Zeros, for the parts of `members` members for the shard [start, stop)."""
        pieces = -(-(stop - start) // chunk_numel) * -(-chunk_numel // PIECE)
        return PartHashes(key, start, chunk_numel, torch.zeros(members, pieces, dtype=torch.int64))

    def is_of(self, member: int, start: int, data: Tensor) -> bool:
        """Whether the member at this place sent these bytes for the piece that begins at `start` of the reduction."""
        chunk, within = divmod(start - self.start, self.chunk_numel)
        place = chunk * -(-self.chunk_numel // PIECE) + within // PIECE
        return int(self.values[member, place]) & (1 << 64) - 1 == self.key.hash(data)
