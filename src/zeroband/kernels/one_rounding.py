"""Reproducible arithmetic: each operation rounds once to nearest, so the bits are equal on every processor.

Torch's CPU kernels round sums, products and quotients correctly, but fuse a product with a sum where the processor can.
Their square roots are MKL's, of which a sixth differs in the last bit between processor vendors; and while a first call
in another thread still detects the processor, a call may use the code of another one.
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
    """Return correctly rounded square roots of float32 or float64 on any device; not differentiable."""
    if values.device.type != "cpu":
        return values.sqrt()
    if type(values) not in (Tensor, nn.Parameter):
        # A DTensor has no numpy array; a float32 root is never so close to a rounding boundary that float64 errs.
        return values.double().sqrt().to(values.dtype)
    held = values.detach().numpy()
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.sqrt(held, out=np.empty_like(held)))


class OneRounding(TorchFunctionMode):
    """Replaces operations that torch may fuse, such as `addcdiv_`, and square roots by ones that round once each."""

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
    """Return what an operation adds to its first argument; None if torch does not fuse it."""
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
    """Whether an operation takes square roots without a gradient."""
    if name not in ("sqrt", "rsqrt") and not (name == "pow" and args[1] == 0.5):
        return False
    values = args[0]
    is_known = isinstance(values, Tensor) and values.dtype in _NUMPY_DTYPES
    return is_known and not (values.requires_grad and torch.is_grad_enabled())
