"""Activation checkpointing: which activations of a block are kept for the backward pass, and which are made again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_T = TypeVar("_T")

PRODUCTS_OF_BLOCK = 7
"""Query, key, value, output; gate, up, down. The last one's result goes into the residual stream alone."""

_PRODUCTS = {"aten.mm.default", "aten._scaled_mm.default"}
_COSTLY = {
    *_PRODUCTS,
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "torch_attn._varlen_attn.default",
}
"""Operators whose results selective checkpointing keeps; norms, rotations and gates are cheap to make again."""


def recomputed(how: Literal["selective", "full"], run: Callable[..., _T], *args: object, draws: bool = False) -> _T:
    """Return run(*args), of whose activations the backward pass makes all (`full`) or the cheap ones again."""
    if how == "full":
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=draws)
    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=draws, context_fn=_selective)


def _selective() -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(_CostlyResults())


class _CostlyResults:
    """The policy of one pass through a block, and of making its activations again."""

    def __init__(self) -> None:
        self._products = {False: 0, True: 0}
        """Products of matrices so far, in the pass and when they are made again."""

    def __call__(self, context: Any, operator: object, *_: object, **__: object) -> CheckpointPolicy:
        if (name := str(operator)) not in _COSTLY:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if name in _PRODUCTS:
            self._products[context.is_recompute] += 1
            if self._products[context.is_recompute] == PRODUCTS_OF_BLOCK:
                return CheckpointPolicy.PREFER_RECOMPUTE  # nothing needs it, so it is not made again either
        return CheckpointPolicy.MUST_SAVE
