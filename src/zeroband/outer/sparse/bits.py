"""Bit packing: rows of unsigned numbers of a few bits each, least significant bit first, without gaps. Any device."""

from __future__ import annotations

import torch
from torch import Tensor

from zeroband.outer.sparse.sizes import ALIGNMENT, packed_size


def pack(numbers: Tensor, bits: int) -> Tensor:
    """The low bits of each number, one behind the other.

    Shapes: numbers (r, n) of an integer type, each in 0 .. 2^bits - 1, bits in 0 .. 16; gives (r, packed_size(n, bits))
    uint8. The bits behind the last number of a row are 0.
    """
    rows, count = numbers.shape
    groups = -(-count // ALIGNMENT)
    padded = torch.nn.functional.pad(numbers.to(torch.int32), (0, groups * ALIGNMENT - count))
    padded = padded.view(rows, groups, ALIGNMENT)
    packed = torch.zeros(rows, groups, bits, dtype=torch.int32, device=numbers.device)  # 8 numbers are `bits` bytes
    for byte, at, shift in _overlaps(bits):
        packed[:, :, byte] |= _shifted(padded[:, :, at], shift) & 0xFF
    return packed.to(torch.uint8).view(rows, groups * bits)[:, : packed_size(count, bits)]


def unpack(data: Tensor, count: int, bits: int) -> Tensor:
    """What `pack` made of rows of `count` numbers: (r, count) int32. `data`: (r, packed_size(count, bits)) uint8."""
    rows, groups = len(data), -(-count // ALIGNMENT)
    padded = torch.nn.functional.pad(data, (0, groups * bits - data.shape[1])).view(rows, groups, bits).to(torch.int32)
    numbers = torch.zeros(rows, groups, ALIGNMENT, dtype=torch.int32, device=data.device)
    for byte, at, shift in _overlaps(bits):
        numbers[:, :, at] |= _shifted(padded[:, :, byte], -shift)
    return (numbers & ((1 << bits) - 1)).view(rows, groups * ALIGNMENT)[:, :count]


def has_clean_ends(data: Tensor, count: int, bits: int) -> Tensor:
    """Whether the bits behind the last of `count` numbers are 0 in all rows, as `pack` leaves them: a boolean."""
    used = count * bits % 8
    return (data[:, -1:] >> used == 0).all() if used else torch.ones((), dtype=torch.bool, device=data.device)


def _shifted(numbers: Tensor, left: int) -> Tensor:
    return numbers << left if left >= 0 else numbers >> -left


def _overlaps(bits: int) -> list[tuple[int, int, int]]:
    """For each group of 8 numbers: (byte, number, shift) where a number shares bits with a byte.

    Its lowest bit is bit `shift` of the byte, negative where it begins in an earlier one.
    """
    return [
        (byte, at, at * bits - 8 * byte)
        for at in range(ALIGNMENT)
        for byte in range(at * bits // 8, packed_size(at + 1, bits))
    ]
