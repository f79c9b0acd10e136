"""Converts between Hugging Face's Llama `config.json` and this package's configuration. Touches no files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from pydantic import ValidationError

from zeroband.config.model import LlamaConfig
from zeroband.errors import ConfigError

FAMILIES = ("llama", "mistral")
"""Supported architectures of transformers."""
_SAME_ARITHMETIC: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "sliding_window": (None,),
}
"""Keys of `config.json` and the values for which both models compute the same; a key may be missing."""


class UnsupportedArchitecture(ConfigError):
    """A Llama variant that this package does not compute."""


def is_derived(name: str, config: LlamaConfig) -> bool:
    """Whether a tensor of a Hugging Face checkpoint follows from others: tied heads, rotary angles."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_embeddings and name == "lm_head.weight")


def hf_config(
    config: LlamaConfig, *, vocab_size: int, seq_length: int, end_of_document: int, dtype: str
) -> dict[str, Any]:
    """Return the `config.json` with which transformers and vLLM build this model.

    `rope_theta` and `torch_dtype` have the names that old and new versions both read. In training every document
    follows an end-of-document token, so that token is the begin-of-sequence token as well.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.ff_width,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.d_model // config.n_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": seq_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": end_of_document,
        "eos_token_id": end_of_document,
        "torch_dtype": dtype,
        "use_cache": True,
    }


def model_config_of(record: Mapping[str, Any], where: str) -> LlamaConfig:
    """Return this package's configuration of the model in a `config.json`; `where`: names the file in errors.

    Raises ConfigError with the key that is not supported.
    """
    if record.get("model_type") not in FAMILIES:
        raise ConfigError(f"{where}: model_type={record.get('model_type')!r}; it must be one of {', '.join(FAMILIES)}")
    for key, same in _SAME_ARITHMETIC.items():
        if key in record and record[key] not in same:
            raise UnsupportedArchitecture(
                f"{where}: {key}={record[key]!r}, which this model does not have; needed: {same[0]!r}"
            )
    try:
        config = LlamaConfig(
            d_model=record["hidden_size"],
            n_layers=record["num_hidden_layers"],
            n_heads=record["num_attention_heads"],
            n_kv_heads=record.get("num_key_value_heads"),
            d_ff=record["intermediate_size"],
            rope_theta=_rope_theta(record, where),
            norm_eps=record.get("rms_norm_eps", 1e-6),  # transformers' default
            tie_embeddings=record.get("tie_word_embeddings", False),
        )
    except KeyError as error:
        raise ConfigError(f"{where}: no key {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    head_size = record.get("head_dim") or config.d_model // config.n_heads
    if head_size != config.d_model // config.n_heads:
        raise UnsupportedArchitecture(
            f"{where}: head_dim={head_size}, which this model does not have; needed: hidden_size / num_attention_heads "
            f"= {config.d_model // config.n_heads}"
        )
    return config


def _rope_theta(record: Mapping[str, Any], where: str) -> float:
    """Return the base of the rotary embedding; from transformers 5 on it is in `rope_parameters`."""
    for key in ("rope_parameters", "rope_scaling"):
        rope: Any = record.get(key) or {}
        if not isinstance(rope, dict):
            raise ConfigError(f"{where}: {key}={rope!r:.80}, where an object is needed")
        rope = cast("dict[str, Any]", rope)
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise UnsupportedArchitecture(
                f"{where}: {key} of type {kind!r}, which this model does not have; needed: 'default'"
            )
        if "rope_theta" in rope:
            return rope["rope_theta"]
    return record.get("rope_theta", 10_000.0)


def differences(there: LlamaConfig, here: LlamaConfig) -> list[str]:
    """Describe the differences between two models, one phrase per key, with defaults resolved."""
    wanted, held = _resolved(there), _resolved(here)
    return [f"{key} is {wanted[key]!r} there and {held[key]!r} here" for key in wanted if wanted[key] != held[key]]


def _resolved(config: LlamaConfig) -> dict[str, Any]:
    named = config.model_dump() | {"n_kv_heads": config.kv_heads, "d_ff": config.ff_width}
    return {f"model.{key}": value for key, value in named.items()}
