"""The two passes of `fused` in Triton; each value is read and written once.

Needs triton, which comes with torch's CUDA wheels. Runs on NVIDIA GPUs, and with `TRITON_INTERPRET=1` on CPU tensors.
Without fused multiply-add, with correctly rounded quotients and subnormals, every bit equals that of `reference` and of
`outer.optimizer.OuterSGD`.
"""

# Triton has no type stubs, and a kernel's parameters are what it is launched with.
# pyright: reportMissingTypeStubs=false, reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zeroband.kernels import reference
from zeroband.kernels.fused import BLOCK, OuterStep

_TILE = 8
"""Blocks per program."""

_WARPS = 4
_TINY = tl.constexpr(reference.TINY)
_MOST = tl.constexpr(float(reference.LARGEST / 127))
"""Largest scale that cannot overflow in decoding."""

_MAGIC = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding and subtracting it rounds to the nearest integer, ties to even."""

_INFINITE = tl.constexpr(0x7F800000)


@triton.jit
def encode_kernel(outer, inner, scales, codes, has_bad, blocks, block: tl.constexpr, tile: tl.constexpr):
    """Encode `tile` blocks."""
    rows = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    at = rows[:, None] * block + tl.arange(0, block)[None, :]  # (tile, block)
    is_there = rows < blocks
    mask = is_there[:, None]
    delta = tl.load(outer + at, mask=mask, other=0.0) - tl.load(inner + at, mask=mask, other=0.0).to(tl.float32)
    bits = delta.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    top = tl.max(bits, axis=1)  # (tile,); >= _INFINITE if a value is not finite
    tl.store(has_bad, 1, mask=tl.max(top, axis=0) >= _INFINITE)
    largest = top.to(tl.float32, bitcast=True)
    is_tiny = largest < _TINY
    scale = tl.minimum(tl.div_rn(largest, 127.0), _MOST)
    inverse = tl.where(is_tiny, 0.0, tl.div_rn(127.0, tl.where(is_tiny, 1.0, largest)))
    rounded = (delta * inverse[:, None] + _MAGIC) - _MAGIC
    tl.store(codes + at, rounded.to(tl.int8), mask=mask)
    tl.store(scales + rows, tl.where(is_tiny, 0.0, scale), mask=is_there)


@triton.jit
def step_kernel(
    scales, codes, skip, outer, momentum, inner, n, lr, mu,
    is_nesterov: tl.constexpr, block: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Decode `tile` blocks, take the outer step, and write parameters, momentum and inner parameters."""
    rows = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    at = rows[:, None] * block + tl.arange(0, block)[None, :] - skip  # (tile, block)
    mask = (at >= 0) & (at < n)
    scale = tl.load(scales + rows, mask=rows * block < n + skip, other=0.0)
    delta = tl.load(codes + at, mask=mask, other=0).to(tl.float32) * scale[:, None]
    velocity = tl.load(momentum + at, mask=mask, other=0.0) * mu + delta
    change = velocity
    if is_nesterov:
        change = velocity * mu + delta
    theta = tl.load(outer + at, mask=mask, other=0.0) - change * lr
    tl.store(momentum + at, velocity, mask=mask)
    tl.store(outer + at, theta, mask=mask)
    tl.store(inner + at, theta.to(inner.dtype.element_ty), mask=mask)


def encode_difference(outer: Tensor, inner: Tensor, scales: Tensor, codes: Tensor, has_bad: Tensor) -> None:
    """Implement `fused.Passes.encode_difference`. Asynchronous."""
    blocks = scales.numel()
    if outer.numel() != blocks * BLOCK:
        raise ValueError(f"{blocks} scales belong to {blocks * BLOCK} values, not {outer.numel()}")
    if blocks:
        encode_kernel[(triton.cdiv(blocks, _TILE),)](
            outer, inner, scales, codes, has_bad, blocks,
            block=BLOCK, tile=_TILE, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def take_step(
    scales: Tensor, codes: Tensor, skip: int, params: Tensor, momentum: Tensor, inner: Tensor, step: OuterStep
) -> None:
    """Implement `fused.Passes.take_step`. Asynchronous."""
    n, blocks = codes.numel(), scales.numel()
    if triton.cdiv(skip + n, BLOCK) != blocks:
        raise ValueError(f"{n} values after {skip} take {triton.cdiv(skip + n, BLOCK)} blocks, not {blocks}")
    if n:
        step_kernel[(triton.cdiv(blocks, _TILE),)](
            scales, codes, skip, params, momentum, inner, n, step.lr, step.momentum,
            is_nesterov=step.is_nesterov, block=BLOCK, tile=_TILE, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
