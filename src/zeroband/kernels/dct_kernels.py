"""What a node takes out of its momentum for a payload: the largest waves of each chunk, and the chunks they make.

Here in plain torch, exact (`dct`), as the truth and where there is no Triton; `dct_gpu` has both as one kernel each,
in float32. They are for what stays on the node: others get the waves by their places and values, and how those add up
to an update is for `dct` alone, so that all nodes get the same bits.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor

from zeroband.kernels import dct
from zeroband.kernels.probe import module_for
from zeroband.kernels.select import largest, place

MOST_IN_TRITON = 64
"""Longest side of a chunk whose transform fits into the shared memory of any GPU: three squares of float32."""


class DctKernels(Protocol):
    """The transform in both directions; all tensors of a call on one device, contiguous.

    The result of a chunk does not depend on the others of the call.
    """

    def choose(self, chunks: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k coefficients of largest size of each chunk, of equal ones the first.

        Shapes: chunks (c, rows, columns) float32, finite; k at most rows x columns. Gives places (c, k) of an integer
        type, row by row in the chunk's coefficients and ascending, and values (c, k) float32.
        """
        ...

    def restore(self, places: Tensor, values: Tensor, rows: int, columns: int) -> Tensor:
        """The chunks that these coefficients make and no others, (c, rows, columns) float32."""
        ...


def choose(chunks: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Implement `DctKernels.choose` in plain torch."""
    coefficients = dct.forward(chunks).flatten(1)
    places = largest(coefficients, k)
    return places, coefficients.gather(1, places)


def restore(places: Tensor, values: Tensor, rows: int, columns: int) -> Tensor:
    """Implement `DctKernels.restore` in plain torch."""
    return dct.inverse(place(places, values, rows * columns).view(-1, rows, columns))


@cache
def dct_kernels_on(device: torch.device, *, longest: int) -> DctKernels:
    """What serves on a device for chunks whose sides are at most `longest`."""
    triton = "zeroband.kernels.dct_gpu" if longest <= MOST_IN_TRITON else __name__
    return cast(DctKernels, module_for(device, triton=triton, plain=__name__))
