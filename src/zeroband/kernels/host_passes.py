"""The passes of an outer round over parameters in host memory: compute the difference, apply the result.

C++ reads and writes each value once, on all of torch's threads; plain torch is the fallback with the same bits.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from zeroband.kernels import native
from zeroband.kernels.codec import is_native
from zeroband.kernels.fused import OuterStep
from zeroband.kernels.scan import largest

_CHUNK = 1 << 16
"""Values per operation of plain torch, so that temporaries stay in the cache."""

_MAX_THREADS = 64
"""More threads add no memory bandwidth."""


def write_difference(outer: Tensor, inner: Tensor, out: Tensor, *, variant: int = -1, threads: int = 0) -> float:
    """Write outer - inner, and return its largest absolute value as `scan.largest` does.

    Shapes: all (n,) float32 on CPU. `variant`: as for a codec. `threads`: 0: torch's number of threads.
    """
    if not _is_native(outer, inner, out):
        return largest(torch.sub(outer, inner, out=out))
    found, pointers = ctypes.c_float(), (outer.data_ptr(), inner.data_ptr())
    difference, size = native.load().zb_difference, (out.numel(), out.data_ptr())
    native.require_done(difference(variant, _threads(threads), *pointers, *size, ctypes.byref(found)))
    return found.value


def take_step(
    params: Tensor, momentum: Tensor, delta: Tensor, step: OuterStep, *, variant: int = -1, threads: int = 0
) -> None:
    """Take an outer step in place. Arguments as for `write_difference`."""
    if _is_native(params, momentum, delta):
        pointers, settings = (params.data_ptr(), momentum.data_ptr(), delta.data_ptr()), (step.lr, step.momentum)
        sgd, numel = native.load().zb_outer_sgd, params.numel()
        native.require_done(sgd(variant, _threads(threads), *pointers, numel, *settings, step.is_nesterov))
        return
    for theta, v, part in zip(params.split(_CHUNK), momentum.split(_CHUNK), delta.split(_CHUNK), strict=True):
        v.mul_(step.momentum).add_(part)
        change = v.mul(step.momentum).add_(part) if step.is_nesterov else v.clone()
        theta.sub_(change.mul_(step.lr))


def copy_away(source: Tensor, out: Tensor, *, variant: int = -1, threads: int = 0) -> None:
    """Copy, bypassing the cache. Arguments as for `write_difference`; `out` may be on any device."""
    if not _is_native(source, out):
        out.copy_(source)
        return
    copy, pointers = native.load().zb_copy, (source.data_ptr(), source.numel(), out.data_ptr())
    native.require_done(copy(variant, _threads(threads), *pointers))


def _threads(asked: int) -> int:
    return asked or min(torch.get_num_threads(), _MAX_THREADS)


def _is_native(*tensors: Tensor) -> bool:
    """Whether the native library can process tensors of equal length."""
    numel = tensors[0].numel()
    fits = all(
        one.dtype == torch.float32 and one.device.type == "cpu" and one.is_contiguous() and one.numel() == numel
        for one in tensors
    )
    return fits and is_native()
