"""Codecs: how float32 values travel between nodes, as bytes of a known number.

A codec is one frozen record; `CODECS` has them all. The C++ kernels serve; where they were not built, the reference.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from zeroband.kernels import native, reference
from zeroband.kernels.scan import all_finite

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Codec:
    """How values are encoded. Any thread."""

    name: str
    number: int
    """On the wire."""
    bits: int
    """Of one value, without its share of the scale."""
    block: int | None
    """Neighbours that share one float32 scale; None: no scale."""
    relative_error: float
    """At most this share of |x|,"""
    block_error: float
    """plus this share of the largest |x| of its block: the bound of the error of every value."""
    encode_reference: Callable[[Tensor], Tensor]
    decode_reference: Callable[[Tensor, int], Tensor]

    @property
    def ratio(self) -> float:
        """Bytes of float32 for one byte on the wire, in long buffers."""
        scale_bits = 32 / self.block if self.block else 0
        return 32 / (self.bits + scale_bits)

    @property
    def is_exact(self) -> bool:
        """Whether every value arrives as it was sent."""
        return self.relative_error == self.block_error == 0

    @property
    def needs_feedback(self) -> bool:
        """Whether it takes so much that a round's loss must go into the next one for training to converge."""
        return self.bits < 8

    def encoded_size(self, n: int) -> int:
        """Bytes that n values take."""
        scales = -(-n // self.block) if self.block else 0
        return 4 * scales + -(-n * self.bits // 8)

    def encode(self, x: Tensor, *, variant: int = -1) -> Tensor:
        """The bytes of x.

        Shapes: x (n,) float32 on CPU, contiguous, any n >= 0; gives (encoded_size(n),) uint8. `variant`: index into
        `native.variants()`; -1: the best.
        Raises: ValueError naming the first index that is not finite.
        """
        if not _is_native():
            _require_finite(x)
            return self.encode_reference(x)
        out = torch.empty(self.encoded_size(x.numel()), dtype=torch.uint8)
        bad = native.load().zb_encode(self.number, variant, x.data_ptr(), x.numel(), out.data_ptr())
        if bad >= 0:
            raise _not_finite(x, bad)
        return out

    def decode(self, data: Tensor, n: int, *, variant: int = -1) -> Tensor:
        """What `encode` made of n values: (n,) float32, the same bits on every machine.

        Raises: ValueError when the bytes are not as many as n values take.
        """
        if data.numel() != self.encoded_size(n):
            raise ValueError(f"{n} values take {self.encoded_size(n)} bytes in {self.name}, there are {data.numel()}")
        if not _is_native():
            return self.decode_reference(data, n)
        out = torch.empty(n, dtype=torch.float32)
        native.load().zb_decode(self.number, variant, data.data_ptr(), n, out.data_ptr())
        return out

    def error_bound(self, x: Tensor) -> Tensor:
        """Of every value, (n,) float64: how far its decoded value may be from it."""
        bound = self.relative_error * x.abs().double()
        if self.block and x.numel():
            largest = torch.cat([part.abs().amax().expand(part.numel()) for part in x.split(self.block)]).double()
            bound = torch.maximum(bound + self.block_error * largest, (largest < reference.TINY) * largest)
        return bound + self.relative_error * 2.0**-126


_SLACK = 1 + 2.0**-14  # the scale and the quotient are rounded themselves

_EACH = (
    Codec("fp32", 0, 32, None, 0.0, 0.0, reference.encode_fp32, reference.decode_fp32),
    Codec("bf16", 1, 16, None, 2.0**-8, 0.0, reference.encode_bf16, reference.decode_bf16),
    Codec(
        "fp16",
        2,
        16,
        256,
        2.0**-11,
        2.0**-25,
        partial(reference.encode_fp16, block=256),
        partial(reference.decode_fp16, block=256),
    ),
    Codec(
        "int8",
        3,
        8,
        256,
        0.0,
        0.5 / 127 * _SLACK,
        partial(reference.encode_int8, block=256),
        partial(reference.decode_int8, block=256),
    ),
    Codec(
        "int4",
        4,
        4,
        128,
        0.0,
        0.5 / 7 * _SLACK,
        partial(reference.encode_int4, block=128),
        partial(reference.decode_int4, block=128),
    ),
)

CODECS: dict[str, Codec] = {codec.name: codec for codec in _EACH}


@cache
def _is_native() -> bool:
    """Says once, where it is so, that the reference serves."""
    problem = native.problem()
    if problem:
        _log.warning("codecs run in plain torch: %s", problem)
    return problem is None


def _require_finite(x: Tensor) -> None:
    if not all_finite(x):
        raise _not_finite(x, int((~torch.isfinite(x)).nonzero()[0]))


def _not_finite(x: Tensor, index: int) -> ValueError:
    return ValueError(f"value {index} of {x.numel()} is {x[index].item()}, which has no encoding")
