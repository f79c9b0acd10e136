"""Continuing a text with the model as it is trained: no cache, no early stop, any sharding."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zeroband.node.sharding import is_fsdp


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Run forward passes for their values only: no graph, evaluation mode, sharded parameters freed at the end.

    FSDP2 frees gathered parameters in the backward pass. Without one the root would keep them, and the next forward
    pass would use them even after new values were written into the shards.
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
    """The prompt and `max_new_tokens` sampled tokens after it.

    Each token sees the `context` tokens before it. Temperature 0 takes the likeliest token. Every local rank of a
    sharded model calls this with the same arguments: all run the same number of forward passes and draw from the same
    seed, so they stay in lock step and get the same answer.
    Shapes: prompt (t,) int64, t >= 1; gives (t + max_new_tokens,) int64 on the prompt's device.
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
