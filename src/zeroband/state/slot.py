"""A parameter's place in the flat state, and the bytes of a buffer. Without torch, for the checkpoint writer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from typing_extensions import Buffer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Slot:
    """A parameter's place in the flat buffer, in elements."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor without a copy."""
    return memoryview(cast(Buffer, tensor.numpy())).cast("B")
