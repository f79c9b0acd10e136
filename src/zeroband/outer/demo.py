"""DeMo's arithmetic: decoupled momentum, the transform that packs it, and the step by its sign. No transport.

One step on node i, gradient g, momentum m, all flat float32 buffers (arXiv:2411.19870, algorithm 1, and its source):
    theta <- theta (1 - lr wd)
    m_i <- beta m_i + lr g_i;  (places, values) = k largest of DCT(chunk(m_i));  m_i <- m_i - alpha IDCT(places, values)
    Q = IDCT(mean over the nodes that sent a coefficient);  theta <- theta - lr sign(Q)
There is no inner optimizer and no state that nodes exchange. `sparse.feedback` has the second line, `sparse.codec` the
third.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from zeroband.outer.flat import FlatLayout
from zeroband.outer.sparse.codec import SparseCodec, SparseRule
from zeroband.outer.sparse.feedback import ErrorFeedback
from zeroband.outer.sparse.values import ValueCodingName

_CHUNK = 1 << 20
"""Elements handled at a time, so that the temporary stays in the cache."""


@dataclass(frozen=True)
class DemoRule:
    """DeMo's knobs; the defaults are those of its source and, for the values, of Psyche's runs."""

    k: int = 4
    """Coefficients of each chunk that are sent: 32 in DeMo's source, 4 with signs gives 1260 times less than 2 N."""
    chunk: int = 64
    """Longest side of a chunk."""
    values: ValueCodingName = "sign"
    """How coefficients travel; float32 is the paper's."""
    decay: float = 0.999
    """Of the momentum (beta); 0.995 in Psyche's Consilience."""
    share: float = 1.0
    """Of what is sent that leaves the momentum (alpha): 1 in the first version, 0.2 best in the second [2nd hand]."""

    def feedback(self, layout: FlatLayout) -> ErrorFeedback:
        """The momentum's rule with its codec."""
        rule = SparseRule(k=self.k, chunk=self.chunk, values=self.values, transform="dct")
        return ErrorFeedback(SparseCodec(layout, rule), decay=self.decay, share=self.share)


def decay_weights(params: Tensor, *, lr: float, weight_decay: float) -> None:
    """Shrink parameters, in place; any slice, the same bits however it is cut."""
    params.mul_(1.0 - lr * weight_decay)


def sign_step(params: Tensor, update: Tensor, *, lr: float) -> None:
    """Step by the sign of the decoded update, in place; any slice. Where the update is 0 nothing moves.

    With the momentum as `update` it is the lookahead of a step whose payload is on its way; `lr` negative undoes it.
    """
    for theta, q in zip(params.split(_CHUNK), update.split(_CHUNK), strict=True):
        theta.sub_(q.sign().mul_(lr))
