"""How a link is driven: by which congestion control, with how many streams. What makes it faster is kept.

CUBIC shares an access link best among several neighbours; BBR does not mind lost packets. Which of the two a link needs
shows only when both were tried, and so does the number of streams. Pure; one for each member.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

CUBIC, BBR = "cubic", "bbr"

_FIRST, _MOST = 8, 32
_WORTH = 1.1
"""What does not bring a tenth more is not worth it."""

_LEAST_BYTES = 4 << 20
"""Less than this is over before TCP has found the rate of the link."""

_TRIALS = 2
"""Transfers with each setting; the faster one counts, since others may use the link too."""


@dataclass(frozen=True)
class LinkTuning:
    """What was learned so far of one link. `streams` and `congestion` are what it should have now."""

    streams: int = _FIRST
    congestion: str = CUBIC
    may_grow: bool = True
    """Whether the number of streams is ours to choose."""
    is_settled: bool = False
    knows_congestion: bool = False
    """Whether both controls were tried."""
    trials: int = 0
    best: float = 0.0
    """Bytes per second as it is driven now."""
    before: float = 0.0
    """And as it was driven before."""

    @staticmethod
    def fixed(streams: int) -> LinkTuning:
        """For a number of streams that the user chose."""
        return LinkTuning(streams, may_grow=False)

    def after(self, sent_bytes: int, took_s: float) -> LinkTuning:
        """What is known after another transfer over the link."""
        if self.is_settled or sent_bytes < _LEAST_BYTES or took_s <= 0:
            return self
        tried = replace(self, trials=self.trials + 1, best=max(self.best, sent_bytes / took_s))
        return tried if tried.trials < _TRIALS else tried._next()

    def _next(self) -> LinkTuning:
        if self.before == 0:
            return replace(self, congestion=BBR, trials=0, best=0.0, before=self.best)
        pays = self.best >= _WORTH * self.before
        if not self.knows_congestion:
            congestion, best = BBR if pays else CUBIC, max(self.best, self.before)
            return replace(self, congestion=congestion, knows_congestion=True, best=best)._grow()
        return self._grow() if pays else replace(self, is_settled=True)

    def _grow(self) -> LinkTuning:
        if not self.may_grow or 2 * self.streams > _MOST:
            return replace(self, is_settled=True)
        return replace(self, streams=2 * self.streams, trials=0, best=0.0, before=self.best)
