"""Arithmetic that comes to the same bits on every processor: each operation rounds once, to the nearest number.

Torch's CPU kernels do so for sums, products and quotients. Where a processor can, they fuse a product with a sum. Their
square roots are MKL's: on a processor of one maker a sixth of them has another last bit than on one of another, and
while a first call in another thread still looks for the processor, a call may use the code of another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_NUMPY_DTYPES = (torch.float32, torch.float64)


def exact_sqrt(values: Tensor) -> Tensor:
    """Square roots, rounded once, of float32 or float64 on any device; no gradient passes through them."""
    if values.device.type != "cpu":
        return values.sqrt()
    if type(values) not in (Tensor, nn.Parameter):
        # A DTensor gives no array. No root of a float32 lies so near to the middle of two that a double's error counts.
        return values.double().sqrt().to(values.dtype)
    held = values.detach().numpy()
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.sqrt(held, out=np.empty_like(held)))


class OneRounding(TorchFunctionMode):
    """Computes what torch may fuse, such as `addcdiv_`, in operations that round once each; and so square roots."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, options = getattr(func, "__name__", ""), dict(kwargs or {})
        plain, target = name.removesuffix("_"), args[0] if name.endswith("_") else options.get("out")
        term = _term(plain, args, options)
        if term is not None:
            return torch.add(args[0], term, out=target)
        if _is_root(plain, args):
            root = exact_sqrt(args[0])
            root = root.reciprocal() if plain == "rsqrt" else root
            return root if target is None else target.copy_(root)
        return func(*args, **options)


def _term(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> Tensor | None:
    """What an operation adds to its first argument; None where torch fuses nothing."""
    alpha, value = options.get("alpha", 1), options.get("value", 1)
    match name:
        case "add" if alpha != 1:
            return args[1] * alpha
        case "sub" if alpha != 1:
            return args[1] * -alpha
        case "addcmul":
            return (args[1] * args[2]) * value
        case "addcdiv":
            return (args[1] / args[2]) * value
        case "lerp":
            return (args[1] - args[0]) * args[2]
        case _:
            return None


def _is_root(name: str, args: Sequence[Any]) -> bool:
    """Whether an operation takes square roots that no gradient is to pass through."""
    if name not in ("sqrt", "rsqrt") and not (name == "pow" and args[1] == 0.5):
        return False
    values = args[0]
    is_known = isinstance(values, Tensor) and values.dtype in _NUMPY_DTYPES
    return is_known and not (values.requires_grad and torch.is_grad_enabled())
