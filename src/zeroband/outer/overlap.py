"""What a node does with a mean that arrives while it trains on: mixing, delayed and eager updates. Pure.

Shapes: slices (n,) float32 of flat buffers at the same place, any device; one rounding for each operation.

Sources: mixing is Streaming DiLoCo, arXiv:2501.18512, algorithm 2. Delayed and eager updates are arXiv:2502.12996. Its
abstract and its tables were read. Its equations are second-hand: they are those of a summary, and agree with how
others describe the method ("a mixture of the current local outer gradient with the delayed mixture of all other
replicas' outer gradients"). The rule for the first round, where nothing has arrived yet, is ours: it counts as zero.
"""

from __future__ import annotations

from torch import Tensor


def mix(inner: Tensor, outer: Tensor, *, alpha: float) -> None:
    """Inner <- alpha inner + (1 - alpha) outer, in place. 0 takes the outer parameters bit for bit, 1 the inner ones.

    What a replica learned during the overlap lives on in the alpha part.
    """
    if alpha == 0:
        inner.copy_(outer)
    elif alpha != 1:
        inner.mul_(alpha).add_(outer.mul(1.0 - alpha))


class EagerView:
    """A node's own parameters under eager updates, derived from the canonical ones, which apply late means only.

    An eager replica feeds its own outer SGD with the last round's mean, in which its fresh pseudo-gradient has taken
    the place of its late one. It differs from the canonical state by what its own terms
    share_r d_r - share_(r-1) d_(r-1) did, for the outer SGD is linear. Over the rounds they telescope, so that
        view = canonical - lr (c + mu u),  u <- mu u + c,  c = share d
    with Nesterov, and canonical - lr u without: one buffer `u` stands for the whole history. The canonical state stays
    bit-identical on all nodes; the view is local. Zeroing `u` ends the difference: the flush at the end of the run, at
    a checkpoint and when members change, after the late mean was applied.
    """

    def __init__(self, *, lr: float, momentum: float, nesterov: bool = True) -> None:
        self._lr = lr
        self._momentum = momentum
        self._nesterov = nesterov

    def add(self, history: Tensor, fresh: Tensor, *, share: float) -> None:
        """History <- mu history + share fresh, in place: u takes in the pseudo-gradient that was just sent."""
        history.mul_(self._momentum).add_(fresh.mul(share))

    def write(self, canonical: Tensor, history: Tensor, fresh: Tensor, out: Tensor, *, share: float) -> None:
        """Write the parameters from which this node trains on, after `add` of the same `fresh`."""
        step = fresh.mul(share).add_(history.mul(self._momentum)) if self._nesterov else history
        out.copy_(canonical).sub_(step.mul(self._lr))
