"""Rows of the table: one per method, at its best learning rate. Pure.

A best learning rate at the edge of those tried may not be optimal; for the reference (DDP), this favours all others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zeroband.tools.compare.methods import Arm
from zeroband.tools.compare.results import AtLink, RunMeasurements, RunResult, at_link, payload_ratio
from zeroband.tools.plan.forecast import Link

REFERENCE = "ddp"
ALONE = "single"


Losses = Mapping[float, float | None]
"""Held-out loss by learning rate; None for a run that diverged, which counts as worst."""

_USUAL_RATIO = 2.0


def best_lr(losses: Losses) -> float | None:
    """Return the learning rate with the lowest loss; None without any loss."""
    finite = {lr: loss for lr, loss in losses.items() if loss is not None and math.isfinite(loss)}
    return min(finite, key=lambda lr: finite[lr]) if finite else None


def chosen_by(losses: Losses) -> float:
    """The lowest loss; infinite where no run ended with one."""
    lr = best_lr(losses)
    return math.inf if lr is None else losses[lr] or 0.0


def is_bracketed(losses: Losses) -> bool:
    """Return whether learning rates below and above the best one were tried."""
    best = best_lr(losses)
    return best is not None and min(losses) < best < max(losses)


def next_lr(losses: Losses, *, most: int) -> float | None:
    """Return the learning rate to try next; None if the best is bracketed or `most` were tried.

    Steps beyond the edge at which the best lies, by the ratio of the two outermost; lower if every run diverged.
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


def next_alternative(losses: Mapping[int, float], count: int) -> int | None:
    """Return which of several values, in their order, to try next: from the middle on, the neighbours of the best one.

    `losses`: of those that were tried, by their place. None: these neighbours were tried.
    """
    if not losses:
        return count // 2
    best = min(losses, key=lambda place: losses[place])
    return next((place for place in (best + 1, best - 1) if 0 <= place < count and place not in losses), None)


def _rounded(lr: float) -> float:
    """Round to three digits, for short and stable names of runs."""
    return float(f"{lr:.3g}")


@dataclass(frozen=True)
class Row:
    """A method at its best learning rate, over the seeds."""

    arm: str
    search: Losses
    """Tuning losses of the learning rates tried with the first seed, without failed runs."""
    failures: tuple[str, ...]
    """Failures of all its runs."""
    lost: tuple[str, ...] = ()
    """Seeds without a loss at the best learning rate, and why; the mean without them would be biased."""
    runs: tuple[RunResult, ...] = ()
    """Finished runs at the best learning rate."""
    payload_ratio: float | None = None
    at_link: AtLink | None = None

    @property
    def lr(self) -> float | None:
        """Best learning rate; None if no run finished."""
        return best_lr(self.search)

    @property
    def is_bracketed(self) -> bool:
        return is_bracketed(self.search)

    @property
    def chosen_by(self) -> float:
        """Tuning loss of the best learning rate."""
        return chosen_by(self.search)

    @property
    def losses(self) -> tuple[float, ...]:
        """Losses of the finished seeds at the best learning rate."""
        return tuple(self.by_seed.values())

    @property
    def by_seed(self) -> Mapping[int, float]:
        """Losses by seed."""
        return {outcome.seed: outcome.loss for outcome in self.runs if outcome.loss is not None}

    @property
    def loss(self) -> float | None:
        """Mean over the seeds."""
        return statistics.mean(self.losses) if self.losses else None

    @property
    def spread(self) -> float:
        """Difference between the worst and the best seed."""
        return max(self.losses) - min(self.losses) if self.losses else 0.0

    @property
    def perplexity(self) -> float | None:
        return None if self.loss is None else math.exp(self.loss)

    @property
    def measured(self) -> RunMeasurements | None:
        """Counters of the first seed; bytes are the same for all."""
        return self.runs[0].measured if self.runs else None


def row_of(arm: Arm, outcomes: Sequence[RunResult], link: Link, *, overlap_steps: int, step_s: float | None) -> Row:
    """Return the row of a method. The learning rate is chosen with the seed of the first run."""
    own = [outcome for outcome in outcomes if outcome.arm == arm.name]
    search = {o.lr: o.tuning_loss for o in own if o.seed == own[0].seed and not o.failure}
    lr = best_lr(search)
    row = Row(
        arm=arm.name,
        search=search,
        failures=tuple(f"lr {o.lr:g}, seed {o.seed}: {o.failure}" for o in own if o.failure),
        lost=tuple(f"lr {o.lr:g}, seed {o.seed}: {_why_lost(o)}" for o in own if o.lr == lr and o.loss is None),
        runs=tuple(o for o in own if o.lr == lr and o.loss is not None),
    )
    counted = row.measured
    if counted is None:
        return row
    ratio = payload_ratio(counted, row.runs[0].params)
    return replace(row, payload_ratio=ratio, at_link=at_link(counted, link, overlap_steps=overlap_steps, step_s=step_s))


def _why_lost(outcome: RunResult) -> str:
    return outcome.failure.partition("\n")[0] or "it diverged"


def find(rows: Sequence[Row], arm: str) -> Row | None:
    """Return the row of a method if it has a loss."""
    return next((row for row in rows if row.arm == arm and row.loss is not None), None)


def figure_of(figure: str, of: float | None, over: float | None, to: float | None = None) -> float | None:
    """Return a figure of held-out losses (`FIGURES` in claims.py); None if a loss is missing."""
    if of is None or over is None:
        return None
    if figure == "ppl_ratio":
        return math.exp(of - over)
    if figure == "ln_ppl_ratio":
        return of - over
    if figure == "loss_ratio":
        return of / over
    return None if to is None or to == over else (of - over) / (to - over)


def statement(rows: Sequence[Row]) -> list[str]:
    """Return caveats about the table."""
    said: list[str] = []
    reference = find(rows, REFERENCE)
    if reference is None:
        said.append("No data parallel baseline finished, so no ratio is given.")
    elif not reference.is_bracketed:
        tried = ", ".join(f"{lr:g}" for lr in sorted(reference.search))
        said.append(
            f"The best learning rate of {REFERENCE}, {reference.lr:g}, lies at the edge of those tried ({tried}): the "
            "baseline may be better than shown, which favours all others."
        )
    open_ended = [row.arm for row in rows if row.loss is not None and not row.is_bracketed and row.arm != REFERENCE]
    if open_ended:
        said.append(f"Best learning rate at the edge of those tried: {', '.join(open_ended)}.")
    if any(len(row.losses) == 1 for row in rows):
        said.append("One seed: the spread between seeds is unknown, so small differences mean nothing.")
    if failed := [row.arm for row in rows if row.failures]:
        said.append(f"Failed runs: {', '.join(failed)}.")
    return said
