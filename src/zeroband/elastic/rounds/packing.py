"""How the journal keeps a mean: as its codec encodes it, where that gives it back to the last bit.

A mean that travelled was decoded from such an encoding, which encoding it again finds. In pieces, so that large states
take little memory beside the packed bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zeroband.kernels.codec import Codec

_PIECE = 1 << 20
"""Values; a whole number of blocks of every codec, so that all pieces together take what one encoding would."""


def packed_sizes(numel: int, codec: Codec) -> tuple[int, int]:
    """Bytes that a packed mean has: as its codec encodes it, and as it is."""
    return codec.encoded_size(numel), 4 * numel


def pack(mean: Tensor, codec: Codec) -> Tensor:
    """A new tensor, (nbytes,) uint8. Shape: mean (n,) float32 on CPU, contiguous; all values finite."""
    if not codec.is_exact:
        update = torch.empty(codec.encoded_size(mean.numel()), dtype=torch.uint8)
        if all(_encode_exactly(part, codec, out) for part, out in _pieces(mean, update, codec)):
            return update
    return mean.clone().view(torch.uint8)


def unpack(update: Tensor, codec: Codec, mean: Tensor) -> None:
    """Write the mean that was packed. Shapes: update (nbytes,) uint8 of one of `packed_sizes`, mean (n,) float32."""
    if update.numel() == 4 * mean.numel():
        mean.copy_(update.view(torch.float32))
        return
    for part, data in _pieces(mean, update, codec):
        part.copy_(codec.decode(data, part.numel()))


def _encode_exactly(part: Tensor, codec: Codec, out: Tensor) -> bool:
    out.copy_(codec.encode(part))
    return torch.equal(codec.decode(out, part.numel()).view(torch.int32), part.view(torch.int32))


def _pieces(mean: Tensor, update: Tensor, codec: Codec) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of a mean with the bytes of each."""
    parts = mean.split(_PIECE)
    return zip(parts, update.split([codec.encoded_size(part.numel()) for part in parts]), strict=True)
