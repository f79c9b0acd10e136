"""Claims about a comparison, stated before it runs, and their verdicts. Pure.

Each claim is a table in [[compare.claims]]: a figure of one method relative to others, and limits. A pattern such as
`eager:*` stands for the best matching method by its tuning loss.

Figures are paired by seed, as all methods share start, data and held-out text of a seed. The confidence interval lies
within the limits, outside, or neither. Two seeds rarely suffice: their interval is 12.7 times half of their distance.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from zeroband.errors import ConfigError
from zeroband.tools.compare.table import Row, figure_of

Answer = Literal["met", "NOT MET", "cannot tell", "not measured"]

FIGURES = {
    "ppl_ratio": "perplexity of `of` over that of `over`",
    "loss_ratio": "held-out loss of `of` over that of `over`",
    "ln_ppl_ratio": "ln of ppl_ratio: held-out loss of `of` less that of `over`, in nats per token",
    "gap": "(loss of `of` - loss of `over`) / (loss of `to` - loss of `over`)",
    "bytes_ratio": "bytes per token that `over` sends over those of `of`",
    "payload_ratio": "2 N bytes per step over the contributions of `of`",
}
_COUNTED = ("bytes_ratio", "payload_ratio")

_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantile of Student's t for 1 to 10 degrees of freedom; beyond, that of 10 is used."""


@dataclass(frozen=True)
class Claim:
    """A figure and its limits."""

    figure: str
    of: str
    over: str = ""
    to: str = ""
    at_least: float | None = None
    at_most: float | None = None

    def __str__(self) -> str:
        others = "".join(f" {word} {name}" for word, name in (("over", self.over), ("to", self.to)) if name)
        limits = (("at least", self.at_least), ("at most", self.at_most))
        said = " and ".join(f"{word} {limit:g}" for word, limit in limits if limit is not None)
        return f"{self.figure} of {self.of}{others}: {said}"


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its 95 % confidence interval."""

    mean: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.mean:.4g}"
        if math.isinf(self.low):
            return f"{self.mean:.4g} with one seed, spread unknown"
        return f"{self.mean:.4g}, 95 % of {self.low:.4g} to {self.high:.4g} over {self.seeds} seeds"


def interval_of(figures: Sequence[float]) -> Interval:
    """Return the mean over seeds with its confidence interval by Student's t; infinite for one seed."""
    count, mean = len(figures), statistics.mean(figures)
    if count == 1:
        return Interval(mean, -math.inf, math.inf, 1)
    half = _T_975[min(count - 1, len(_T_975)) - 1] * statistics.stdev(figures) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half, count)


@dataclass(frozen=True)
class ClaimVerdict:
    """A claim and its measured figure."""

    claim: Claim
    found: Interval | None
    """None if it could not be measured."""
    why: str = ""
    """Why it could not be measured."""

    @property
    def answer(self) -> Answer:
        """Whether the whole interval lies within the limits or outside of one of them."""
        if self.found is None:
            return "not measured"
        low, high = self.claim.at_least, self.claim.at_most
        if (low is not None and self.found.high < low) or (high is not None and self.found.low > high):
            return "NOT MET"
        is_within = (low is None or self.found.low >= low) and (high is None or self.found.high <= high)
        return "met" if is_within else "cannot tell"

    def __str__(self) -> str:
        return f"{self.answer}: {self.claim}; " + (self.why if self.found is None else f"found {self.found}")


def parse_claims(value: Any) -> tuple[Claim, ...]:
    """Read claims from the tables of a file. Raises ConfigError."""
    claims: list[Claim] = []
    for table in value:
        try:
            claim = Claim(**table)
        except TypeError as error:
            raise ConfigError(f"compare.claims: {table!r}: {error}") from None
        if claim.figure not in FIGURES or (claim.at_least is None and claim.at_most is None):
            raise ConfigError(f"compare.claims: {table!r}: needs a `figure` of {', '.join(FIGURES)} and a limit")
        claims.append(claim)
    return tuple(claims)


def check(claims: Sequence[Claim], rows: Sequence[Row]) -> tuple[ClaimVerdict, ...]:
    """Check each claim against the rows."""
    return tuple(_verdict(claim, rows) for claim in claims)


def _verdict(claim: Claim, rows: Sequence[Row]) -> ClaimVerdict:
    of, over, to = (best_of(rows, name) for name in (claim.of, claim.over, claim.to))
    named = replace(claim, of=_named(claim.of, of), over=_named(claim.over, over), to=_named(claim.to, to))
    for name, row in ((claim.of, of), (claim.over, over), (claim.to, to)):
        if name and (why := _lacking(name, row, rows)):
            return ClaimVerdict(named, None, why)
    assert of is not None, "a claim is about a method"
    try:
        found = _figures(claim.figure, of, over, to)
    except (OverflowError, ZeroDivisionError) as error:
        return ClaimVerdict(named, None, f"the figure cannot be computed: {error}")
    if found is None:
        return ClaimVerdict(named, None, "the runs do not give this figure")
    if bad := [figure for figure in found if not math.isfinite(figure)]:
        return ClaimVerdict(named, None, f"the figure is {bad[0]}")
    return ClaimVerdict(named, interval_of(found))


def _lacking(name: str, row: Row | None, rows: Sequence[Row]) -> str:
    """Return why a method cannot serve as evidence, else an empty string."""
    if row is None:
        is_there = any(_fits(one, name) for one in rows)
        return f"no run of {name} ended with a loss" if is_there else f"{name} is not in this comparison"
    lost = (*row.lost, *row.failures)
    return f"{row.arm} has a run without a loss ({lost[0].partition(chr(10))[0]})" if lost else ""


def best_of(rows: Sequence[Row], name: str) -> Row | None:
    """Return the best finished method with this name or pattern."""
    fitting = [row for row in rows if row.losses and _fits(row, name)]
    return min(fitting, key=lambda row: row.chosen_by, default=None)


def _fits(row: Row, name: str) -> bool:
    return row.arm == name or fnmatchcase(row.arm, name)


def _named(name: str, row: Row | None) -> str:
    return name if row is None or row.arm == name else f"{name} ({row.arm})"


def _figures(figure: str, of: Row, over: Row | None, to: Row | None) -> Sequence[float] | None:
    """Return the figure for each seed that all methods have, so that the effect of the seed cancels out.

    Counters do not depend on the seed; the exact value is returned twice.
    """
    if figure in _COUNTED:
        counted = _bytes_ratio(of, over) if figure == "bytes_ratio" else of.payload_ratio
        return None if counted is None else (counted, counted)
    others = [row.by_seed for row in (over, to) if row is not None]
    seeds = [seed for seed in of.by_seed if all(seed in losses for losses in others)]
    found = [figure_of(figure, of.by_seed[seed], *(losses[seed] for losses in others)) for seed in seeds]
    known = [one for one in found if one is not None]
    return known if known and len(known) == len(found) else None


def _bytes_ratio(of: Row, over: Row | None) -> float | None:
    if over is None or of.measured is None or over.measured is None or not of.measured.sent_per_token:
        return None
    return over.measured.sent_per_token / of.measured.sent_per_token
