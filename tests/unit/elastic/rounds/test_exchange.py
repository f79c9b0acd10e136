"""How the journal keeps a mean: in the bytes that it travelled in, to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zeroband.elastic.rounds import exchange
from zeroband.elastic.rounds.exchange import pack_mean, packed_sizes, unpack_mean
from zeroband.kernels.codec import CODECS, Codec

N = 1000
VALUES = torch.randn(N, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, N)
EACH_CODEC = pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)


def bits_of(values: Tensor) -> Tensor:
    return values.view(torch.int32)


def unpacked(update: Tensor, codec: Codec) -> Tensor:
    mean = torch.full((N,), float("nan"))
    unpack_mean(update, codec, mean)
    return mean


@EACH_CODEC
@pytest.mark.parametrize("piece", [256, 1 << 20])
def test_mean_that_travelled_is_kept_as_it_travelled(monkeypatch: pytest.MonkeyPatch, codec: Codec, piece: int) -> None:
    monkeypatch.setattr(exchange, "_PIECE", piece)
    mean = codec.decode(codec.encode(VALUES), N)
    update = pack_mean(mean, codec)
    assert update.numel() == codec.encoded_size(N) == packed_sizes(N, codec)[0]
    assert torch.equal(bits_of(unpacked(update, codec)), bits_of(mean))


@EACH_CODEC
def test_mean_that_did_not_travel_is_kept_as_it_is(codec: Codec) -> None:
    values = VALUES.clone()
    values[7] = -0.0
    update = pack_mean(values, codec)
    assert update.numel() == 4 * N == packed_sizes(N, codec)[1]
    assert torch.equal(bits_of(unpacked(update, codec)), bits_of(values))
