"""The [model] section: what is trained, one tagged variant for each way to describe it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, PositiveFloat, PositiveInt, field_validator, model_validator

from zeroband.config.section import NODE_LOCAL, Section, key_value


class LlamaConfig(Section):
    """The decoder of this package: Llama's, with the fastest path."""

    type: Literal["llama"] = "llama"
    d_model: PositiveInt = 256
    """Width of the residual stream."""
    n_layers: PositiveInt = 4
    """Number of decoder blocks."""
    n_heads: PositiveInt = 4
    """Query heads; d_model must be a multiple of it."""
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
    """Adapters of low rank for the linear layers, by peft: only they are trained and travel."""

    r: PositiveInt = 16
    """Rank of an adapter."""
    alpha: PositiveFloat = 32.0
    """An adapter's output counts alpha / r times."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of an adapter's inputs that is dropped in training."""
    target_modules: tuple[str, ...] = Field(default=("all-linear",), min_length=1)
    """Ends of the names of the layers that get one, such as q_proj, v_proj. all-linear: every linear layer but the
    head."""


_LOADING = {
    *("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "experts_implementation"),
    *("_experts_implementation", "allow_all_kernels", "use_kernels", "kernel_config", "trust_remote_code"),
    *("code_revision", "custom_pipelines", "cache_dir", "proxies", "token", "use_auth_token", "local_files_only"),
    *("force_download", "resume_download", "subfolder", "revision", "gguf_file", "user_agent", "return_unused_kwargs"),
    *("_configuration_file", "_from_auto", "_from_pipeline", "_commit_hash"),
}
"""Keys of transformers that choose code, or how it is fetched. They describe no model."""


def _loading_keys(value: JsonValue) -> set[str]:
    """Those that a table holds, or one in it."""
    if isinstance(value, list):
        return set[str]().union(*map(_loading_keys, value))
    return set(value) & _LOADING | _loading_keys([*value.values()]) if isinstance(value, dict) else set()


class TransformersConfig(Section):
    """A causal language model of transformers (extra `hf`), trained as it is there.

    Its parameters keep transformers' names, and are float32; train.dtype is the compute type.
    """

    type: Literal["transformers"]
    name: str | None = Field(default=None, min_length=1, json_schema_extra=NODE_LOCAL)
    """Name on the Hugging Face Hub, or a directory that `save_pretrained` made, of the same content on every node. Its
    tokenizer is the run's, too, unless data.tokenizer names another. None: `config` describes the model."""
    weights: Literal["pretrained", "random"] = "pretrained"
    """pretrained: begin with the weights that `name` has. random: with those that run.seed makes."""
    config: dict[str, JsonValue] | None = None
    """transformers' own configuration, in the place of `name` or over what it has: a table [model.config] with
    model_type, hidden_size, num_hidden_layers and so on. None: as `name` has it."""
    attention: str | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """transformers' attn_implementation: sdpa, eager, flex_attention, flash_attention_2. None: transformers' choice."""
    lora: LoraConfig | None = None
    """Train adapters only. None: every parameter."""

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
        """Whether there are weights to begin with."""
        return self.name is not None and self.weights == "pretrained"


class CustomModelConfig(Section):
    """A module from a file that is not part of the package."""

    type: Literal["custom"]
    file: Path = Field(json_schema_extra=NODE_LOCAL)
    """The file, whose `build(config)` returns the torch module; examples/own_model.py is one. Its content must be the
    same on all nodes."""
    settings: tuple[str, ...] = ()
    """KEY=VALUE for each thing that `build` is to know, in its `config.settings`; values as in JSON."""

    @field_validator("settings")
    @classmethod
    def _are_pairs(cls, settings: tuple[str, ...]) -> tuple[str, ...]:
        for setting in settings:
            key_value(setting)
        return settings

    @property
    def named_settings(self) -> dict[str, Any]:
        """`settings` by key."""
        return dict(map(key_value, self.settings))


Model = Annotated[LlamaConfig | TransformersConfig | CustomModelConfig, Field(discriminator="type")]


def parameter_count(config: Model, vocab_size: int) -> int:
    """Number of trainable values, a tied head counted once; 0 of a model that has to be built to be counted."""
    if not isinstance(config, LlamaConfig):
        return 0
    embeddings = vocab_size * config.d_model * (1 if config.tie_embeddings else 2)
    norms = (2 * config.n_layers + 1) * config.d_model
    return embeddings + norms + matrix_parameter_count(config)


def matrix_parameter_count(config: LlamaConfig) -> int:
    """Number of values in the matrices between embedding and head: what Muon steps where it is the inner optimizer."""
    kv_width = config.d_model // config.n_heads * config.kv_heads
    attention = 2 * config.d_model * (config.d_model + kv_width)
    return config.n_layers * (attention + 3 * config.d_model * config.ff_width)


def flops_per_token(config: LlamaConfig, vocab_size: int, seq_length: int) -> int:
    """Floating-point operations of one training token, forward and backward, as MFU is reported.

    6 N + 12 L d t: N counts the matrices that a token is multiplied with (the head, tied or not, but neither the
    embedding, which is a look-up, nor the norms), L is n_layers, d is d_model, t is seq_length. Attention is counted
    in full, as if it were not causal, and recomputed activations are not counted (PaLM, arXiv:2204.02311, appendix B).
    """
    matrices = matrix_parameter_count(config) + vocab_size * config.d_model
    return 6 * matrices + 12 * config.n_layers * config.d_model * seq_length
