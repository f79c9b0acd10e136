"""`dct_kernels` in Triton: each chunk is read once, and only its largest coefficients are written.

Needs triton, which comes with torch's CUDA wheels. Runs on GPUs, and with `TRITON_INTERPRET=1` on CPU tensors.
Coefficients are float32 sums in another order than those of `dct_kernels`, about 1e-6 of the chunk's largest value off,
so near-ties may be chosen differently.
"""

# Triton has no type stubs, and a kernel's parameters are what it is launched with.
# pyright: reportMissingTypeStubs=false, reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeroband.kernels import dct

_WARPS = 8
_OPTIONS = {"num_warps": _WARPS} if torch.version.hip else {"num_warps": _WARPS, "maxnreg": 128}
"""128 registers per thread: two programs share a multiprocessor (65,536), and nothing spills (test_offline.py).
Triton for AMD rejects the option."""

_MIN_SIDE = 16
"""Smallest side of `tl.dot`; smaller matrices are zero-padded."""

_INFINITE = tl.constexpr(0x7F800000)


@triton.jit
def _at(matrix, row, column, columns, is_there):
    """Load entries of a matrix, 0 outside."""
    return tl.load(matrix + row * columns + column, mask=is_there, other=0.0)


@triton.jit
def _half_waves(basis, frequency, place, n):
    """Load the first half of each basis function, including the middle of an odd length; 0 outside."""
    return _at(basis, frequency, place, n, (frequency < n) & (place < n - n // 2))


@triton.jit
def _border_of(sizes, k):
    """Bisect [low, high) until exactly k sizes are >= low, or all sizes in it are equal.

    Invariant: fewer than k sizes are >= high. Negative sizes are ignored; none is 2^31 - 1.
    """
    low = tl.full((), 0, tl.int32)
    high = tl.max(sizes, axis=0) + 1
    found = tl.sum((sizes >= low).to(tl.int32), axis=0)
    while (found > k) & (high - low > 1):
        middle = low + ((high - low) >> 1)
        not_below = tl.sum((sizes >= middle).to(tl.int32), axis=0)
        has_k = not_below >= k
        low, high = tl.where(has_k, middle, low), tl.where(has_k, high, middle)
        found = tl.where(has_k, not_below, found)
    return low, high


@triton.jit
def _choice_of(sizes, k):
    """Return a mask of the k largest sizes, ties to the first, and the rank of each in order of position."""
    low, high = _border_of(sizes, k)
    is_above = sizes >= high
    is_equal = (sizes >= low) & (sizes < high)
    room = k - tl.sum(is_above.to(tl.int32), axis=0)
    counts = tl.cumsum(is_above.to(tl.int32) + (is_equal.to(tl.int32) << 16), axis=0)  # two counters in one
    above, equal = counts & 0xFFFF, counts >> 16
    is_chosen = is_above | (is_equal & (equal <= room))
    return is_chosen, above + tl.minimum(equal, room) - 1


@triton.jit(do_not_specialize=["rows", "columns", "k"])  # every specialisation is tested in test_offline.py
def choose_kernel(
    chunks, row_basis, column_basis, places, values, rows, columns, k,
    half_height: tl.constexpr, half_width: tl.constexpr,
):  # fmt: skip
    """Transform one chunk and store its k largest coefficients with their indices.

    The second half of a basis function mirrors the first, negated for odd frequencies. So the chunk is folded into sums
    and differences of mirrored values, which are multiplied by half basis functions: half the work, a quarter per step.
    """
    chunk = tl.program_id(0).to(tl.int64)
    own = chunks + chunk * rows * columns
    up, left = tl.arange(0, half_height)[:, None], tl.arange(0, half_width)[None, :]
    down, right = rows - 1 - up, columns - 1 - left
    is_up, is_left = up < rows - rows // 2, left < columns - columns // 2  # including the middle of an odd length
    is_down, is_right = up < rows // 2, left < columns // 2
    up_left, up_right = _at(own, up, left, columns, is_up & is_left), _at(own, up, right, columns, is_up & is_right)
    down_left = _at(own, down, left, columns, is_down & is_left)
    down_right = _at(own, down, right, columns, is_down & is_right)

    largest = tl.maximum(
        tl.maximum(tl.abs(up_left), tl.abs(up_right)), tl.maximum(tl.abs(down_left), tl.abs(down_right))
    )
    exponent = tl.max(tl.max(largest, axis=1), axis=0).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)  # scales the largest value to about 1, so that no sum overflows
    unit = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    up_left, up_right, down_left, down_right = up_left * unit, up_right * unit, down_left * unit, down_right * unit

    r, c = tl.arange(0, half_height), tl.arange(0, half_width)
    none = tl.zeros((half_height, half_width), tl.float32)
    even_even, even_odd, odd_even, odd_odd = none, none, none, none
    for quarter in tl.range(4, num_stages=1):  # no software pipelining, as registers are scarce
        row_parity, column_parity = quarter >> 1, quarter & 1
        row_sign, column_sign = 1.0 - 2.0 * row_parity, 1.0 - 2.0 * column_parity
        folded = up_left + column_sign * up_right + row_sign * (down_left + column_sign * down_right)
        across = _half_waves(column_basis, 2 * c[None, :] + column_parity, c[:, None], columns)  # (position, frequency)
        found = tl.dot(folded, across, input_precision="ieee")
        along = _half_waves(row_basis, 2 * r[:, None] + row_parity, r[None, :], rows)  # (frequency, position)
        found = tl.dot(along, found, input_precision="ieee")
        # Selected instead of rotated: Triton 3.6 and 3.7 treat loop-carried values with equal start as one constant.
        even_even = tl.where(quarter == 0, found, even_even)
        even_odd = tl.where(quarter == 1, found, even_odd)
        odd_even = tl.where(quarter == 2, found, odd_even)
        odd_odd = tl.where(quarter == 3, found, odd_odd)
    even_rows, odd_rows = tl.interleave(even_even, even_odd), tl.interleave(odd_even, odd_odd)
    width: tl.constexpr = 2 * half_width
    numel: tl.constexpr = 2 * half_height * width
    coefficients = tl.reshape(tl.permute(tl.join(even_rows, odd_rows), (0, 2, 1)), (numel,))

    at = tl.arange(0, numel)
    row, column = at // width, at % width
    sizes = tl.minimum(coefficients.to(tl.int32, bitcast=True) & 0x7FFFFFFF, _INFINITE)  # orders NaN as infinity
    sizes = tl.where((row < rows) & (column < columns), sizes, -1)
    is_chosen, to = _choice_of(sizes, k)
    tl.store(places + chunk * k + to, row * columns + column, mask=is_chosen)
    tl.store(values + chunk * k + to, coefficients * (exponent << 23).to(tl.float32, bitcast=True), mask=is_chosen)


@triton.jit
def restore_kernel(
    places, values, row_basis, column_basis, chunks, rows, columns,
    k: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Sum the coefficients' basis functions of one chunk, each an outer product of two vectors."""
    chunk = tl.program_id(0).to(tl.int64)
    r, c = tl.arange(0, height), tl.arange(0, width)
    total = tl.zeros((height, width), tl.float32)
    for i in range(k):
        place, value = tl.load(places + chunk * k + i), tl.load(values + chunk * k + i)
        down = _at(row_basis, place // columns, r, rows, r < rows)
        across = _at(column_basis, place % columns, c, columns, c < columns)
        total += (down * value)[:, None] * across[None, :]
    to = chunks + chunk * rows * columns + r[:, None] * columns + c[None, :]
    tl.store(to, total, mask=(r < rows)[:, None] & (c < columns)[None, :])


def choose(chunks: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Implement `DctKernels.choose`. Asynchronous."""
    count, rows, columns = chunks.shape
    places = torch.empty(count, k, dtype=torch.int32, device=chunks.device)
    values = torch.empty(count, k, dtype=torch.float32, device=chunks.device)
    if count:
        choose_kernel[(count,)](
            chunks, dct.basis(rows, chunks.device), dct.basis(columns, chunks.device), places, values, rows, columns, k,
            half_height=_side(rows - rows // 2), half_width=_side(columns - columns // 2),
            **_OPTIONS,
        )  # fmt: skip
    return places, values


def restore(places: Tensor, values: Tensor, rows: int, columns: int) -> Tensor:
    """Implement `DctKernels.restore`. Asynchronous."""
    count, k = places.shape
    chunks = torch.empty(count, rows, columns, dtype=torch.float32, device=values.device)
    if count:
        restore_kernel[(count,)](
            places, values, dct.basis(rows, values.device), dct.basis(columns, values.device), chunks, rows, columns, k,
            height=_side(rows), width=_side(columns), **_OPTIONS,
        )  # fmt: skip
    return chunks


def _side(length: int) -> int:
    return max(1 << (length - 1).bit_length(), _MIN_SIDE)
