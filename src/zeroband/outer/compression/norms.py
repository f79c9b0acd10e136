"""How long payloads are. Pure."""

from __future__ import annotations

import math

import torch

from zeroband.outer.compression.sparse_codec import Payload, SparseCodec

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
