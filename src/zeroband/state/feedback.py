"""Error feedback: what encoding took from a node's contribution to a round goes into its next one.

For codecs that say so. u_t + e_t is contributed, e_(t+1) is what the encodings of this node took from the mean of that
round, so nothing is lost for good: what is too small for a round adds up until it is not.
Source: Seide et al., 1-bit stochastic gradient descent, 2014; Karimireddy et al., arXiv:1901.09847.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from zeroband.kernels.codec import Codec
from zeroband.state.flat import ShardMap, SharedBuffers

_RESIDUAL = "residual"


class ErrorFeedback:
    """The node's residual, a buffer in shared memory where the codec needs one.

    When a round begins it is added to the contribution. After that each transfer attempt overwrites it, so it ends with
    what the committed attempt's encoding took. It stays as it is where this node has no weight.
    `shards`: where this rank's parameters lie in contributions. `codec`: encodes them.
    """

    def __init__(self, buffers: SharedBuffers, shards: ShardMap, codec: Codec) -> None:
        self.shards = shards
        self.codec = codec
        self.residual: Tensor | None = None
        """(n,) float32; None: nothing is fed back."""
        if codec.needs_feedback:
            buffers.open(_RESIDUAL)
            self.residual = buffers[_RESIDUAL]

    def add_to(self, contribution: Tensor, names: Collection[str]) -> None:
        """Add what the last round took to this rank's shards of a new contribution, (n,) float32. Once for each."""
        if self.residual is None:
            return
        taken = dict(self.shards.parts(self.residual, names))
        for name, part in self.shards.parts(contribution, names):
            part.add_(taken[name])

    def keep(self, part: float, names: Collection[str]) -> None:
        """Keep this part of what was added to this rank's shards of the newest contribution, which no round counts.

        The rest went back into what the node learned, with the contribution.
        """
        if self.residual is None:
            return
        for _, values in self.shards.parts(self.residual, names):
            values.mul_(part)

    def forget(self) -> None:
        """Begin anew: what this node did before is not part of the run that it joins, begins again or goes back in."""
        if self.residual is not None:
            self.residual.zero_()
