"""Llama's forward pass written down once more, from an exported directory alone, without the package.

Complex rotations and explicit scores instead of our halves and fused attention.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


def llama_logits(folder: Path, ids: Tensor) -> Tensor:
    """Logits in float32. Shapes: ids (b, t) int64; gives (b, t, v)."""
    c = json.loads((folder / "config.json").read_text())
    w = {name: t.float() for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
    x = w["model.embed_tokens.weight"][ids]  # (b, t, d)
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        x = x + attention(c, w, at + "self_attn.", norm(x, w[at + "input_layernorm.weight"], c["rms_norm_eps"]))
        y = norm(x, w[at + "post_attention_layernorm.weight"], c["rms_norm_eps"])
        gate, up = y @ w[at + "mlp.gate_proj.weight"].T, y @ w[at + "mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ w[at + "mlp.down_proj.weight"].T
    head = w["model.embed_tokens.weight"] if c["tie_word_embeddings"] else w["lm_head.weight"]
    return norm(x, w["model.norm.weight"], c["rms_norm_eps"]) @ head.T


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def attention(c: dict, w: dict[str, Tensor], at: str, x: Tensor) -> Tensor:
    batch, length, _ = x.shape
    size, groups = c["head_dim"], c["num_attention_heads"] // c["num_key_value_heads"]
    q, k, v = (
        (x @ w[f"{at}{name}_proj.weight"].T).view(batch, length, -1, size).transpose(1, 2) for name in ("q", "k", "v")
    )  # (b, heads, t, size)
    q, k = turn(q, c["rope_theta"]), turn(k, c["rope_theta"])
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(2, 3) / size**0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1)
    return mixed @ w[f"{at}o_proj.weight"].T


def turn(x: Tensor, theta: float) -> Tensor:
    size, length = x.shape[-1], x.shape[-2]
    frequencies = theta ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(length)[:, None] * frequencies  # (t, size / 2)
    turned = torch.complex(x[..., : size // 2], x[..., size // 2 :]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)
