"""Sampling from a model in training: no KV cache, no early stop, any sharding."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zeroband.node.sharding import is_fsdp


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Run forward passes without gradients, in evaluation mode, and free gathered parameters at the end.

    FSDP2 frees gathered parameters in the backward pass. Without one the root would keep them, and the next forward
    pass would use stale values after the shards change.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
        for module in model.modules():
            if is_fsdp(module):
                module.reshard()


def generate(
    model: nn.Module, prompt: Tensor, *, max_new_tokens: int, temperature: float, seed: int, context: int
) -> Tensor:
    """Return the prompt followed by `max_new_tokens` sampled tokens, each conditioned on the last `context` tokens.

    Temperature 0 is greedy. Every local rank of a sharded model calls this with the same arguments, runs the same
    number of forward passes and gets the same result.
    Shapes: prompt (t,) int64, t >= 1; returns (t + max_new_tokens,) int64 on the prompt's device.
    Raises: ValueError for an empty prompt, a context below 1 or a negative temperature.
    """
    if prompt.ndim != 1 or prompt.numel() == 0:
        raise ValueError(f"the prompt has shape {tuple(prompt.shape)}; it needs one dimension and at least one token")
    if context < 1 or temperature < 0:
        raise ValueError(f"context={context} must be at least 1 and temperature={temperature} at least 0")
    generator = torch.Generator().manual_seed(seed)
    tokens = prompt
    with evaluating(model):
        for _ in range(max_new_tokens):
            logits = model(tokens[None, -context:], None)[0, -1]  # (v,)
            chosen = _choose(logits.float().cpu(), temperature, generator)
            tokens = torch.cat((tokens, chosen.to(tokens)))
    return tokens


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax(keepdim=True)
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
