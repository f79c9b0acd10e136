"""Byzantine-robust aggregation of contributions: rules, measurements, and a direct call.

Implemented in `csrc/robust.cpp`, which the engine calls for the shards that a node owns.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from zeroband.kernels import native
from zeroband.kernels.codec import Codec

RuleName = Literal["clip", "trimmed", "centered_clip"]

_NUMBERS: dict[RuleName, int] = {"clip": 1, "trimmed": 2, "centered_clip": 3}

PIECE = 4096
"""Values per norm or distance."""


@dataclass(frozen=True)
class RobustRule:
    """An aggregation rule; equal on all nodes."""

    name: RuleName
    trim: float = 0.0
    """Fraction of contributions that "trimmed" drops at each end, in [0, 0.5)."""
    iterations: int = 0
    """Steps of "centered_clip" from the median."""

    @property
    def number(self) -> int:
        """Id in the native library."""
        return _NUMBERS[self.name]


@dataclass(frozen=True)
class OwnerMeasurements:
    """An owner's statistics of the contributions to its shard, written by the native library."""

    values: Tensor
    """(2 * members + 1,) float64: dot products with the result, squared norms of contributions and of the result."""

    @staticmethod
    def of(members: int) -> OwnerMeasurements:
        """Allocate zeros."""
        return OwnerMeasurements(torch.zeros(2 * members + 1, dtype=torch.float64))

    def cosines(self) -> list[float | None]:
        """Return each contribution's cosine with the result; -1 if it was not finite, None if undefined."""
        members = len(self.values) // 2
        *numbers, result = self.values.tolist()
        return [_cosine(dot, square, result) for dot, square in zip(numbers[:members], numbers[members:], strict=True)]


def _cosine(dot: float, square: float, result: float) -> float | None:
    if math.isinf(dot):
        return -1.0
    return max(-1.0, min(1.0, dot / math.sqrt(square * result))) if square * result > 0 else None


_UNKNOWN, _STEPS = -128, 127


def encode_cosines(cosines: Sequence[float | None]) -> Tensor:
    """Encode each cosine in one byte, (n,) uint8."""
    steps = [_UNKNOWN if cosine is None else round(_STEPS * cosine) for cosine in cosines]
    return torch.tensor(steps, dtype=torch.int8).view(torch.uint8)


def decode_cosines(data: Tensor) -> list[float | None]:
    """Decode cosines to within 1/254; any bytes are valid."""
    steps: list[int] = data.view(torch.int8).tolist()
    return [None if step == _UNKNOWN else step / _STEPS for step in steps]


@dataclass(frozen=True)
class Robustly:
    """A rule and its measurements, for the engine."""

    rule: RobustRule
    members: int
    measured: OwnerMeasurements = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "measured", OwnerMeasurements.of(self.members))

    def as_fields(self) -> tuple[int, int, float, int]:
        """Return the fields of `native.ReduceSpec`."""
        return self.rule.number, self.rule.iterations, self.rule.trim, self.measured.values.data_ptr()


def combine(
    rule: RobustRule, codec: Codec, parts: Sequence[Tensor], shares: Sequence[float], n: int, *, variant: int = -1
) -> tuple[Tensor, OwnerMeasurements]:
    """Aggregate contributions of n values, scaled by the sum of their shares.

    Shapes: parts (codec.encoded_size(n),) uint8 each; returns (n,) float32. Parts with share 0 are ignored. `variant`:
    as for a codec. Raises: ValueError for parts of another length.
    """
    if any(part.numel() != codec.encoded_size(n) or not part.is_contiguous() for part in parts):
        raise ValueError(f"{n} values take {codec.encoded_size(n)} contiguous bytes in {codec.name}")
    out, measured = torch.zeros(n), OwnerMeasurements.of(len(parts))
    pointers = (ctypes.c_void_p * len(parts))(*(part.data_ptr() for part in parts))
    counts = (ctypes.c_float * len(parts))(*shares)
    problem = native.load().zb_combine(
        codec.number,
        variant,
        rule.number,
        rule.trim,
        rule.iterations,
        len(parts),
        pointers,
        counts,
        n,
        out.data_ptr(),
        measured.values.data_ptr(),
    )
    if problem:
        raise ValueError(f"unknown aggregation rule: {rule}")
    return out, measured
