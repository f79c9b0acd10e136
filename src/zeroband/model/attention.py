"""Causal grouped-query self-attention with rotary positions, for any device and sharding."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroband.config.model import LlamaConfig

RopeTable = tuple[Tensor, Tensor]
"""Cosine and sine of every position's angles, each (t, 1, head size) float32."""

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Causal scaled dot-product attention, within documents if cu_seqlens is given.

Shapes: query (b, t, heads, head size); key and value (b, t, kv heads, head size), heads a multiple of kv heads;
cu_seqlens (documents + 1,) int32: start of each document in the flattened (b t,) positions, and b t; None: each row is
one document. Returns (b, t, heads, head size).
"""

_QUERY_ROWS = 256
"""Positions per mask: on a CPU 1.3 to 2 times as fast as one mask (t 1024 to 4096)."""

_LARGEST_FLASH_HEAD = 256
_LEAST_FLASH_CAPABILITY = (8, 0)

_FLASH_3 = "flash_attn_interface"
"""Module of FlashAttention 3, which its users compile from its source."""
_LARGEST_FLASH_3_ERROR = 0.02
"""Part of a norm; two kernels in bfloat16 differ by its rounding, 0.004, a few times over."""


def rope_table(length: int, head_size: int, theta: float, device: torch.device) -> RopeTable:
    """Compute the rotary angles of positions 0 .. length - 1.

    Recomputed in each forward pass for microseconds, so that no buffer must survive `to_empty`, casts or sharding.
    Source: RoFormer, arXiv:2104.09864, in the half-split layout of the Llama family.
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device=device) / head_size
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)[:, None]  # (t, 1, head size)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rope: RopeTable) -> Tensor:
    """Rotate each pair (i, i + head size / 2) by its position's angle, in float32.

    Shapes: x (b, t, heads, head size) of any float type; the result has the same.
    """
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def attend_plain(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Implement `Attend` with `F.scaled_dot_product_attention`, for every device and float type.

    With documents, it masks a few query rows at a time, never (t, t), and stacks the queries that share a key head, so
    that keys are not repeated.
    """
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)  # (b, heads, t, head size)
    if cu_seqlens is None:
        is_grouped = query.shape[1] > key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=is_grouped).transpose(1, 2)
    batch, _, length, head_size = query.shape
    positions = torch.arange(batch * length, device=query.device)
    documents = torch.bucketize(positions, cu_seqlens[1:], right=True).view(batch, length)
    queries = query.unflatten(1, (key.shape[1], -1))  # (b, kv heads, heads of one, t, head size)
    parts: list[Tensor] = []
    for start in range(0, length, _QUERY_ROWS):
        stop = min(start + _QUERY_ROWS, length)
        is_own = documents[:, start:stop, None] == documents[:, None, :stop]
        is_before = positions[start:stop, None] >= positions[None, :stop]
        mask = (is_own & is_before)[:, None, None].expand(-1, -1, queries.shape[2], -1, -1)
        rows = queries[..., start:stop, :]  # (b, kv heads, heads of one, rows, head size)
        part = F.scaled_dot_product_attention(
            rows.flatten(2, 3), key[:, :, :stop], value[:, :, :stop], attn_mask=mask.flatten(2, 3)
        )
        parts.append(part.view(rows.shape).permute(0, 3, 1, 2, 4))
    return torch.cat(parts, dim=1).reshape(batch, length, -1, head_size)


def varlen_attention() -> Attend:
    """Return an `Attend` with torch's variable-length flash attention, which needs no mask.

    For bfloat16 or float16 on an NVIDIA GPU of compute capability 8.0 or more; head size at most 256, a multiple of 8.
    """
    # Imported here because the compiler, which traces the call, rejects an import in it.
    varlen = _varlen_module()
    known = inspect.signature(varlen.varlen_attn).parameters
    options: dict[str, Any] = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}  # by release
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    attend_documents: Callable[..., Tensor] = partial(varlen.varlen_attn, **options)

    def attend_varlen(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        if cu_seqlens is None:
            return attend_plain(query, key, value, None)
        longest = query.shape[1]  # an upper bound suffices, and a constant avoids recompilation
        packed, keys, values = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
        return attend_documents(packed, keys, values, cu_seqlens, cu_seqlens, longest, longest).view(query.shape)

    return attend_varlen


def __getattr__(name: str) -> Any:
    """Create `attend_varlen` on demand, as torch's module takes seconds to load."""
    if name == "attend_varlen":
        return varlen_attention()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def attention_on(device: torch.device, dtype: torch.dtype, config: LlamaConfig) -> tuple[Attend, str]:
    """Return the fastest available `Attend`, and why flash attention is unavailable on this GPU, else an empty text."""
    if device.type != "cuda":
        return attend_plain, ""
    why = ""
    if _varlen_module() is None:
        why = f"torch {torch.__version__} has no torch.nn.attention.varlen"
    elif dtype not in (torch.bfloat16, torch.float16):
        why = f"activations are {dtype}".replace("torch.", "")
    elif torch.cuda.get_device_capability(device) < _LEAST_FLASH_CAPABILITY:
        why = f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    elif config.head_size > _LARGEST_FLASH_HEAD or config.head_size % 8:
        why = f"heads have {config.head_size} values, not a multiple of 8 up to 256"
    return (attend_plain, why) if why else (varlen_attention(), "")


def activate_flash_3(device: torch.device, dtype: torch.dtype, config: LlamaConfig) -> str:
    """Have torch attend by FlashAttention 3, for the whole process, where it is installed and serves this GPU.

    Torch calls its support a prototype, so outputs and gradients are compared with those of torch's own kernels first,
    which stay in use if it fails or differs. Returns what happened; empty if it is not installed or for other GPUs.
    """
    if not is_hopper(device) or importlib.util.find_spec(_FLASH_3) is None:
        return ""
    attend, why = attention_on(device, dtype, config)
    kernels = importlib.import_module("torch.nn.attention")
    if why or not hasattr(kernels, "activate_flash_attention_impl"):
        return f"not used: {why or f'torch {torch.__version__} cannot activate it'}"
    expected = _attended(attend, device, config)
    try:
        kernels.activate_flash_attention_impl("FA3")
        found = _attended(attend, device, config)
    except Exception as error:  # noqa: BLE001 - of a prototype and a package that nobody here has built
        why = f"it fails: {type(error).__name__}: {error}"
    else:
        errors = [float((ours - theirs).norm() / theirs.norm()) for ours, theirs in zip(found, expected, strict=True)]
        if max(errors) <= _LARGEST_FLASH_3_ERROR:
            return "used"
        why = f"it differs from torch's kernels by {max(errors):.2g}"
    kernels.restore_flash_attention_impl()
    return f"not used: {why}"


def is_hopper(device: torch.device) -> bool:
    """Whether this is a GPU of compute capability 9.0, for which FlashAttention 3 is written."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _attended(attend: Attend, device: torch.device, config: LlamaConfig) -> list[Tensor]:
    """Attend over two documents of random values; returns the output and the gradients of query, key and value."""
    generator, length = torch.Generator().manual_seed(0), 256
    shapes = [(1, length, heads, config.head_size) for heads in (config.n_heads, config.kv_heads, config.kv_heads)]
    heads = [torch.randn(shape, generator=generator).to(device, torch.bfloat16).requires_grad_() for shape in shapes]
    query, key, value = heads
    borders = torch.tensor([0, 100, length], dtype=torch.int32, device=device)
    out = attend(query, key, value, borders)
    weights = torch.linspace(-1, 1, out.numel(), device=device).view_as(out)
    return [each.detach().float() for each in (out, *torch.autograd.grad((out.float() * weights).sum(), heads))]


def _varlen_module() -> Any:
    try:
        return importlib.import_module("torch.nn.attention.varlen")
    except ImportError:
        return None


class SelfAttention(nn.Module):
    """Grouped-query self-attention."""

    def __init__(self, config: LlamaConfig, attend: Attend) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.attend = attend
        kv_width = config.kv_heads * self.head_size
        self.q_proj = nn.Linear(config.d_model, config.d_model, bias=False)
        self.k_proj = nn.Linear(config.d_model, kv_width, bias=False)
        self.v_proj = nn.Linear(config.d_model, kv_width, bias=False)
        self.o_proj = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor, rope: RopeTable, cu_seqlens: Tensor | None) -> Tensor:
        query, key, value = (
            projected.unflatten(-1, (-1, self.head_size))  # (b, t, heads, head size)
            for projected in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        attended = self.attend(rotate(query, rope), rotate(key, rope), value, cu_seqlens)
        return self.o_proj(attended.flatten(2))
