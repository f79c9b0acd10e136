"""Text that a trained model continues a prompt with."""

from __future__ import annotations

import torch

from zeroband.data.chat import prompt_of
from zeroband.export.directory import TrainedModel
from zeroband.model.generate import generate


def continuation(
    model: TrainedModel, prompt: str, device: torch.device, *, tokens: int, temperature: float, seed: int
) -> str:
    """What follows a prompt at the start of a document, up to its end; in a chat, what the assistant answers."""
    ids, end = prompt_of(model.tokenizer, prompt)
    begun = ids.tolist() if model.tokenizer.chat_template else [end, *ids.tolist()]
    generated = generate(
        model.build(device),
        torch.tensor(begun, device=device),
        max_new_tokens=tokens,
        temperature=temperature,
        seed=seed,
        context=model.seq_length,
    ).tolist()[len(begun) :]
    return model.tokenizer.decode(generated[: generated.index(end)] if end in generated else generated)
