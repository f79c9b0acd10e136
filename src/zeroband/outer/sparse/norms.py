"""How long payloads are, and the weights that keep one of them from being longer than most. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch

from zeroband.outer.sparse.codec import Payload, SparseCodec

_NORM_BITS = 20


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
