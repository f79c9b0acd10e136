"""Makes the lines of the table from outcomes: one for each method, at its best learning rate. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zeroband.tools.compare.methods import Arm
from zeroband.tools.compare.results import Outcome
from zeroband.tools.compare.search import best_lr, is_bracketed
from zeroband.tools.compare.trial_measures import AtLink, Measured, at_link, payload_ratio
from zeroband.tools.plan.forecast import Link

REFERENCE = "ddp"
ALONE = "single"


@dataclass(frozen=True)
class Row:
    """One method at its best learning rate, over the seeds."""

    arm: str
    lr: float | None
    """Best learning rate; None: no run ended well."""
    tried: tuple[float, ...]
    is_bracketed: bool
    losses: tuple[float, ...]
    """Loss of each seed that ended well, at the best learning rate."""
    failures: tuple[str, ...]
    """Failures of all its runs."""
    lost: tuple[str, ...] = ()
    """Seeds that have no loss at the best learning rate, and why: without them the mean is of the lucky ones."""
    runs: tuple[Outcome, ...] = ()
    """Outcomes at the best learning rate that ended well."""
    chosen_by: float = math.inf
    """Loss for tuning that the best learning rate had with the first seed."""
    payload_ratio: float | None = None
    at_link: AtLink | None = None

    @property
    def by_seed(self) -> Mapping[int, float]:
        """Loss of each seed that ended well, at the best learning rate."""
        return {outcome.seed: outcome.loss for outcome in self.runs if outcome.loss is not None}

    @property
    def loss(self) -> float | None:
        """Mean over the seeds."""
        return statistics.mean(self.losses) if self.losses else None

    @property
    def spread(self) -> float:
        """Distance between the best and the worst seed."""
        return max(self.losses) - min(self.losses) if self.losses else 0.0

    @property
    def perplexity(self) -> float | None:
        return None if self.loss is None else math.exp(self.loss)

    @property
    def measured(self) -> Measured | None:
        """The counters of the first seed; the others' bytes are the same."""
        return self.runs[0].measured if self.runs else None


def row_of(arm: Arm, outcomes: Sequence[Outcome], link: Link, *, overlap_steps: int, step_s: float | None) -> Row:
    """The line of one method from all its runs. The learning rate is chosen with the seed of the first run."""
    own = [outcome for outcome in outcomes if outcome.arm == arm.name]
    search = {o.lr: o.tuning_loss for o in own if o.seed == own[0].seed and not o.failure} if own else {}
    lr = best_lr(search)
    chosen = tuple(o for o in own if o.lr == lr and o.loss is not None)
    chosen_by = math.inf if lr is None else search[lr]
    failures = tuple(f"lr {o.lr:g}, seed {o.seed}: {o.failure}" for o in own if o.failure)
    row = Row(
        arm=arm.name,
        lr=lr,
        tried=tuple(sorted(search)),
        is_bracketed=is_bracketed(search),
        losses=tuple(o.loss for o in chosen if o.loss is not None),
        failures=failures,
        lost=tuple(f"lr {o.lr:g}, seed {o.seed}: {_why_lost(o)}" for o in own if o.lr == lr and o.loss is None),
        runs=chosen,
        chosen_by=math.inf if chosen_by is None else chosen_by,
    )
    counted = row.measured
    if counted is None:
        return row
    ratio = payload_ratio(counted, chosen[0].params)
    predicted = at_link(counted, link, overlap_steps=overlap_steps, step_s=step_s)
    return replace(row, payload_ratio=ratio, at_link=predicted)


def _why_lost(outcome: Outcome) -> str:
    return outcome.failure.partition("\n")[0] or "it diverged"


def find(rows: Sequence[Row], arm: str) -> Row | None:
    """The line of a method that ended well."""
    return next((row for row in rows if row.arm == arm and row.loss is not None), None)


def ppl_ratio(row: Row, over: Row | None) -> float | None:
    """Perplexity over that of another method."""
    if row.loss is None or over is None or over.loss is None:
        return None
    return math.exp(row.loss - over.loss)


def gap(row: Row, zero: Row | None, one: Row | None) -> float | None:
    """Where the loss lies between that of two methods: 0 at the first, 1 at the second."""
    losses = [None if r is None else r.loss for r in (row, zero, one)]
    if None in losses or losses[1] == losses[2]:
        return None
    own, low, high = (loss or 0.0 for loss in losses)
    return (own - low) / (high - low)


def statement(rows: Sequence[Row]) -> list[str]:
    """What a reader has to know before believing the table, in sentences."""
    said: list[str] = []
    reference = find(rows, REFERENCE)
    if reference is None:
        said.append("There is no data parallel baseline that ended well, so no ratio is given.")
    elif not reference.is_bracketed:
        said.append(
            f"The best learning rate of {REFERENCE}, {reference.lr:g}, lies at the edge of those that were tried "
            f"({_listed(reference.tried)}): the baseline may be better than shown, which flatters all others."
        )
    open_ended = [row.arm for row in rows if row.loss is not None and not row.is_bracketed and row.arm != REFERENCE]
    if open_ended:
        said.append(f"Best learning rate at the edge of those that were tried: {', '.join(open_ended)}.")
    if any(len(row.losses) == 1 for row in rows):
        said.append("One seed: differences below the spread between seeds, which it does not show, mean nothing.")
    if failed := [row.arm for row in rows if row.failures]:
        said.append(f"Runs that failed: {', '.join(failed)}.")
    return said


def _listed(lrs: Sequence[float]) -> str:
    return ", ".join(f"{lr:g}" for lr in lrs)
