"""Where a parameter lies in the flat state, and the bytes of a buffer. Loads no torch, as the checkpoint writer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from typing_extensions import Buffer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in the flat buffer, in elements."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    return memoryview(cast(Buffer, tensor.numpy())).cast("B")
