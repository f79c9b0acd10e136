"""Layouts and values for the tests of sparse payloads."""

from __future__ import annotations

import torch
from tests.oracles.problem import layout_of
from torch import Tensor

from zeroband.outer.sparse.sparse_codec import SparseCodec, SparseRule

SHAPES = {
    "bias": (97,),
    "conv": (5, 3, 7),
    "embed": (131, 70),
    "long": (300,),
    "one": (1,),
    "prime": (67, 13),
    "scalar": (),
    "square": (64, 64),
    "wide": (64, 320),
}
LAYOUT = layout_of(SHAPES)


def noise(seed: int, numel: int = LAYOUT.numel) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def codec_of(**knobs: object) -> SparseCodec:
    return SparseCodec(LAYOUT, SparseRule(**{"k": 4, **knobs}))  # pyright: ignore[reportArgumentType]
