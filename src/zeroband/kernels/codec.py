"""Codecs: how float32 values travel between nodes, as bytes of a known number.

A codec is one frozen record; `CODECS` has them all. The C++ kernels serve; where they were not built, the reference.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial

import torch
from torch import Tensor

from zeroband.kernels import native, reference
from zeroband.kernels.formats import FORMATS, Format
from zeroband.kernels.scan import all_finite, largest

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Codec(Format):
    """How values are encoded. Any thread."""

    encode_reference: Callable[[Tensor], Tensor]
    decode_reference: Callable[[Tensor, int], Tensor]

    def encode(self, x: Tensor, *, variant: int = -1) -> Tensor:
        """The bytes of x.

        Shapes: x (n,) float32 on CPU, contiguous, any n >= 0; gives (encoded_size(n),) uint8. `variant`: index into
        `native.variants()`; -1: the best.
        Raises: ValueError naming the first index that is not finite.
        """
        if not is_native():
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
        if not is_native():
            return self.decode_reference(data, n)
        out = torch.empty(n, dtype=torch.float32)
        native.require_done(native.load().zb_decode(self.number, variant, data.data_ptr(), n, out.data_ptr()))
        return out

    def add(self, data: Tensor, weight: float, total: Tensor) -> None:
        """Add what `data` decodes to, times a weight, to a sum, in the bits of a reduction.

        Shapes: data (encoded_size(n),) uint8, total (n,) float32, both on CPU and contiguous. `weight`: as float32.
        Needs the native library. Raises: ValueError for a weight that is not finite, or negative.
        """
        add = native.load().zb_add
        native.require_done(add(self.number, -1, data.data_ptr(), total.numel(), weight, total.data_ptr()))

    def part_of(self, data: Tensor, total: int, start: int, n: int) -> Tensor:
        """The encoding of the values [start, start + n) of `total`, out of that of all.

        Shapes: data (encoded_size(total),) uint8, gives (encoded_size(n),). `start`: a whole number of blocks, and so
        is n unless the part is the last one.
        """
        scales = range(0) if not self.block else range(start // self.block, -(-(start + n) // self.block))
        behind = 4 * -(-total // self.block) if self.block else 0
        first = behind + start * self.bits // 8
        values = data[first : first + -(-n * self.bits // 8)]
        return torch.cat([data[4 * scales.start : 4 * scales.stop], values])

    def largest(self, data: Tensor, n: int, *, variant: int = -1) -> float:
        """The largest size of the n values that `data` decodes to, without decoding them; 0 where n is 0.

        Infinite or not a number where a value is. Raises: ValueError as `decode`.
        """
        if not is_native() or data.numel() != self.encoded_size(n):
            return largest(self.decode(data, n))
        found = ctypes.c_float()
        native.require_done(native.load().zb_largest(self.number, variant, data.data_ptr(), n, ctypes.byref(found)))
        return found.value

    def error_bound(self, x: Tensor) -> Tensor:
        """How far the decoded value may be from each value, (n,) float64."""
        bound = self.relative_error * x.abs().double()
        if self.block and x.numel():
            largest = torch.cat([part.abs().amax().expand(part.numel()) for part in x.split(self.block)]).double()
            bound = torch.maximum(bound + self.block_error * largest, (largest < reference.TINY) * largest)
        return bound + self.relative_error * 2.0**-126


def _codec(name: str, encode: Callable[..., Tensor], decode: Callable[..., Tensor]) -> Codec:
    """The codec of a format. The reference kernels of formats with a scale take its block."""
    format = FORMATS[name]
    block = {} if format.block is None else {"block": format.block}
    return Codec(**asdict(format), encode_reference=partial(encode, **block), decode_reference=partial(decode, **block))


_EACH = (
    _codec("fp32", reference.encode_fp32, reference.decode_fp32),
    _codec("bf16", reference.encode_bf16, reference.decode_bf16),
    _codec("fp16", reference.encode_fp16, reference.decode_fp16),
    _codec("int8", reference.encode_int8, reference.decode_int8),
    _codec("int4", reference.encode_int4, reference.decode_int4),
)

CODECS: dict[str, Codec] = {codec.name: codec for codec in _EACH}


@cache
def is_native() -> bool:
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
