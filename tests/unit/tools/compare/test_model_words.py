"""A model in a sentence."""

from __future__ import annotations

from zeroband.config.model import LlamaConfig, TransformersConfig
from zeroband.tools.compare.page import model_in_words


def test_decoder_is_told_by_its_size_and_shape() -> None:
    config = LlamaConfig(d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=192, tie_embeddings=True)
    assert model_in_words(config, 1_234_567) == (
        "1.23M trained parameters: a Llama decoder of 2 layers, width 64, 4 heads over 2 of keys and values, "
        "SwiGLU of 192; embedding tied to the output head"
    )
    assert model_in_words(LlamaConfig(), 0).startswith("a Llama decoder of 4 layers, width 256, 4 heads, SwiGLU")


def test_other_model_is_told_by_its_keys() -> None:
    said = model_in_words(TransformersConfig(type="transformers", name="gpt2"), None)
    assert said.startswith("transformers (") and "name gpt2" in said
