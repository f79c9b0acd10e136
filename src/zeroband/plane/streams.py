"""How many streams a link should have: more of them as long as that makes it faster. Pure; one for each member."""

from __future__ import annotations

from dataclasses import dataclass

_FIRST, _MOST = 4, 16
_WORTH = 1.1
"""A doubling that does not bring a tenth more stays the last one."""

_LEAST_BYTES = 4 << 20
"""Less than this is over before TCP has found the rate of the link."""

_TRIALS = 2
"""Transfers with each number; the faster one counts, since others may use the link too."""


@dataclass(frozen=True)
class StreamCount:
    """What was learned so far of one link. `wanted` is the number to have now."""

    wanted: int = _FIRST
    is_settled: bool = False
    trials: int = 0
    best: float = 0.0
    """Bytes per second with the number that is wanted now."""
    before: float = 0.0
    """With half of it."""

    @staticmethod
    def fixed(streams: int) -> StreamCount:
        """For a number that the user chose."""
        return StreamCount(streams, is_settled=True)

    def after(self, sent_bytes: int, took_s: float) -> StreamCount:
        """What is known after another transfer over the link."""
        if self.is_settled or sent_bytes < _LEAST_BYTES or took_s <= 0:
            return self
        trials, best = self.trials + 1, max(self.best, sent_bytes / took_s)
        if trials < _TRIALS:
            return StreamCount(self.wanted, False, trials, best, self.before)
        is_worth_it = best >= _WORTH * self.before and 2 * self.wanted <= _MOST
        if not is_worth_it:
            return StreamCount(self.wanted, True, trials, best, self.before)
        return StreamCount(2 * self.wanted, False, 0, 0.0, best)
