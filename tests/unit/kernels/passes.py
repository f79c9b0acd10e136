"""Values for the two passes of an outer round, and what plain torch on the CPU makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroband.kernels.codec import CODECS
from zeroband.kernels.fused import BLOCK, OuterStep, Passes

INT8 = CODECS["int8"]
LARGEST = torch.finfo(torch.float32).max


def noise(n: int, *, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed + 7919 * n))


def _halfway(n: int) -> Tensor:
    """Between two levels, as nearly as float32 can say it: rounding decides about every value."""
    top = (1 + torch.rand(-(-n // BLOCK), generator=torch.Generator().manual_seed(n))).repeat_interleave(BLOCK)[:n]
    x = ((torch.arange(n) % 127 + 0.5).double() * top.double() / 127).float()
    x[::BLOCK] = top[::BLOCK]
    return x


def _sizes(n: int) -> Tensor:
    """Blocks of very different sizes, some of them next to nothing."""
    scales = torch.tensor([1e-6, 2.0**-118, 2.0**-119, 1e30, 2.0**-140, 1.0])
    return noise(n).clamp(-1, 1) * scales[torch.arange(n) // BLOCK % len(scales)]


DIFFERENCES: dict[str, Callable[[int], Tensor]] = {
    "noise": noise,
    "an update": lambda n: 1e-3 * noise(n),
    "zeros": torch.zeros,
    "halfway between levels": _halfway,
    "blocks of many sizes": _sizes,
    "denormals": lambda n: noise(n) * 2.0**-140,
    "outliers of 1e6": lambda n: torch.where(torch.arange(n) % 101 == 0, 1e6, noise(n)),
    "near the largest float32": lambda n: LARGEST * (1 - noise(n).abs() / 64).clamp(-1, 1) * (-1.0) ** torch.arange(n),
}


@dataclass(frozen=True)
class Stepped:
    """The outer state of some values and the inner parameters that begin from it."""

    params: Tensor
    momentum: Tensor
    inner: Tensor


def encode(passes: Passes, outer: Tensor, inner: Tensor) -> tuple[Tensor, bool]:
    """The encoding of outer - inner as bytes on the CPU, and whether something in it was not finite."""
    n = outer.numel()
    scales = torch.full((n // BLOCK,), float("nan"), device=outer.device)
    codes = torch.full((n,), 99, dtype=torch.int8, device=outer.device)
    has_bad = torch.zeros(1, dtype=torch.int32, device=outer.device)
    passes.encode_difference(outer, inner, scales, codes, has_bad)
    return torch.cat([scales.cpu().view(torch.uint8), codes.cpu().view(torch.uint8)]), bool(has_bad.item())


def step(
    passes: Passes, data: Tensor, start: int, stop: int, rule: OuterStep, dtype: torch.dtype, device: str
) -> Stepped:
    """An outer step on the values [start, stop) of an encoding, from a state that follows from their number."""
    n = stop - start
    blocks = (data.numel() + BLOCK + 3) // (BLOCK + 4)
    scales, codes = data[: 4 * blocks].view(torch.float32), data[4 * blocks :].view(torch.int8)
    first, last = start // BLOCK, -(-stop // BLOCK)
    params, momentum = noise(n, seed=1).to(device), (1e-3 * noise(n, seed=2)).to(device)
    inner = torch.zeros(n, dtype=dtype, device=device)
    part = (scales[first:last].clone().to(device), codes[start:stop].clone().to(device))
    passes.take_step(*part, start - first * BLOCK, params, momentum, inner, rule)
    return Stepped(params.cpu(), momentum.cpu(), inner.cpu())


def is_same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, so that 0 and -0 differ."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
