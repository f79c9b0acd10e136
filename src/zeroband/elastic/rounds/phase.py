"""Phase length: how many inner steps this node makes in a round, a fixed number or what fits into a time. Pure.

Between two phases contributions travel, and have the link for a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_FIRST_STEPS = 8
"""Steps of a round that only shows how fast this node is."""

_SURPLUS = 1.5
"""Samples are asked for so many times the expected steps; what is not used goes back to the run."""


class PhaseLength:
    """`steps`: in a round, at most. `round_s`: a round ends after this time; None: after `steps` alone."""

    def __init__(self, steps: int, round_s: float | None = None) -> None:
        self._steps = steps
        self._round_s = round_s
        self._step_s: float | None = None
        self._began_at_s = 0.0

    @property
    def most_steps(self) -> int:
        """The most inner steps of a round."""
        return self._steps

    def begin(self, now_s: float) -> None:
        """A round begins."""
        self._began_at_s = now_s

    def is_over(self, now_s: float, steps: int) -> bool:
        """Whether the round's time is over after so many steps: another one would end further from it."""
        if self._round_s is None or steps == 0:
            return False
        elapsed_s = now_s - self._began_at_s
        return elapsed_s + elapsed_s / steps / 2 >= self._round_s

    def learn(self, now_s: float, steps: int) -> None:
        """The round took so many steps until now."""
        if steps:
            self._step_s = (now_s - self._began_at_s) / steps

    def wanted_steps(self) -> int:
        """Inner steps for which to ask samples."""
        if self._round_s is None:
            return self._steps
        if self._step_s is None:
            return min(_FIRST_STEPS, self._steps)
        return min(math.ceil(_SURPLUS * self._round_s / max(self._step_s, 1e-6)) + 1, self._steps)


@dataclass(frozen=True)
class TransferWindow:
    """Contributions of a round on their way. Times are of one clock."""

    began_at_s: float
    before_at_s: float
    """When those of the round before had travelled."""
    at_most_s: float = math.inf
    """For how long the link is theirs at most."""

    def owns_link(self, now_s: float) -> bool:
        """Whether the link is theirs alone: as long as they had left it to others, joiners among them."""
        return now_s - self.began_at_s < min(self.began_at_s - self.before_at_s, self.at_most_s)
