"""`dct_kernels` in Triton: a chunk is read once and only its largest coefficients are written, and the way back.

Importing needs triton, which comes with torch's CUDA wheels. They run on tensors of an NVIDIA GPU; with
`TRITON_INTERPRET=1` in the environment, on CPU tensors. Coefficients are sums in float32, about 1e-6 of the chunk's
largest value away from the exact ones of `dct_kernels`, so of two of nearly the same size the other may be chosen.
"""

# Triton has no type stubs, and a kernel's parameters are what it is launched with.
# pyright: reportMissingTypeStubs=false, reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportCallIssue=false

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeroband.kernels import dct

_WARPS = 4
_LEAST_SIDE = 16
"""Least side of what `tl.dot` multiplies; smaller chunks are filled up with zeros."""


@triton.jit
def _at(matrix, row, column, rows, columns):
    """Entries of a matrix, 0 outside of it."""
    is_there = (row < rows) & (column < columns)
    return tl.load(matrix + row * columns + column, mask=is_there, other=0.0)


@triton.jit
def _border_of(sizes, k):
    """The largest number that at least k of these are not below: bit by bit, from the highest. All below 2^31."""
    border = tl.full((), 0, tl.int32)
    step = tl.full((), 1 << 30, tl.int32)
    for _ in range(31):
        has_k = tl.sum((sizes >= border + step).to(tl.int32), axis=0) >= k
        border = tl.where(has_k, border + step, border)
        step = step >> 1
    return border


@triton.jit
def choose_kernel(
    chunks, row_basis, column_basis, places, values, rows, columns, k, height: tl.constexpr, width: tl.constexpr
):
    """Transform one chunk and store its k largest coefficients, with their places."""
    chunk = tl.program_id(0).to(tl.int64)
    r, c = tl.arange(0, height), tl.arange(0, width)
    own = _at(chunks + chunk * rows * columns, r[:, None], c[None, :], rows, columns)
    exponent = tl.max(tl.max(own.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1), axis=0) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)  # the largest value becomes about 1: no sum overflows
    own = own * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    waves_down = _at(row_basis, r[:, None], r[None, :], rows, rows)  # (frequency, place)
    waves_across = _at(column_basis, c[None, :], c[:, None], columns, columns)  # (place, frequency)
    across = tl.dot(own, waves_across, input_precision="ieee")
    coefficients = tl.reshape(tl.dot(waves_down, across, input_precision="ieee"), (height * width,))

    at = tl.arange(0, height * width)
    row, column = at // width, at % width
    sizes = coefficients.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    sizes = tl.where((row < rows) & (column < columns), sizes, -1)
    border = _border_of(sizes, k)
    is_equal = sizes == border
    room = k - tl.sum((sizes > border).to(tl.int32), axis=0)
    is_chosen = (sizes > border) | (is_equal & (tl.cumsum(is_equal.to(tl.int32), axis=0) <= room))
    to = chunk * k + tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
    tl.store(places + to, row * columns + column, mask=is_chosen)
    tl.store(values + to, coefficients * (exponent << 23).to(tl.float32, bitcast=True), mask=is_chosen)


@triton.jit
def restore_kernel(
    places, values, row_basis, column_basis, chunks, rows, columns, k, height: tl.constexpr, width: tl.constexpr
):
    """Add up the waves of one chunk, each the product of one down and one across."""
    chunk = tl.program_id(0).to(tl.int64)
    r, c = tl.arange(0, height), tl.arange(0, width)
    total = tl.zeros((height, width), tl.float32)
    for i in range(k):
        place, value = tl.load(places + chunk * k + i), tl.load(values + chunk * k + i)
        down = _at(row_basis, place // columns, r, rows, rows)
        across = _at(column_basis, place % columns, c, columns, columns)
        total += (down * value)[:, None] * across[None, :]
    to = chunks + chunk * rows * columns + r[:, None] * columns + c[None, :]
    tl.store(to, total, mask=(r < rows)[:, None] & (c < columns)[None, :])


def choose(chunks: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Implement `DctKernels.choose`. Does not wait for the GPU."""
    count, rows, columns = chunks.shape
    places = torch.empty(count, k, dtype=torch.int32, device=chunks.device)
    values = torch.empty(count, k, dtype=torch.float32, device=chunks.device)
    if count:
        choose_kernel[(count,)](
            chunks, _basis(rows, chunks.device), _basis(columns, chunks.device), places, values, rows, columns, k,
            height=_side(rows), width=_side(columns), num_warps=_WARPS,
        )  # fmt: skip
    return places, values


def restore(places: Tensor, values: Tensor, rows: int, columns: int) -> Tensor:
    """Implement `DctKernels.restore`. Does not wait for the GPU."""
    count, k = places.shape
    chunks = torch.empty(count, rows, columns, dtype=torch.float32, device=values.device)
    if count:
        restore_kernel[(count,)](
            places, values, _basis(rows, values.device), _basis(columns, values.device), chunks, rows, columns, k,
            height=_side(rows), width=_side(columns), num_warps=_WARPS,
        )  # fmt: skip
    return chunks


def _side(length: int) -> int:
    return max(1 << (length - 1).bit_length(), _LEAST_SIDE)


@lru_cache(maxsize=256)
def _basis(n: int, device: torch.device) -> Tensor:
    """Orthonormal DCT-II, (frequency, place) float32."""
    return dct.basis(n, device).float()
