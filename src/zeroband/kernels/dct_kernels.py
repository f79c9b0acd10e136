"""Extraction of a payload from the momentum: the largest DCT coefficients of each chunk, and their inverse transform.

Here in plain torch, for CPUs and without Triton; `dct_gpu` has Triton kernels. Both sum in float32, in their own order.
They serve node-local state only: updates from payloads are always decoded by `dct`, so all nodes get the same bits.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor

from zeroband.kernels import dct
from zeroband.kernels.probe import module_for
from zeroband.kernels.select import largest

MOST_IN_TRITON = 64
"""Longest side of a chunk whose transform (three float32 squares) fits into the shared memory of any GPU."""


class DctKernels(Protocol):
    """Transform in both directions. Tensors of a call are contiguous and on one device; chunks are independent."""

    def choose(self, chunks: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest coefficients of each chunk by absolute value; ties go to the first.

        Shapes: chunks (c, rows, columns) float32, finite; k at most rows x columns. Returns indices (c, k) of an
        integer type into the flattened coefficients, ascending, and values (c, k) float32.
        """
        ...

    def restore(self, places: Tensor, values: Tensor, rows: int, columns: int) -> Tensor:
        """Return the inverse transform of these coefficients, (c, rows, columns) float32."""
        ...


def choose(chunks: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Implement `DctKernels.choose` in plain torch."""
    _, rows, columns = chunks.shape
    unit = _power_of_two_near(chunks.abs().amax(dim=(1, 2), keepdim=True))  # so that no sum overflows
    waves = dct.basis(rows, chunks.device), dct.basis(columns, chunks.device)
    coefficients = (waves[0] @ ((chunks / unit) @ waves[1].T)).flatten(1)
    places = largest(coefficients, k)
    return places, coefficients.gather(1, places) * unit.flatten(1)


def restore(places: Tensor, values: Tensor, rows: int, columns: int) -> Tensor:
    """Implement `DctKernels.restore` in plain torch: each coefficient is the product of a column and a row."""
    places = places.long()
    down = dct.basis(rows, values.device)[places // columns] * values[..., None]  # (c, k, rows)
    across = dct.basis(columns, values.device)[places % columns]
    return down.transpose(1, 2) @ across


def _power_of_two_near(sizes: Tensor) -> Tensor:
    """Return a normal float32 within a factor of 2 of each size, if that is normal and finite."""
    return ((sizes.view(torch.int32) >> 23).clamp(1, 253) << 23).view(torch.float32)


@cache
def dct_kernels_on(device: torch.device, *, longest: int) -> DctKernels:
    """Return the implementation for a device and chunks with sides of at most `longest`."""
    triton = "zeroband.kernels.dct_gpu" if longest <= MOST_IN_TRITON else __name__
    return cast(DctKernels, module_for(device, triton=triton, plain=__name__))
