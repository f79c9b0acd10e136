"""A reduction in plain torch: what every member holds afterwards, and what each member's encodings took from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeroband.kernels.codec import Codec


def averaged(
    codec: Codec,
    sources: Sequence[Tensor],
    shares: Sequence[float],
    bounds: Sequence[int],
    *,
    is_ring: bool = False,
    are_encoded: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """The mean (n,) and of each member what was taken, (n,) in units of its source; NaN where it has no share.

    For codecs of whole numbers behind float32 scales. Members follow one another in the ring as they are listed.
    `are_encoded`: the members come with the encodings of their sources, and what those took is not counted.
    """
    mean = torch.zeros_like(sources[0])
    errors = [torch.zeros_like(mean) if share > 0 else torch.full_like(mean, float("nan")) for share in shares]
    each_share = [torch.tensor(share, dtype=torch.float32) for share in shares]
    for owner in range(len(sources)):
        part = slice(bounds[owner], bounds[owner + 1])
        add_up = _around if is_ring else _at_once
        parts, taken = [source[part] for source in sources], [error[part] for error in errors]
        total = add_up(codec, parts, each_share, owner, taken, are_encoded=are_encoded)
        mean[part] = _decoded(codec, total)
        if shares[owner] > 0:
            errors[owner][part] += (total - mean[part]) / each_share[owner]
    return mean, errors


def _at_once(
    codec: Codec,
    sources: list[Tensor],
    shares: list[Tensor],
    owner: int,
    errors: list[Tensor],
    *,
    are_encoded: bool,
) -> Tensor:
    total = torch.zeros_like(sources[0])
    for source, share, error in zip(sources, shares, errors, strict=True):
        if share > 0:
            error.copy_(torch.zeros_like(source) if are_encoded else source - _decoded(codec, source))
            total += _decoded(codec, source, share)
    return total


def _around(
    codec: Codec,
    sources: list[Tensor],
    shares: list[Tensor],
    owner: int,
    errors: list[Tensor],
    *,
    are_encoded: bool,
) -> Tensor:
    total = torch.zeros_like(sources[0])
    for step in range(1, len(sources) + 1):
        member = (owner + step) % len(sources)
        if shares[member] > 0:
            source, share = sources[member], shares[member]
            total = total + (_decoded(codec, source, share) if are_encoded else share * source)
        if member != owner:
            decoded = _decoded(codec, total)
            if shares[member] > 0:
                errors[member].copy_((total - decoded) / shares[member])
            total = decoded
    return total


def _decoded(codec: Codec, values: Tensor, share: Tensor | None = None) -> Tensor:
    """Of the encoding; with its scales multiplied by a share."""
    data = codec.encode(values)
    if share is not None:
        assert codec.block is not None
        data[: 4 * -(-values.numel() // codec.block)].view(torch.float32).mul_(share)
    return codec.decode(data, values.numel())
