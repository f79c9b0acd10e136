"""The [model] section: the trained model, one tagged variant per way to describe it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, PositiveFloat, PositiveInt, field_validator, model_validator

from zeroband.config.section import NODE_LOCAL, Section, key_value


class LlamaConfig(Section):
    """This package's Llama decoder, with the fastest path."""

    type: Literal["llama"] = "llama"
    d_model: PositiveInt = 256
    """Width of the residual stream."""
    n_layers: PositiveInt = 4
    """Number of decoder blocks."""
    n_heads: PositiveInt = 4
    """Query heads; must divide d_model."""
    n_kv_heads: PositiveInt | None = None
    """Key and value heads (grouped-query attention). None: as many as query heads."""
    d_ff: PositiveInt | None = None
    """Hidden width of SwiGLU. None: 8/3 of d_model, rounded up to a multiple of 64."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary position embedding; larger for long contexts."""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon of RMSNorm."""
    tie_embeddings: bool = False
    """Share the embedding with the output head; saves parameters in small models."""

    @model_validator(mode="after")
    def _heads_divide(self) -> LlamaConfig:
        if self.d_model % self.n_heads:
            raise ValueError(f"model.d_model={self.d_model} is not a multiple of model.n_heads={self.n_heads}")
        if self.d_model // self.n_heads % 2:
            size = self.d_model // self.n_heads
            raise ValueError(f"model.d_model / model.n_heads = {size} is odd; rotary embedding needs an even head size")
        if self.n_kv_heads is not None and self.n_heads % self.n_kv_heads:
            raise ValueError(f"model.n_heads={self.n_heads} is not a multiple of model.n_kv_heads={self.n_kv_heads}")
        return self

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    @property
    def head_size(self) -> int:
        return self.d_model // self.n_heads

    @property
    def ff_width(self) -> int:
        return self.d_ff or -(-self.d_model * 8 // 3 // 64) * 64


class LoraConfig(Section):
    """Low-rank adapters for the linear layers, by peft: only they are trained and exchanged."""

    r: PositiveInt = 16
    """Rank of the adapters."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapters: their output is multiplied by alpha / r."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapters' inputs."""
    target_modules: tuple[str, ...] = Field(default=("all-linear",), min_length=1)
    """Suffixes of the names of adapted layers, such as q_proj, v_proj. all-linear: every linear layer except the head.
    """


_LOADING = {
    *("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "experts_implementation"),
    *("_experts_implementation", "allow_all_kernels", "use_kernels", "kernel_config", "trust_remote_code"),
    *("code_revision", "custom_pipelines", "cache_dir", "proxies", "token", "use_auth_token", "local_files_only"),
    *("force_download", "resume_download", "subfolder", "revision", "gguf_file", "user_agent", "return_unused_kwargs"),
    *("_configuration_file", "_from_auto", "_from_pipeline", "_commit_hash"),
}
"""Keys of transformers that select code or its download. They do not describe a model."""


def _loading_keys(value: JsonValue) -> set[str]:
    """Return those keys in a table and in tables within it."""
    if isinstance(value, list):
        return set[str]().union(*map(_loading_keys, value))
    return set(value) & _LOADING | _loading_keys([*value.values()]) if isinstance(value, dict) else set()


class TransformersConfig(Section):
    """A causal language model of transformers (extra `hf`).

    Parameters are float32 and keep transformers' names; train.dtype is the compute type.
    """

    type: Literal["transformers"]
    name: str | None = Field(default=None, min_length=1, json_schema_extra=NODE_LOCAL)
    """Name on the Hugging Face Hub, or a folder written by `save_pretrained`, equal on every node. Its tokenizer is the
    run's unless data.tokenizer is set. None: `config` describes the model."""
    weights: Literal["pretrained", "random"] = "pretrained"
    """pretrained: start from the weights of `name`. random: from run.seed."""
    config: dict[str, JsonValue] | None = None
    """transformers' configuration, instead of `name` or overriding its values: a table [model.config] with model_type,
    hidden_size, num_hidden_layers and so on. None: that of `name`."""
    attention: str | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """transformers' attn_implementation: sdpa, eager, flex_attention, flash_attention_2. None: transformers' default.
    """
    lora: LoraConfig | None = None
    """Train only adapters. None: train every parameter."""

    @field_validator("config")
    @classmethod
    def _is_about_the_model(cls, config: dict[str, JsonValue] | None) -> dict[str, JsonValue] | None:
        if keys := sorted(_loading_keys(config)):
            raise ValueError(
                f"model.config.{keys[0]} says which code to run, or how to fetch it, which each node decides for "
                "itself: drop it; model.attention chooses the attention"
            )
        return config

    @model_validator(mode="after")
    def _describes_a_model(self) -> TransformersConfig:
        if self.name is None and (self.config is None or "model_type" not in self.config):
            raise ValueError(
                'model.type="transformers" needs model.name, such as "Qwen/Qwen3-0.6B" or a directory, or a table '
                "[model.config] with model_type"
            )
        return self

    @property
    def is_pretrained(self) -> bool:
        """Whether to start from pretrained weights."""
        return self.name is not None and self.weights == "pretrained"


class CustomModelConfig(Section):
    """A torch module from a user's file."""

    type: Literal["custom"]
    file: Path = Field(json_schema_extra=NODE_LOCAL)
    """File with a function `build(config)` that returns the module, as in examples/own_model.py. Must be equal on all
    nodes."""
    settings: tuple[str, ...] = ()
    """KEY=VALUE for each entry of `config.settings` in `build`; values as in JSON."""

    @field_validator("settings")
    @classmethod
    def _are_pairs(cls, settings: tuple[str, ...]) -> tuple[str, ...]:
        for setting in settings:
            key_value(setting)
        return settings

    @property
    def named_settings(self) -> dict[str, Any]:
        """The settings by key."""
        return dict(map(key_value, self.settings))


Model = Annotated[LlamaConfig | TransformersConfig | CustomModelConfig, Field(discriminator="type")]


def parameter_count(config: Model, vocab_size: int) -> int:
    """Return the number of trainable values, a tied head counted once; 0 if the model must be built to tell."""
    if not isinstance(config, LlamaConfig):
        return 0
    embeddings = vocab_size * config.d_model * (1 if config.tie_embeddings else 2)
    norms = (2 * config.n_layers + 1) * config.d_model
    return embeddings + norms + matrix_parameter_count(config)


def matrix_parameter_count(config: LlamaConfig) -> int:
    """Return the number of values in the matrices between embedding and head, which Muon steps."""
    kv_width = config.d_model // config.n_heads * config.kv_heads
    attention = 2 * config.d_model * (config.d_model + kv_width)
    return config.n_layers * (attention + 3 * config.d_model * config.ff_width)


def flops_per_token(config: LlamaConfig, vocab_size: int, seq_length: int) -> int:
    """Return the floating-point operations of one training token, forward and backward, for MFU.

    6 N + 12 L d t: N counts the matrices that multiply a token (the head, tied or not, but neither the embedding
    look-up nor the norms), L is n_layers, d is d_model, t is seq_length. Attention counts in full, as if not causal,
    and recomputation does not count (PaLM, arXiv:2204.02311, appendix B).
    """
    matrices = matrix_parameter_count(config) + vocab_size * config.d_model
    return 6 * matrices + 12 * config.n_layers * config.d_model * seq_length
