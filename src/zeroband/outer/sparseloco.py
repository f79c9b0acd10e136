"""SparseLoCo's arithmetic: sparse pseudo-gradients with error feedback, an outer step without momentum. No transport.

A round on node i, pseudo-gradient d_i = outer - inner parameters (arXiv:2508.15706):
    e_i <- beta e_i + d_i;  (places, values) = k largest of each chunk, two bits;  e_i <- e_i - decoded
    theta <- theta - lr sum_i w_i decoded_i,  w_i the share of node i in the round
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zeroband.config.outer import OuterSGDConfig
from zeroband.outer.flat import FlatLayout
from zeroband.outer.optimizer import OuterSGD
from zeroband.outer.sparse.codec import Payload, SparseCodec, SparseRule
from zeroband.outer.sparse.feedback import ErrorFeedback
from zeroband.outer.sparse.values import ValueCodingName

_NORM_BITS = 20


@dataclass(frozen=True)
class SparseLocoRule:
    """SparseLoCo's knobs; the defaults are the paper's."""

    k: int = 64
    """Values sent of each chunk of chunk x chunk; 64 of 4096 is 1.56 %. Smaller chunks send the same part."""
    chunk: int = 64
    """Longest side of the tile of a matrix; vectors are cut into chunk x chunk values."""
    values: ValueCodingName = "two_bit"
    """How values travel."""
    decay: float = 0.95
    """Of the error buffer (beta)."""
    lr: float = 1.0
    """Of the outer step; 0.65 late in training in the paper, 0.4 in its repository's settings [second-hand]."""

    def feedback(self, layout: FlatLayout) -> ErrorFeedback:
        """The error buffer's rule with its codec."""
        rule = SparseRule(
            k=self.k,
            chunk=self.chunk,
            flat_chunk=self.chunk**2,
            values=self.values,
            transform=None,
            keeps_density=True,
        )
        return ErrorFeedback(SparseCodec(layout, rule), decay=self.decay)

    def outer_optimizer(self) -> OuterSGD:
        """The outer step: plain SGD. The error buffers do what momentum does in DiLoCo."""
        return OuterSGD(OuterSGDConfig(lr=self.lr, momentum=0.0, nesterov=False))


def norm_of(codec: SparseCodec, payload: Payload) -> float:
    """Euclidean norm of what a payload says, before any transform is undone: the same number on every node and device.

    Whole numbers are summed up, so the order does not matter; precise to about 2^-20 of the largest value.
    """
    values = [
        section.record.decode(payload.data[section.bytes_of(first, stop)], stop - first).values
        for section in codec.sections
        for first, stop in section.blocks(0, 1)
    ]
    largest = max((float(part.abs().max()) for part in values if part.numel()), default=0.0)
    if largest == 0:
        return 0.0
    unit = 2.0 ** (math.frexp(largest)[1] - _NORM_BITS)
    whole = sum(int((part.double() / unit).round().to(torch.int64).square().sum()) for part in values)
    return unit * math.sqrt(whole)


def weights_within_median(shares: Sequence[float], norms: Sequence[float]) -> tuple[float, ...]:
    """The members' shares, each scaled down so that no contribution is longer than the median one.

    Guards against a broken or hostile member, as SparseLoCo's repository does. The lower median of an even number.
    """
    if not norms:
        return ()
    most = statistics.median_low(norms)
    return tuple(share * (most / norm if norm > most else 1.0) for share, norm in zip(shares, norms, strict=True))
