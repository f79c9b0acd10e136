"""Error feedback: unsent values stay in a memory, and values whose payload is lost return to it.

DeMo's decoupled momentum and SparseLoCo's error buffer are the same rule with different inputs:
    memory <- decay * memory + scale * input;  send C(memory);  memory <- memory - share * C(memory)
Local to a node: other nodes never see the memory, and it need not be equal to theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zeroband.outer.sparse.sparse_codec import EncodedPayload, Part, SparseCodec

_CHUNK = 1 << 20
"""Elements handled at a time, so that the temporary stays in the cache."""


class SparseResidual:
    """The rule of one memory. `memory` is a flat float32 buffer of the codec's layout; ranks of a node share it.

    `decay`: factor on the memory in each round (beta). `share`: fraction of the sent values that leaves the memory
    (alpha); 1: all.
    """

    def __init__(self, codec: SparseCodec, *, decay: float, share: float = 1.0) -> None:
        self.codec = codec
        self._decay = decay
        self._share = share

    def accumulate(self, memory: Tensor, values: Tensor, *, scale: float = 1.0) -> None:
        """Add a gradient or pseudo-gradient, in place. Takes any equal slices of both, on one device.

        One rounding for each operation, so the bits do not depend on how ranks divide the buffer.
        """
        for part, new in zip(memory.split(_CHUNK), values.split(_CHUNK), strict=True):
            part.mul_(self._decay).add_(new.mul(scale))

    def extract(
        self, memory: Tensor, *, out: Tensor | None = None, rank: int = 0, world_size: int = 1
    ) -> EncodedPayload:
        """Pack this rank's share of the memory and take it out. Raises ValueError if the memory is not finite.

        Call after all ranks have accumulated. `out`, `rank`, `world_size`: as in `SparseCodec.encode`.
        """
        encoded = self.codec.encode(memory, out=out, rank=rank, world_size=world_size)
        self.codec.add(memory, encoded.taken, -self._share)
        return encoded

    def pack(self, memory: Tensor, *, out: Tensor, rank: int, world_size: int) -> tuple[Part, ...]:
        """Like `extract`, into the node's payload; returns the parts taken."""
        return self.extract(memory, out=out, rank=rank, world_size=world_size).taken

    def restore(self, memory: Tensor, taken: Sequence[Part], *, rounds: int = 0) -> None:
        """Put back the values of a payload that is in no committed round.

        `rounds`: calls of `accumulate` since: the values decay as they would have in the memory. Psyche's trainer
        subtracts them whether or not its contribution arrived, and so loses them.
        """
        self.codec.add(memory, taken, self._share * self._decay**rounds)
