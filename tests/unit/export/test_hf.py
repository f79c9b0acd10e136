"""`config.json` of Hugging Face's Llama, written from our configuration and read back."""

from __future__ import annotations

import re
from typing import Any

import pytest

from zeroband.config.model import LlamaConfig
from zeroband.errors import ConfigError
from zeroband.export.hf import differences, hf_config, model_config_of

GROUPED = LlamaConfig(d_model=64, n_layers=3, n_heads=8, n_kv_heads=2, d_ff=96, rope_theta=5e5, tie_embeddings=True)
RECORD = hf_config(GROUPED, vocab_size=320, seq_length=128, end_of_document=256, dtype="float32")


@pytest.mark.parametrize("config", [LlamaConfig(), GROUPED])
def test_config_reads_back_as_the_same_model(config: LlamaConfig) -> None:
    record = hf_config(config, vocab_size=320, seq_length=128, end_of_document=256, dtype="bfloat16")
    assert differences(model_config_of(record, "config.json"), config) == []


def test_rope_theta_is_found_where_transformers_5_writes_it() -> None:
    record = {key: value for key, value in RECORD.items() if not key.startswith("rope")}
    record["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    assert model_config_of(record, "config.json") == GROUPED


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2'; it must be one of llama, mistral"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu', which this model does not have; needed: 'silu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"head_dim": 16}, "head_dim=16"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling of type 'linear'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_parameters of type 'llama3'"),
        ({"num_attention_heads": 7}, "model.d_model=64 is not a multiple of model.n_heads=7"),
    ],
)
def test_model_that_ours_cannot_be_is_refused_by_its_key(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=rf"^dir/config\.json: .*{re.escape(complaint)}"):
        model_config_of(RECORD | change, "dir/config.json")


def test_missing_key_is_named() -> None:
    record = {key: value for key, value in RECORD.items() if key != "hidden_size"}
    with pytest.raises(ConfigError, match=r"^dir/config\.json: no key 'hidden_size'"):
        model_config_of(record, "dir/config.json")


def test_differences_name_both_values_and_resolve_defaults() -> None:
    here = LlamaConfig(d_model=64, n_heads=8, n_kv_heads=8, d_ff=192)
    assert differences(LlamaConfig(d_model=64, n_heads=8), here) == []
    assert differences(GROUPED, here) == [
        "model.n_layers is 3 there and 4 here",
        "model.n_kv_heads is 2 there and 8 here",
        "model.d_ff is 96 there and 192 here",
        "model.rope_theta is 500000.0 there and 10000.0 here",
        "model.tie_embeddings is True there and False here",
    ]
