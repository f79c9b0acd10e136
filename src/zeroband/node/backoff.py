"""Exponential back-off; the caller decides how long to retry. Use from one thread at a time."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass
class Backoff:
    """Pauses from `first_s` up to `most_s`, each `factor` times the one before.

    `jitter`: random fraction of a pause, which spreads the retries of many clients of one failed service.
    """

    first_s: float
    most_s: float
    jitter: float = 0.0
    factor: float = 2.0

    def __post_init__(self) -> None:
        self.longest_s = self.first_s
        """The next pause without jitter."""

    def pause_s(self) -> float:
        """Return the next pause, and lengthen the one after it."""
        longest_s, self.longest_s = self.longest_s, min(self.factor * self.longest_s, self.most_s)
        return longest_s * random.uniform(1 - self.jitter, 1)
