"""Which learning rate counts: the best of those tried, and whether a worse one was tried on each side of it. Pure.

An optimum at the edge of what was tried is not known to be one. Of the reference (DDP) it would flatter all others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

Losses = Mapping[float, float | None]
"""Learning rate -> held-out loss; None for a run that diverged, which is worse than any other."""

_USUAL_RATIO = 2.0


def best_lr(losses: Losses) -> float | None:
    """The learning rate with the lowest loss; None where no run ended with one."""
    finite = {lr: loss for lr, loss in losses.items() if loss is not None and math.isfinite(loss)}
    return min(finite, key=lambda lr: finite[lr]) if finite else None


def is_bracketed(losses: Losses) -> bool:
    """Whether a lower and a higher learning rate than the best one were tried."""
    best = best_lr(losses)
    return best is not None and min(losses) < best < max(losses)


def next_lr(losses: Losses, *, most: int) -> float | None:
    """The learning rate to try next, beyond the edge at which the best one lies; None: bracketed, or tried enough.

    Where every run diverged it is a lower one.

    `most`: how many may be tried, the same for every method. Steps outward by the ratio of the two outermost.
    """
    if is_bracketed(losses) or len(losses) >= most:
        return None
    best, tried = best_lr(losses), sorted(losses)
    if best is None:
        return _rounded(tried[0] / _USUAL_RATIO)
    if len(tried) == 1:
        return _rounded(best * _USUAL_RATIO)
    if best == tried[-1]:
        return _rounded(best * tried[-1] / tried[-2])
    return _rounded(best * tried[0] / tried[1])


def _rounded(lr: float) -> float:
    """Three digits, so that names of runs stay short and equal."""
    return float(f"{lr:.3g}")
