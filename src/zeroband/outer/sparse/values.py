"""Codings for the chosen values of a run of chunks. Each has a known size in bytes. Any device.

Shapes: values (runs, chunks, k) float32; data (runs, size) uint8. All chunks of a run are coded together.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from zeroband.config.outer import ValueCodingName
from zeroband.kernels import reference
from zeroband.kernels.scan import all_finite
from zeroband.outer.sparse.bits import has_clean_ends, pack, unpack
from zeroband.outer.sparse.sizes import LEVEL_BYTES, has_zeros, values_size


class ValueCoding(Protocol):
    """One way to code values."""

    @property
    def is_of_signs(self) -> bool:
        """Whether decoded values are signs, without magnitudes."""
        ...

    def size(self, chunks: int, k: int) -> int:
        """Bytes of a run of `chunks` chunks."""
        ...

    def encode(self, values: Tensor) -> Tensor:
        """Encode finite values."""
        ...

    def decode(self, data: Tensor, chunks: int, k: int) -> Tensor:
        """Decode bytes to values, with the same bits on every device."""
        ...

    def problem(self, data: Tensor, chunks: int, k: int) -> str | None:
        """Why received bytes are malformed, or None. Their length is as `size` gives it."""
        ...


class Float32:
    """The values as they are."""

    is_of_signs = False

    def size(self, chunks: int, k: int) -> int:
        return values_size("float32", chunks * k, with_zeros=False)

    def encode(self, values: Tensor) -> Tensor:
        return reference.encode_fp32(values.reshape(-1)).view(len(values), -1)

    def decode(self, data: Tensor, chunks: int, k: int) -> Tensor:
        return reference.decode_fp32(_aligned(data), data.numel() // 4).view(len(data), chunks, k)

    def problem(self, data: Tensor, chunks: int, k: int) -> str | None:
        return _not_finite(self.decode(data, chunks, k))


class BFloat16:
    """The upper halves of the values, rounded to even."""

    is_of_signs = False

    def size(self, chunks: int, k: int) -> int:
        return values_size("bfloat16", chunks * k, with_zeros=False)

    def encode(self, values: Tensor) -> Tensor:
        return reference.encode_bf16(values.reshape(-1)).view(len(values), -1)

    def decode(self, data: Tensor, chunks: int, k: int) -> Tensor:
        return reference.decode_bf16(_aligned(data), data.numel() // 2).view(len(data), chunks, k)

    def problem(self, data: Tensor, chunks: int, k: int) -> str | None:
        return _not_finite(self.decode(data, chunks, k))


class Sign:
    """One bit: 0 for plus one, 1 for minus one. Source: DisTrO's 1-bit values (Psyche's trainer).

    With `with_zeros` two bits, the upper one for zero (see `sizes.has_zeros`).
    """

    is_of_signs = True

    def __init__(self, *, with_zeros: bool) -> None:
        self._bits = 2 if with_zeros else 1

    def size(self, chunks: int, k: int) -> int:
        return values_size("sign", chunks * k, with_zeros=self._bits == 2)

    def encode(self, values: Tensor) -> Tensor:
        codes = (values < 0).to(torch.int32)
        if self._bits == 2:
            codes |= (values == 0).to(torch.int32) << 1
        return pack(codes.flatten(1), self._bits)

    def decode(self, data: Tensor, chunks: int, k: int) -> Tensor:
        codes = unpack(data, chunks * k, self._bits).view(len(data), chunks, k)
        signs = 1.0 - 2.0 * (codes & 1).float()
        return torch.where(codes < 2, signs, 0.0)

    def problem(self, data: Tensor, chunks: int, k: int) -> str | None:
        if not has_clean_ends(data, chunks * k, self._bits):
            return "bits behind the last value"
        return "a negative zero" if self._bits == 2 and (unpack(data, chunks * k, 2) == 3).any() else None


class TwoBit:
    """Two bits: the sign, and one of two magnitudes; the magnitudes are shared by the run, as bfloat16.

    The threshold is the run's mean magnitude, and each level the mean of its side: a two-level quantiser for values
    that were chosen for being large. SparseLoCo (arXiv:2508.15706) instead spreads its four bins evenly over six
    deviations and takes their means for a whole tensor: values above a selection threshold then use only one bin per
    sign.
    """

    is_of_signs = False

    def size(self, chunks: int, k: int) -> int:
        return values_size("two_bit", chunks * k, with_zeros=False)

    def encode(self, values: Tensor) -> Tensor:
        sizes = values.flatten(1).abs().double()
        is_high = sizes > sizes.mean(dim=1, keepdim=True)
        high = is_high.sum(dim=1)
        levels = torch.stack(
            [
                (sizes * ~is_high).sum(dim=1) / (sizes.shape[1] - high).clamp_min(1),
                (sizes * is_high).sum(dim=1) / high.clamp_min(1),
            ],
            dim=1,
        )  # (runs, 2)
        codes = (values.flatten(1) < 0).to(torch.int32) | is_high.to(torch.int32) << 1
        head = reference.encode_bf16(levels.float().reshape(-1)).view(len(values), LEVEL_BYTES)
        return torch.cat([head, pack(codes, 2)], dim=1)

    def decode(self, data: Tensor, chunks: int, k: int) -> Tensor:
        codes = unpack(data[:, LEVEL_BYTES:], chunks * k, 2)
        sizes = self._levels(data).gather(1, (codes >> 1).long())
        return torch.where((codes & 1) == 1, -sizes, sizes).view(len(data), chunks, k)

    def problem(self, data: Tensor, chunks: int, k: int) -> str | None:
        levels = self._levels(data)
        if (levels < 0).any():
            return "a negative size"
        if not has_clean_ends(data[:, LEVEL_BYTES:], chunks * k, 2):
            return "bits behind the last value"
        return _not_finite(levels)

    def _levels(self, data: Tensor) -> Tensor:
        """Magnitudes of the runs, (runs, 2) float32: low, high."""
        head = _aligned(data[:, :LEVEL_BYTES])
        return reference.decode_bf16(head, head.numel() // 2).view(len(data), 2)


def coding_of(name: ValueCodingName, k: int, numel: int) -> ValueCoding:
    """The coding for chunks of `numel` values of which k are sent."""
    if name == "float32":
        return Float32()
    if name == "bfloat16":
        return BFloat16()
    return TwoBit() if name == "two_bit" else Sign(with_zeros=has_zeros(k, numel))


def _aligned(data: Tensor) -> Tensor:
    """Copy bytes into new contiguous memory, so that they can be viewed as wider numbers."""
    return data.reshape(-1).clone()


def _not_finite(values: Tensor) -> str | None:
    return None if all_finite(values) else "a value that is not finite"
