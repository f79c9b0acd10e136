"""Small models of the presets' families, with norms that are not ones, as after training."""

from __future__ import annotations

import torch

from zeroband.config.schema import ModelConfig
from zeroband.data.tokenizer import ByteTokenizer
from zeroband.model import Transformer, init_weights
from zeroband.offline.directory import TrainedModel


def trained_of(config: ModelConfig, *, seed: int = 1, seq_length: int = 32) -> TrainedModel:
    """A byte-level model that reads from memory."""
    tokenizer = ByteTokenizer()
    model = Transformer(config, tokenizer.padded_vocab_size)
    init_weights(model, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return TrainedModel(config, tokenizer.padded_vocab_size, tokenizer, seq_length, model.state_dict().__getitem__)
