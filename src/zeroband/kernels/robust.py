"""Combinations of contributions of which a minority may be lies: their rule, what is measured, and one made at once.

The C++ is `csrc/robust.cpp`; the engine calls it for the shards that a node owns.
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
"""Values over which norms and distances are measured."""


@dataclass(frozen=True)
class RobustRule:
    """How contributions are combined. The same on all nodes."""

    name: RuleName
    trim: float = 0.0
    """Part of the contributions that "trimmed" leaves out at each end, in [0, 0.5)."""
    iterations: int = 0
    """Steps that "centered_clip" takes from the median."""

    @property
    def number(self) -> int:
        """Its number in the native library."""
        return _NUMBERS[self.name]


@dataclass(frozen=True)
class OwnerMeasurements:
    """What an owner saw of the members' contributions to its shard, written by the native library."""

    values: Tensor
    """(2 * members + 1,) float64: products with the result, squares of each contribution, squares of the result."""

    @staticmethod
    def of(members: int) -> OwnerMeasurements:
        """Return zeros, with which measuring begins."""
        return OwnerMeasurements(torch.zeros(2 * members + 1, dtype=torch.float64))

    def cosines(self) -> list[float | None]:
        """Cosine of each member's contribution and the result; -1 where it was not finite, None where there is none."""
        members = len(self.values) // 2
        *numbers, result = self.values.tolist()
        return [_cosine(dot, square, result) for dot, square in zip(numbers[:members], numbers[members:], strict=True)]


def _cosine(dot: float, square: float, result: float) -> float | None:
    if math.isinf(dot):
        return -1.0
    return max(-1.0, min(1.0, dot / math.sqrt(square * result))) if square * result > 0 else None


_UNKNOWN, _STEPS = -128, 127


def encode_cosines(cosines: Sequence[float | None]) -> Tensor:
    """One byte for each, (n,) uint8."""
    steps = [_UNKNOWN if cosine is None else round(_STEPS * cosine) for cosine in cosines]
    return torch.tensor(steps, dtype=torch.int8).view(torch.uint8)


def decode_cosines(data: Tensor) -> list[float | None]:
    """The inverse, to 1/254; any bytes are cosines, in [-1, 1]."""
    steps: list[int] = data.view(torch.int8).tolist()
    return [None if step == _UNKNOWN else step / _STEPS for step in steps]


@dataclass(frozen=True)
class Robustly:
    """For an engine: the rule, and where it is to write what it measures."""

    rule: RobustRule
    members: int
    measured: OwnerMeasurements = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "measured", OwnerMeasurements.of(self.members))

    def as_fields(self) -> tuple[int, int, float, int]:
        """The last fields of `native.ReduceSpec`."""
        return self.rule.number, self.rule.iterations, self.rule.trim, self.measured.values.data_ptr()


def combine(
    rule: RobustRule, codec: Codec, parts: Sequence[Tensor], shares: Sequence[float], n: int, *, variant: int = -1
) -> tuple[Tensor, OwnerMeasurements]:
    """What the owner of n values makes of contributions, times the sum of their shares.

    Shapes: parts (codec.encoded_size(n),) uint8 each; gives (n,) float32. `shares`: those of 0 do not count.
    `variant`: index into `native.variants()`; -1: the best. Raises: ValueError for parts of another length.
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
        raise ValueError(f"no combination has this rule: {rule}")
    return out, measured
