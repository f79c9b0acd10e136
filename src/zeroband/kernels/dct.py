"""The inverse of the orthonormal DCT-II of chunks, with the same bits on every processor, GPU and library.

Nodes apply the updates that they decode from payloads, so all must decode the same bits or diverge silently, and a
float32 matrix product depends on the order of its additions. Here both factors are integers scaled by powers of two,
small enough that every product and partial sum of a chunk is an integer below 2^53: float64 adds them exactly in any
order, fused or not. Rounding happens elementwise, to even.

Precision: 2^-23 of the chunk's largest value, like float32.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

MAX_CHUNK = 128
"""Longest side of a chunk with exact sums: 2^22 x 2^23 x sqrt(128) x sqrt(128) = 2^52."""

_VALUE_BITS, _BASIS_BITS = 22, 23


def inverse(coefficients: Tensor) -> Tensor:
    """Invert the transform of both dimensions. Shapes: (c, rows, columns) float32, finite; returns the same."""
    _, rows, columns = coefficients.shape
    unit = _unit(coefficients)  # (c, 1, 1)
    waves = _basis(rows, coefficients.device)
    if (occupied := _occupied_rows(coefficients)) is not None:
        coefficients = coefficients.gather(1, occupied[..., None].expand(-1, -1, columns))
        waves = waves[occupied]  # (c, rows with values, rows)
    whole = coefficients.double().div_(unit).round_()
    if columns > 1:
        whole = (whole @ _basis(columns, coefficients.device)).mul_(2.0**-_BASIS_BITS)
    if rows > 1:
        whole = (waves.mT @ whole.round_()).mul_(2.0**-_BASIS_BITS)
    return whole.mul_(unit).float()


def _occupied_rows(coefficients: Tensor) -> Tensor | None:
    """Return the rows of each chunk that have values, filled up with others, (c, most); None if all are to be summed.

    A few nodes' payloads occupy a quarter of the rows, and rows of zeros add nothing to sums that do not round.
    """
    count, rows, _ = coefficients.shape
    if count == 0 or rows == 1 or coefficients.device.type != "cpu":  # a GPU would have to wait for `most`
        return None
    is_occupied = (coefficients != 0).any(dim=2)
    most = max(1, int(is_occupied.sum(dim=1).max()))
    return None if 2 * most > rows else is_occupied.byte().argsort(dim=1, descending=True)[:, :most]


def _unit(chunks: Tensor) -> Tensor:
    """Return for each chunk the power of two that scales its values to at most 2^22, (c, 1, 1) float64."""
    largest = chunks.abs().amax(dim=(1, 2), keepdim=True)
    exponent = (largest.view(torch.int32) >> 23).long() - 126  # largest < 2^exponent
    return ((exponent - _VALUE_BITS + 1023) << 52).view(torch.float64)


@lru_cache(maxsize=256)
def basis(n: int, device: torch.device) -> Tensor:
    """Return the orthonormal DCT-II matrix of length n, (frequency, position) float32."""
    return _basis(n, device).mul(2.0**-_BASIS_BITS).float()  # exact: integers of 24 bits


@lru_cache(maxsize=256)
def _basis(n: int, device: torch.device) -> Tensor:
    """Return 2^23 times the orthonormal DCT-II matrix, rounded to integers, (frequency, position) float64.

    Computed with Python floats, so it does not depend on a device's cosine.
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
