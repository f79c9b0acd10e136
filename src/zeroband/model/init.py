"""Initial weights: a function of seed and parameter name, independent of device, sharding and order."""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor, nn

from zeroband.model.transformer import Transformer
from zeroband.node.processors import usable_processors
from zeroband.node.sharding import is_sharded, local_part, local_rows

STD = 0.02
"""Standard deviation of matrices, as in GPT-2 and OpenDiLoCo's Llama."""

PIECE = 1 << 18
"""Values per draw; a multiple of _GROUP, so that draws in pieces equal one large draw."""

_GROUP = 16
"""Values that torch's CPU normal generator produces together; a shorter tail is drawn again."""

_INTO_RESIDUAL = ("o_proj.weight", "down_proj.weight")


def init_weights(model: Transformer, seed: int) -> None:
    """Initialise every parameter in place, without communication.

    Matrices are normal with standard deviation 0.02, or 0.02 / sqrt(2 n_layers) where they add to the residual stream
    (GPT-2); norms are 1. Each parameter is drawn on the CPU from its own generator, in pieces up to this rank's last
    row, so all ranks agree bit for bit.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{name} is on the meta device: call model.to_empty(device=...) before init_weights")
    named = list(model.named_parameters())
    draw = partial(draw_rows, seed=seed, n_layers=model.config.n_layers)
    ranks = max((p.device_mesh.size() for _, p in named if is_sharded(p)), default=1)
    with ThreadPoolExecutor(max(1, usable_processors() // ranks), thread_name_prefix="first-weights") as pool:
        list(pool.map(draw, *zip(*named, strict=True)))


def draw_rows(name: str, parameter: nn.Parameter, *, seed: int, n_layers: int) -> None:
    """Write this rank's rows of a parameter's initial value."""
    shard = local_shard(parameter)
    if parameter.ndim < 2 or shard.numel() == 0:
        shard.fill_(1.0)
        return
    std = STD / math.sqrt(2 * n_layers) if name.endswith(_INTO_RESIDUAL) else STD
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    rows, width = local_rows(parameter), parameter[0].numel()
    start, stop, numel = rows.start * width, rows.stop * width, parameter.numel()
    held, room = shard.view(-1), torch.empty(min(numel, PIECE + _GROUP))
    for at in range(0, numel, PIECE):
        if at >= stop or (at and numel - at < _GROUP):
            break
        end = numel if numel - at < PIECE + _GROUP else at + PIECE
        piece = room[: end - at].normal_(0.0, std, generator=generator)
        first, last = max(at, start), min(end, stop)
        if first < last:
            held[first - start : last - start].copy_(piece[first - at : last - at])


def local_shard(parameter: Tensor) -> Tensor:
    """Return this rank's shard of a parameter, sharing its memory; all of it if unsharded.

    Call between inner steps only: during a forward pass, or after one that never resharded (see `evaluating`), FSDP2
    exposes the gathered parameter, and writes to it are lost.
    """
    return local_part(parameter.detach())
