"""Codecs: encodings of float32 values for transfer, with sizes known in advance.

Uses the C++ kernels, or the reference if they were not built.
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
    """An encoding of float32 values. Any thread."""

    encode_reference: Callable[[Tensor], Tensor]
    decode_reference: Callable[[Tensor, int], Tensor]

    def encode(self, x: Tensor, *, variant: int = -1) -> Tensor:
        """Encode x.

        Shapes: x (n,) float32 on CPU, contiguous, any n >= 0; returns (encoded_size(n),) uint8. `variant`: index into
        `native.variants()`, or -1 for the best.
        Raises: ValueError naming the first non-finite value.
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
        """Decode n values to (n,) float32, with the same bits on every machine. Raises: ValueError for a wrong size."""
        if data.numel() != self.encoded_size(n):
            raise ValueError(f"{n} values take {self.encoded_size(n)} bytes in {self.name}, there are {data.numel()}")
        if not is_native():
            return self.decode_reference(data, n)
        out = torch.empty(n, dtype=torch.float32)
        native.require_done(native.load().zb_decode(self.number, variant, data.data_ptr(), n, out.data_ptr()))
        return out

    def add(self, data: Tensor, weight: float, total: Tensor) -> None:
        """Add `weight` times the decoded `data` to `total`, with the same bits as a reduction.

        Shapes: data (encoded_size(n),) uint8, total (n,) float32, both on CPU and contiguous. `weight` is rounded to
        float32. Needs the native library. Raises: ValueError for a non-finite or negative weight.
        """
        add = native.load().zb_add
        native.require_done(add(self.number, -1, data.data_ptr(), total.numel(), weight, total.data_ptr()))

    def part_of(self, data: Tensor, total: int, start: int, n: int) -> Tensor:
        """Extract the encoding of the values [start, start + n) from that of all `total` values.

        Shapes: data (encoded_size(total),) uint8; returns (encoded_size(n),). `start` and, except at the end, n must be
        multiples of the block.
        """
        scales = range(0) if not self.block else range(start // self.block, -(-(start + n) // self.block))
        scales_bytes = 4 * -(-total // self.block) if self.block else 0
        first = scales_bytes + start * self.bits // 8
        values = data[first : first + -(-n * self.bits // 8)]
        return torch.cat([data[4 * scales.start : 4 * scales.stop], values])

    def largest(self, data: Tensor, n: int, *, variant: int = -1) -> float:
        """Return the largest absolute value in `data` without decoding it; 0 if n is 0.

        Infinite or NaN if a value is. Raises: ValueError as `decode` does.
        """
        if not is_native() or data.numel() != self.encoded_size(n):
            return largest(self.decode(data, n))
        found = ctypes.c_float()
        native.require_done(native.load().zb_largest(self.number, variant, data.data_ptr(), n, ctypes.byref(found)))
        return found.value

    def error_bound(self, x: Tensor) -> Tensor:
        """Return the maximum decoding error of each value, (n,) float64."""
        bound = self.relative_error * x.abs().double()
        if self.block and x.numel():
            largest = torch.cat([part.abs().amax().expand(part.numel()) for part in x.split(self.block)]).double()
            bound = torch.maximum(bound + self.block_error * largest, (largest < reference.TINY) * largest)
        return bound + self.relative_error * 2.0**-126


def _codec(name: str, encode: Callable[..., Tensor], decode: Callable[..., Tensor]) -> Codec:
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
    """Return whether the native library is used; log once if not."""
    problem = native.problem()
    if problem:
        _log.warning("codecs run in plain torch: %s", problem)
    return problem is None


def _require_finite(x: Tensor) -> None:
    if not all_finite(x):
        raise _not_finite(x, int((~torch.isfinite(x)).nonzero()[0]))


def _not_finite(x: Tensor, index: int) -> ValueError:
    return ValueError(f"value {index} of {x.numel()} is {x[index].item()}, which has no encoding")
