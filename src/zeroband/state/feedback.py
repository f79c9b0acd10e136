"""Error feedback: the encoding loss of a node's contribution is added to its next one.

For codecs with `needs_feedback`. The node contributes u_t + e_t, where e_(t+1) is the loss of its encodings in round t:
values that are too small for one round add up until they are not.
Source: Seide et al., 1-bit stochastic gradient descent, 2014; Karimireddy et al., arXiv:1901.09847.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from zeroband.kernels.codec import Codec
from zeroband.state.flat import ShardMap, SharedBuffers

_RESIDUAL = "residual"


class ErrorFeedback:
    """The node's residual, a buffer in shared memory, if the codec needs one.

    A round adds it to the contribution. Then each transfer attempt overwrites it, so it ends as the loss of the
    committed attempt. It is unchanged if this node has no weight.
    `shards`: this rank's parameters within contributions. `codec`: encodes them.
    """

    def __init__(self, buffers: SharedBuffers, shards: ShardMap, codec: Codec) -> None:
        self.shards = shards
        self.codec = codec
        self.residual: Tensor | None = None
        """(n,) float32; None without feedback."""
        if codec.needs_feedback:
            buffers.open(_RESIDUAL)
            self.residual = buffers[_RESIDUAL]

    def add_to(self, contribution: Tensor, names: Collection[str]) -> None:
        """Add the residual to this rank's shards of a new contribution, (n,) float32. Call once per contribution."""
        if self.residual is None:
            return
        taken = dict(self.shards.parts(self.residual, names))
        for name, part in self.shards.parts(contribution, names):
            part.add_(taken[name])

    def keep(self, part: float, names: Collection[str]) -> None:
        """Keep a fraction of the residual after a contribution that no round counts.

        The rest went back into the node's update together with the contribution.
        """
        if self.residual is None:
            return
        for _, values in self.shards.parts(self.residual, names):
            values.mul_(part)

    def forget(self) -> None:
        """Zero the residual: after a join, restart or rollback, earlier contributions are not part of the run."""
        if self.residual is not None:
            self.residual.zero_()
