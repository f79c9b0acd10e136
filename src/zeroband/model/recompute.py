"""Activation checkpointing: which activations of a block are kept, and which are recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_T = TypeVar("_T")

PRODUCTS_OF_BLOCK = 7
"""Query, key, value, output; gate, up, down. Only the residual stream uses the last one's result."""

_PRODUCTS = {"aten.mm.default", "aten._scaled_mm.default"}
_COSTLY = {
    *_PRODUCTS,
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "torch_attn._varlen_attn.default",
}
"""Operators whose results selective checkpointing keeps; norms, rotations and gates are cheap to recompute."""


def recomputed(how: Literal["selective", "full"], run: Callable[..., _T], *args: object, draws: bool = False) -> _T:
    """Return run(*args); the backward pass recomputes all activations (`full`) or the cheap ones (`selective`).

    `draws`: whether `run` uses random numbers.
    """
    if how == "full":
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=draws)
    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=draws, context_fn=_selective)


def _selective() -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(_CostlyResults())


class _CostlyResults:
    """Policy for one forward pass through a block and its recomputation."""

    def __init__(self) -> None:
        self._products = {False: 0, True: 0}
        """Matrix products so far, by whether they are recomputed."""

    def __call__(self, context: Any, operator: object, *_: object, **__: object) -> CheckpointPolicy:
        if (name := str(operator)) not in _COSTLY:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if name in _PRODUCTS:
            self._products[context.is_recompute] += 1
            if self._products[context.is_recompute] == PRODUCTS_OF_BLOCK:
                return CheckpointPolicy.PREFER_RECOMPUTE  # the backward pass does not need it
        return CheckpointPolicy.MUST_SAVE
