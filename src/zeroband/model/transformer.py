"""The decoder: embedding, blocks of attention and SwiGLU behind RMSNorms, head.

Parameter names are those of Hugging Face's Llama without the leading `model.`, so an export renames nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import checkpoint

from zeroband.config.schema import ModelConfig
from zeroband.model.attention import RopeTable, SelfAttention, document_attention_mask, rope_table


class SwiGlu(nn.Module):
    """Feed-forward layer gated by SiLU (arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, config.ff_width, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.ff_width, bias=False)
        self.down_proj = nn.Linear(config.ff_width, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One pre-norm decoder layer.

    `recompute` drops the activations after the forward pass and makes them again in the backward pass. It acts inside
    the block so that a sharded block gathers its parameters once around both, and so that no wrapper changes a name.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.mlp = SwiGlu(config)
        self.recompute = False

    def forward(self, x: Tensor, rope: RopeTable, mask: Tensor | None) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            run = cast(Callable[..., Tensor], checkpoint.checkpoint)  # pyright: ignore[reportUnknownMemberType]
            return run(self._run, x, rope, mask, use_reentrant=False, preserve_rng_state=False)
        return self._run(x, rope, mask)

    def _run(self, x: Tensor, rope: RopeTable, mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    """A Llama-style decoder. May be built under `torch.device("meta")`: `init_weights` gives it values later."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        # Not drawn here: on the meta device torch would load its compiler for that, in seconds.
        self.embed_tokens = nn.Embedding.from_pretrained(torch.zeros(vocab_size, config.d_model), freeze=False)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        # Tied: no second name for the embedding, because `to_empty` and sharding would make two parameters of it.
        self.lm_head = None if config.tie_embeddings else nn.Linear(config.d_model, vocab_size, bias=False)

    def forward(self, tokens: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Logits of the next token at every position.

        Shapes: tokens (b, t) int64, document_ids (b, t) int32 or None (the whole row is one document); gives (b, t, v)
        in the compute type. Positions count from the start of the row: only their differences act within a document.
        """
        head_size = self.config.d_model // self.config.n_heads
        rope = rope_table(tokens.shape[1], head_size, self.config.rope_theta, tokens.device)
        mask = None if document_ids is None else document_attention_mask(document_ids)
        x = self.embed_tokens(tokens)  # (b, t, d)
        for block in self.layers:
            x = block(x, rope, mask)
        x = self.norm(x)
        return F.linear(x, self.embed_tokens.weight) if self.lm_head is None else self.lm_head(x)  # (b, t, v)
