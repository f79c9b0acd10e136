"""Activation checkpointing: which activations of a block are kept for the backward pass, and which are made again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_COSTLY = {
    "aten.mm.default",
    "aten._scaled_mm.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "torch_attn._varlen_attn.default",
}
"""Operators whose results selective checkpointing keeps; norms, rotations and gates are cheap to make again."""


def recomputed(how: Literal["selective", "full"], run: Callable[..., Tensor], *args: object) -> Tensor:
    """Return run(*args), of whose activations the backward pass makes all (`full`) or the cheap ones again."""
    if how == "full":
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _policy(_context: object, operator: object, *_: object, **__: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if str(operator) in _COSTLY else CheckpointPolicy.PREFER_RECOMPUTE
