"""The two passes of an outer round over parameters on a GPU: encode the difference, apply the result.

Here in plain torch, as the reference and without Triton; `gpu` has one Triton kernel each. Both produce the bytes of
the codec `int8`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from zeroband.kernels import reference
from zeroband.kernels.probe import module_for

BLOCK = 256
"""Values that share a scale, as in the codec `int8`."""


@dataclass(frozen=True)
class OuterStep:
    """v <- momentum v + delta; params <- params - lr (delta + momentum v) with Nesterov, else params - lr v.

    In float32; each operation rounds once.
    """

    lr: float
    momentum: float
    is_nesterov: bool


class Passes(Protocol):
    """The two passes of a round. Tensors of a call are contiguous and on one device."""

    def encode_difference(self, outer: Tensor, inner: Tensor, scales: Tensor, codes: Tensor, has_bad: Tensor) -> None:
        """Write the encoding of outer - inner; set `has_bad` to 1 if a difference is not finite.

        Shapes: outer (n,) float32, inner (n,) float32 or bfloat16, n a multiple of 256; scales (n / 256,) float32,
        codes (n,) int8, has_bad (1,) int32. Blocks with a non-finite difference are undefined.
        """
        ...

    def take_step(
        self, scales: Tensor, codes: Tensor, skip: int, params: Tensor, momentum: Tensor, inner: Tensor, step: OuterStep
    ) -> None:
        """Take the outer step with an encoded mean in place, and copy the parameters to `inner`.

        Shapes: codes (n,) int8, which begin `skip` values into the first block; scales (ceil((skip + n) / 256),)
        float32; params and momentum (n,) float32; inner (n,) float32 or bfloat16.
        """
        ...


def encode_difference(outer: Tensor, inner: Tensor, scales: Tensor, codes: Tensor, has_bad: Tensor) -> None:
    """Implement `Passes.encode_difference` in plain torch."""
    difference = outer - inner.to(torch.float32)
    has_bad.logical_or_(~torch.isfinite(difference).all())
    data = reference.encode_int8(difference, BLOCK)
    border = 4 * scales.numel()
    scales.copy_(data[:border].view(torch.float32))
    codes.copy_(data[border:].view(torch.int8))


def take_step(
    scales: Tensor, codes: Tensor, skip: int, params: Tensor, momentum: Tensor, inner: Tensor, step: OuterStep
) -> None:
    """Implement `Passes.take_step` in plain torch."""
    delta = scales.repeat_interleave(BLOCK)[skip : skip + codes.numel()] * codes.to(torch.float32)
    momentum.mul_(step.momentum).add_(delta)
    change = momentum.mul(step.momentum).add_(delta) if step.is_nesterov else momentum.clone()
    params.sub_(change.mul_(step.lr))
    inner.copy_(params)


def passes_on(device: torch.device) -> Passes:
    """Return the implementation for a device."""
    found = module_for(device, triton="zeroband.kernels.gpu", plain=__name__)
    return cast(Passes, found)
