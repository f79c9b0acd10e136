"""The [model] section: what is trained."""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt, model_validator

from zeroband.config.section import Section


class ModelConfig(Section):
    """The decoder."""

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
    def _heads_divide(self) -> ModelConfig:
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
