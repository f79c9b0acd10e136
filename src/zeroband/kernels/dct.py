"""The cosine transform of chunks, in exact arithmetic: the same bits on every processor, GPU and library.

A node's update is what it decodes from the others' payloads, so all must decode the same bits, or they drift apart
silently. A matrix product in float32 depends on the order of its additions. Here both factors are whole numbers, scaled
by powers of two, and so small that every product and every partial sum of a chunk is a whole number below 2^53: float64
adds them without rounding, in any order, fused or not. What is rounded is rounded value by value, to even.

Precision: 2^-23 of the largest value of the chunk, like float32's own. Orthonormal DCT-II and its inverse.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

MAX_CHUNK = 128
"""Longest dimension of a chunk for which the sums stay exact: 2^22 x 2^23 x sqrt(128) x sqrt(128) = 2^52."""

_VALUE_BITS, _BASIS_BITS = 22, 23


def forward(chunks: Tensor) -> Tensor:
    """DCT-II over both dimensions. Shapes: chunks (c, rows, columns) float32, finite; gives the same."""
    return _transform(chunks, is_inverse=False)


def inverse(coefficients: Tensor) -> Tensor:
    """Undoes `forward`; the same shapes."""
    return _transform(coefficients, is_inverse=True)


def _transform(chunks: Tensor, *, is_inverse: bool) -> Tensor:
    _, rows, columns = chunks.shape
    unit = _unit(chunks)  # (c, 1, 1)
    whole = chunks.double().div_(unit).round_()
    if columns > 1:
        basis = _basis(columns, chunks.device)
        whole = (whole @ (basis if is_inverse else basis.T)).mul_(2.0**-_BASIS_BITS)
    if rows > 1:
        basis = _basis(rows, chunks.device)
        whole = ((basis.T if is_inverse else basis) @ whole.round_()).mul_(2.0**-_BASIS_BITS)
    return whole.mul_(unit).float()


def _unit(chunks: Tensor) -> Tensor:
    """Return a power of two for each chunk, of which none of its values is more than 2^22, (c, 1, 1) float64."""
    largest = chunks.abs().amax(dim=(1, 2), keepdim=True)
    exponent = (largest.view(torch.int32) >> 23).long() - 126  # the largest value is below 2^exponent
    return ((exponent - _VALUE_BITS + 1023) << 52).view(torch.float64)


def basis(n: int, device: torch.device) -> Tensor:
    """The orthonormal DCT-II for a length of n, (frequency, place) float64, each entry rounded to 24 bits."""
    return _basis(n, device).mul(2.0**-_BASIS_BITS)


@lru_cache(maxsize=256)
def _basis(n: int, device: torch.device) -> Tensor:
    """Whole numbers: 2^23 times the orthonormal DCT-II, (frequency, place) float64.

    Made of Python's floats on every machine, so it does not depend on a device's cosine.
    """
    if n > MAX_CHUNK:
        raise ValueError(f"chunks of {n} are too long for an exact transform; at most {MAX_CHUNK}")
    scale = 2.0**_BASIS_BITS * math.sqrt(2 / n)
    table = [
        [
            round(
                scale * (math.sqrt(0.5) if frequency == 0 else math.cos(math.pi * (2 * at + 1) * frequency / (2 * n)))
            )
            for at in range(n)
        ]
        for frequency in range(n)
    ]
    return torch.tensor(table, dtype=torch.float64, device=device)
