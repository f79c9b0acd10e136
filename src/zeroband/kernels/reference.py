"""The codecs in plain torch: the reference for the kernels in tests, and the fallback without a compiler.

They perform the same IEEE operations as the kernels, so encoded bytes and decoded values are equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

TINY = 2.0**-118
"""Blocks with a smaller largest value become zeros, so that no decoded value is subnormal."""

LARGEST = torch.tensor(0x7F7FFFFE, dtype=torch.int32).view(torch.float32)
"""One unit below the largest float32: the limit of scales, so that decoding cannot overflow."""


def encode_fp32(x: Tensor) -> Tensor:
    """Copy the bytes."""
    return x.clone().view(torch.uint8)


def decode_fp32(data: Tensor, n: int) -> Tensor:
    """Invert `encode_fp32`."""
    return data.view(torch.float32).clone()


def encode_bf16(x: Tensor) -> Tensor:
    """Round to bfloat16, ties to even, saturating instead of overflowing."""
    bits = x.view(torch.int32)
    size = bits & 0x7FFFFFFF
    half = ((size + 0x7FFF + ((size >> 16) & 1)) >> 16).clamp_max(0x7F7F)
    return _as_words(half | ((bits >> 16) & 0x8000))


def decode_bf16(data: Tensor, n: int) -> Tensor:
    """Invert `encode_bf16`."""
    return data.view(torch.bfloat16).to(torch.float32)


def encode_fp16(x: Tensor, block: int) -> Tensor:
    """Round to float16, each block divided by a power of two so that its largest value is in [1, 2)."""
    blocks, top = _blocks(x, block)
    is_tiny = top < TINY
    scale = (top.view(torch.int32) & 0x7F800000).view(torch.float32).masked_fill(is_tiny, 0)
    unit = (blocks.double() / scale.double().masked_fill(is_tiny, 1)[:, None]).float()
    unit = torch.where(is_tiny[:, None], 0 * blocks, unit)  # zeros keep their sign
    words = unit.reshape(-1)[: x.numel()].to(torch.float16).view(torch.int16).int()
    size = (words & 0x7FFF).clamp_max(0x3FFF)
    return torch.cat([scale.view(torch.uint8), _as_words(size | (words & 0x8000))])


def decode_fp16(data: Tensor, n: int, block: int) -> Tensor:
    """Invert `encode_fp16`."""
    scale, words = _split(data, n, block)
    values = words.view(torch.float16).to(torch.float32)
    return scale.repeat_interleave(block)[:n] * values


def encode_int8(x: Tensor, block: int) -> Tensor:
    """Quantise to -127..127; block scales come first."""
    scale, q = _quantise(x, block, 127)
    return torch.cat([scale.view(torch.uint8), q[: x.numel()].to(torch.int8).view(torch.uint8)])


def decode_int8(data: Tensor, n: int, block: int) -> Tensor:
    """Invert `encode_int8`."""
    scale, q = _split(data, n, block)
    return scale.repeat_interleave(block)[:n] * q.view(torch.int8).to(torch.float32)


def encode_int4(x: Tensor, block: int) -> Tensor:
    """Quantise to -7..7, two values per byte; block scales come first."""
    scale, q = _quantise(x, block, 7)
    return torch.cat([scale.view(torch.uint8), *(_pack(part) for part in q[: x.numel()].split(block))])


def decode_int4(data: Tensor, n: int, block: int) -> Tensor:
    """Invert `encode_int4`."""
    scale, packed = _split(data, n, block)
    q = [_unpack(part, min(block, n - i * block)) for i, part in enumerate(packed.split(block // 2))]
    return scale.repeat_interleave(block)[:n] * torch.cat(q or [torch.empty(0)])


def _as_words(values: Tensor) -> Tensor:
    """Return the low 16 bits of int32 values as bytes."""
    return torch.where(values >= 0x8000, values - 0x10000, values).to(torch.int16).view(torch.uint8)


def _blocks(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return zero-padded rows of one block each, and the largest |x| of each row."""
    rows = torch.nn.functional.pad(x, (0, -x.numel() % block)).view(-1, block)  # (blocks, block)
    return rows, rows.abs().amax(dim=1) if len(rows) else x.new_empty(0)


def _quantise(x: Tensor, block: int, levels: int) -> tuple[Tensor, Tensor]:
    """Return scales (blocks,) and integers in -levels..levels (blocks * block,), both float32."""
    rows, top = _blocks(x, block)
    is_tiny = top < TINY
    scale = torch.minimum(top / levels, LARGEST / levels).masked_fill(is_tiny, 0)
    inverse = torch.div(torch.tensor(float(levels)), top).masked_fill(is_tiny, 0)  # `levels / top` rounds twice
    return scale, (rows * inverse[:, None]).round().reshape(-1)


def _split(data: Tensor, n: int, block: int) -> tuple[Tensor, Tensor]:
    """Split encoded data into scales and codes."""
    border = 4 * -(-n // block)
    return data[:border].view(torch.float32), data[border:]


def _pack(q: Tensor) -> Tensor:
    """Pack value j into the low half of byte j, and value ceil(m / 2) + j into the high half, each plus 8."""
    half = -(-q.numel() // 2)
    raised = q.to(torch.int32) + 8
    high = torch.nn.functional.pad(raised[half:], (0, 2 * half - q.numel()))
    return (raised[:half] | (high << 4)).to(torch.uint8)


def _unpack(packed: Tensor, m: int) -> Tensor:
    low, high = (packed & 15).to(torch.float32) - 8, (packed >> 4).to(torch.float32) - 8
    return torch.cat([low, high])[:m]
