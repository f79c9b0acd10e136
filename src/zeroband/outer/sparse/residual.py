"""Error feedback: what is not sent stays, and what is sent and gets lost comes back.

DeMo's decoupled momentum and SparseLoCo's error buffer are the same thing, fed with other inputs:
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

    `decay`: what is left of the memory after a round (beta). `share`: what part of what is sent leaves the memory
    (alpha): 1 all of it.
    """

    def __init__(self, codec: SparseCodec, *, decay: float, share: float = 1.0) -> None:
        self.codec = codec
        self._decay = decay
        self._share = share

    def accumulate(self, memory: Tensor, values: Tensor, *, scale: float = 1.0) -> None:
        """Add a gradient or pseudo-gradient; in place. Any slices of both at the same place, on one device.

        One rounding for each operation, so that the bits do not depend on how ranks cut the buffer.
        """
        for part, new in zip(memory.split(_CHUNK), values.split(_CHUNK), strict=True):
            part.mul_(self._decay).add_(new.mul(scale))

    def extract(
        self, memory: Tensor, *, out: Tensor | None = None, rank: int = 0, world_size: int = 1
    ) -> EncodedPayload:
        """Pack this rank's share of the memory and take it out. Raises ValueError where the memory is not finite.

        All ranks have accumulated before; `out`, `rank` and `world_size` are those of `SparseCodec.encode`.
        """
        encoded = self.codec.encode(memory, out=out, rank=rank, world_size=world_size)
        self.codec.add(memory, encoded.taken, -self._share)
        return encoded

    def pack(self, memory: Tensor, *, out: Tensor, rank: int, world_size: int) -> tuple[Part, ...]:
        """As `extract`, into the node's payload; what was taken."""
        return self.extract(memory, out=out, rank=rank, world_size=world_size).taken

    def restore(self, memory: Tensor, taken: Sequence[Part], *, rounds: int = 0) -> None:
        """Put back what a payload took out that did not make it into a committed round.

        `rounds`: how many times `accumulate` ran since: the mass decays as it would have done inside. Psyche's trainer
        subtracts whether or not its contribution arrived and so loses that mass.
        """
        self.codec.add(memory, taken, self._share * self._decay**rounds)
