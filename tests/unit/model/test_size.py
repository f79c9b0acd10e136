"""Closed-form sizes against a built model."""

import pytest
import torch

from zeroband.config.model import LlamaConfig
from zeroband.model import Transformer, flops_per_token, parameter_count

SHAPES = [
    LlamaConfig(d_model=64, n_layers=3, n_heads=4),
    LlamaConfig(d_model=64, n_layers=3, n_heads=4, n_kv_heads=2, tie_embeddings=True),
    LlamaConfig(d_model=2048, n_layers=22, n_heads=32, n_kv_heads=4, d_ff=5632),
]


@pytest.mark.parametrize("config", SHAPES)
def test_parameter_count_equals_built_model(config: LlamaConfig) -> None:
    with torch.device("meta"):
        model = Transformer(config, 1000)
    assert parameter_count(config, 1000) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("config", SHAPES)
def test_flops_per_token_equals_counted_matrix_products(config: LlamaConfig) -> None:
    with torch.device("meta"):
        model = Transformer(config, 1000)
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    head = 1000 * config.d_model
    scores_and_values = 2 * 2 * config.d_model * 128  # q k^T and p v, a multiplication and an addition each
    assert flops_per_token(config, 1000, 128) == 6 * (linear + head) + 3 * config.n_layers * scores_and_values


def test_parameter_count_of_tinyllama_is_the_published_one() -> None:
    assert parameter_count(SHAPES[2], 32_000) == 1_100_048_384
