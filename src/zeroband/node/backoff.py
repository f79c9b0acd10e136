"""Pauses between attempts, each longer than the one before. The caller decides how long it tries.

One thread at a time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass
class Backoff:
    """Pauses from `first_s` on, each longer than the one before by `factor`, up to `most_s`.

    `jitter`: this part of a pause is left to chance, so that many who lost the same thing at one moment do not all come
    back at one moment.
    """

    first_s: float
    most_s: float
    jitter: float = 0.0
    factor: float = 2.0

    def __post_init__(self) -> None:
        self.longest_s = self.first_s
        """The next pause at its longest."""

    def pause_s(self) -> float:
        """Return the next pause; the one after it is longer."""
        longest_s, self.longest_s = self.longest_s, min(self.factor * self.longest_s, self.most_s)
        return longest_s * random.uniform(1 - self.jitter, 1)
