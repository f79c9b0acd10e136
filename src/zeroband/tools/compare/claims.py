"""What a comparison should show, written down before it runs, and whether it did. Pure.

Each claim is a table in [[compare.claims]]: a figure of one method, of which others, and the limit. A pattern,
`eager:*`, stands for the best of the methods that it fits, by what its learning rate was chosen by.

A figure is taken of each seed, on which all methods have the same start, data and held-out text, so it is paired. Three
answers are possible: its confidence interval lies within the limits, outside of them, or neither. Two seeds can rarely
tell: their interval is 12.7 times as wide as half of their distance.
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
    "bytes_ratio": "bytes that `over` sends a token over those of `of`",
    "payload_ratio": "2 N bytes a step over what `of` has to say",
}
_COUNTED = ("bytes_ratio", "payload_ratio")

_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t that 2.5 % lie above, for 1 to 10 degrees of freedom; with more of them it is taken for that of 10."""


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
    """A mean over the seeds, and where the mean over all seeds lies with 95 % confidence."""

    mean: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.mean:.4g}"
        if math.isinf(self.low):
            return f"{self.mean:.4g} with one seed, which shows no spread"
        return f"{self.mean:.4g}, 95 % of {self.low:.4g} to {self.high:.4g} over {self.seeds} seeds"


def interval_of(figures: Sequence[float]) -> Interval:
    """Return the mean of a figure of each seed with its confidence interval, by Student's t.

    One seed shows no spread, and the interval is all numbers.
    """
    count, mean = len(figures), statistics.mean(figures)
    if count == 1:
        return Interval(mean, -math.inf, math.inf, 1)
    half = _T_975[min(count - 1, len(_T_975)) - 1] * statistics.stdev(figures) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half, count)


@dataclass(frozen=True)
class ClaimVerdict:
    """A claim and what was found."""

    claim: Claim
    found: Interval | None
    """The figure that was found; None: what it needs is not there."""
    why: str = ""
    """Why nothing was found."""

    @property
    def answer(self) -> Answer:
        """Whether the whole interval lies within the limits, or outside of one of them."""
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
            raise ConfigError(f"compare.claims: {table!r}: `figure` is one of {', '.join(FIGURES)}, with a limit")
        claims.append(claim)
    return tuple(claims)


def check(claims: Sequence[Claim], rows: Sequence[Row]) -> tuple[ClaimVerdict, ...]:
    """What the rows say of each claim."""
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
    """What keeps a method from being evidence; empty where nothing does."""
    if row is None:
        is_there = any(_fits(one, name) for one in rows)
        return f"no run of {name} ended with a loss" if is_there else f"{name} is not in this comparison"
    lost = (*row.lost, *row.failures)
    return f"{row.arm} has a run without a loss ({lost[0].partition(chr(10))[0]})" if lost else ""


def best_of(rows: Sequence[Row], name: str) -> Row | None:
    """Return the best of the methods that ended well and have this name or fit this pattern."""
    fitting = [row for row in rows if row.losses and _fits(row, name)]
    return min(fitting, key=lambda row: row.chosen_by, default=None)


def _fits(row: Row, name: str) -> bool:
    return row.arm == name or fnmatchcase(row.arm, name)


def _named(name: str, row: Row | None) -> str:
    return name if row is None or row.arm == name else f"{name} ({row.arm})"


def _figures(figure: str, of: Row, over: Row | None, to: Row | None) -> Sequence[float] | None:
    """Return the figure of each seed that all of the methods have, so that what a seed does to all of them falls out.

    Counters are the same with every seed: they are exact, and given twice.
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
