"""Torch's attention over packed documents on a CPU, so that the path of a GPU is traced and run without one."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor


def scores_of(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Causal scores of one document and the keys that each query head reads: (heads, t, t), (heads, t, head size)."""
    keys = key.float().transpose(0, 1).repeat_interleave(query.shape[1] // key.shape[1], 0)
    scores = query.float().transpose(0, 1) @ keys.transpose(1, 2) / query.shape[-1] ** 0.5
    is_later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(is_later, float("-inf")), keys


def forward(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    outs: list[Tensor] = []
    sums: list[Tensor] = []
    for begin, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        scores, _keys = scores_of(query[begin:end], key[begin:end])
        values = value[begin:end].float().transpose(0, 1).repeat_interleave(query.shape[1] // key.shape[1], 0)
        outs.append((scores.softmax(-1) @ values).transpose(0, 1))
        sums.append(scores.logsumexp(-1))
    out = torch.cat(outs).to(query.dtype).contiguous()
    return out, torch.cat(sums, 1).contiguous(), torch.zeros(2, dtype=torch.uint64)


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, _lse: Tensor, cu_seqlens: Tensor,
    *_: Any, **__: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    gradients = tuple(torch.zeros_like(tensor) for tensor in (query, key, value))
    heads = query.shape[1] // key.shape[1]
    for begin, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        here = slice(begin, end)
        scores, keys = scores_of(query[here], key[here])
        weights = scores.softmax(-1)
        values = value[here].float().transpose(0, 1).repeat_interleave(heads, 0)
        grad, result = (tensor[here].float().transpose(0, 1) for tensor in (grad_out, out))
        of_scores = weights * (grad @ values.transpose(1, 2) - (grad * result).sum(-1, keepdim=True))
        of_scores = of_scores / query.shape[-1] ** 0.5
        found = (
            of_scores @ keys,
            (of_scores.transpose(1, 2) @ query[here].float().transpose(0, 1)).unflatten(0, (-1, heads)).sum(1),
            (weights.transpose(1, 2) @ grad).unflatten(0, (-1, heads)).sum(1),
        )
        for gradient, part in zip(gradients, found, strict=True):
            gradient[here] = part.transpose(0, 1).to(gradient.dtype)
    return gradients


def register() -> None:
    """Give torch's operators these kernels, for this process."""
    importlib.import_module("torch.nn.attention.varlen")  # which defines them
    torch.library.register_kernel("torch_attn::_varlen_attn", "cpu", forward)
    torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu", backward)
