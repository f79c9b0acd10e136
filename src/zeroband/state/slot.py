"""Where a parameter lies in the flat state. Knows no torch, as the checkpoint writer does without it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in the flat buffer, in elements."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)
