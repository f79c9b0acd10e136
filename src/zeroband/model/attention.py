"""Causal grouped-query self-attention with rotary positions. Pure tensor code, whatever the device and sharding."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroband.config.schema import ModelConfig

RopeTable = tuple[Tensor, Tensor]
"""Cosine and sine of every position's angles, each (t, head size) float32."""


def rope_table(length: int, head_size: int, theta: float, device: torch.device) -> RopeTable:
    """Angles of the rotary position embedding for positions 0 .. length - 1.

    Made anew in each forward pass: it costs microseconds, and no buffer has to survive `to_empty`, casts or sharding.
    Source: RoFormer, arXiv:2104.09864, in the half-split layout of the Llama family.
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device=device) / head_size
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)  # (t, head size)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rope: RopeTable) -> Tensor:
    """Turn each pair (i, i + head size / 2) by its position's angle, in float32.

    Shapes: x (b, heads, t, head size) of any float type, which the result keeps.
    """
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def document_attention_mask(document_ids: Tensor) -> Tensor:
    """Which earlier positions a position may look at: those of its own document, itself included.

    Shapes: document_ids (b, t) integer; gives (b, 1, t, t) bool, True where attention is allowed.
    """
    length = document_ids.shape[1]
    same_document = document_ids[:, :, None] == document_ids[:, None, :]  # (b, t, t)
    causal = torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril()
    return (same_document & causal)[:, None]


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Scaled dot-product attention; causal without a mask.

    Shapes: query (b, heads, t, head size), key and value (b, kv heads, t, head size); heads are a multiple of kv heads.
    With a mask the key and value heads are repeated here: no fused kernel takes both a mask and fewer key heads, and
    torch would fall back to the one that stores the (t, t) scores.
    """
    groups = query.shape[1] // key.shape[1]
    if mask is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=groups > 1)
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


class SelfAttention(nn.Module):
    """Multi-head attention whose groups of query heads share one key and value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_size = config.d_model // config.n_heads
        kv_width = config.kv_heads * self.head_size
        self.q_proj = nn.Linear(config.d_model, config.d_model, bias=False)
        self.k_proj = nn.Linear(config.d_model, kv_width, bias=False)
        self.v_proj = nn.Linear(config.d_model, kv_width, bias=False)
        self.o_proj = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor, rope: RopeTable, mask: Tensor | None) -> Tensor:
        query, key, value = (
            self._split_heads(projected) for projected in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        attended = attend(rotate(query, rope), rotate(key, rope), value, mask)  # (b, heads, t, head size)
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def _split_heads(self, projected: Tensor) -> Tensor:
        batch, length, _ = projected.shape
        return projected.view(batch, length, -1, self.head_size).transpose(1, 2)  # (b, heads, t, head size)
