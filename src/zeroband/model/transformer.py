"""The decoder: embedding, blocks of attention and SwiGLU behind RMSNorms, head.

Parameter names are those of Hugging Face's Llama without the leading `model.`, so an export renames nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroband.config.model import LlamaConfig, flops_per_token
from zeroband.config.training import ActivationCheckpointing
from zeroband.model.attention import Attend, RopeTable, SelfAttention, attend_plain, rope_table
from zeroband.model.language_model import LanguageModel
from zeroband.model.loss import TokenLoss, linear_loss
from zeroband.model.recompute import recomputed

_T = TypeVar("_T")


class SwiGlu(nn.Module):
    """Feed-forward layer gated by SiLU (arXiv:2002.05202)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, config.ff_width, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.ff_width, bias=False)
        self.down_proj = nn.Linear(config.ff_width, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A pre-norm decoder layer.

    Activation checkpointing acts inside the block: a sharded block gathers its parameters once for both passes, no
    wrapper changes parameter names, and the compiler sees one graph.
    """

    def __init__(self, config: LlamaConfig, attend: Attend) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.self_attn = SelfAttention(config, attend)
        self.post_attention_layernorm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.mlp = SwiGlu(config)
        self.checkpointing: ActivationCheckpointing = "none"

    def forward(self, x: Tensor, rope: RopeTable, cu_seqlens: Tensor | None) -> Tensor:
        if self.checkpointing == "none" or not torch.is_grad_enabled():
            return self._run(x, rope, cu_seqlens)
        return recomputed(self.checkpointing, self._run, x, rope, cu_seqlens)

    def _run(self, x: Tensor, rope: RopeTable, cu_seqlens: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, cu_seqlens)
        return x + self.mlp(self.post_attention_layernorm(x))


class Head(nn.Module):
    """The output projection. Every use of its weight happens in `forward`, where FSDP2 gathers it."""

    def __init__(self, d_model: int, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))

    def forward(self, x: Tensor, use: Callable[[Tensor, Tensor], _T]) -> _T:
        return use(x, self.weight)


class Transformer(LanguageModel):
    """A Llama-style decoder. May be built on the meta device and initialised by `init_weights` later."""

    compiles_whole = True
    casts_inputs = False  # the embedding sets the compute type; rotary angles must stay float32

    def __init__(self, config: LlamaConfig, vocab_size: int, attend: Attend = attend_plain) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        # zeros instead of a random draw, for which torch loads its compiler on the meta device (seconds)
        self.embed_tokens = nn.Embedding.from_pretrained(torch.zeros(vocab_size, config.d_model), freeze=False)
        self.layers = nn.ModuleList(Block(config, attend) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        # if tied, the embedding has no second name: `to_empty` and sharding would split it into two parameters
        self.lm_head = None if config.tie_embeddings else Head(config.d_model, vocab_size)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return list(self.layers)

    @property
    def ends(self) -> Sequence[nn.Module]:
        return [] if self.lm_head is None else [self.embed_tokens, self.lm_head]

    def recompute(self, how: ActivationCheckpointing) -> None:
        for block in self.layers:
            cast(Block, block).checkpointing = how

    def flops_per_token(self, seq_length: int) -> int:
        return flops_per_token(self.config, self.vocab_size, seq_length)

    def forward(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor | None = None,
        targets: Tensor | None = None,
        z_loss: float = 0.0,
        by_target: bool = False,
    ) -> Tensor | TokenLoss:
        """Return logits or loss as `LanguageModel.forward` does, without materialising all logits for the loss.

        Positions count from the start of the row, as attention depends only on differences within a document.
        """
        rope = rope_table(tokens.shape[1], self.config.head_size, self.config.rope_theta, tokens.device)
        x = self.embed_tokens(tokens)  # (b, t, d)
        for block in self.layers:
            x = block(x, rope, cu_seqlens)
        x = self.norm(x)
        if targets is None:
            return self._project(x, F.linear)
        options = {"z_loss": z_loss, "by_target": by_target, "logits_loss": self.logits_loss}
        return self._project(x, partial(linear_loss, targets=targets, **options))

    def _project(self, x: Tensor, use: Callable[[Tensor, Tensor], _T]) -> _T:
        return use(x, self.embed_tokens.weight) if self.lm_head is None else self.lm_head(x, use)
