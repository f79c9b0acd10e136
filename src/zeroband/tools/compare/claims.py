"""What a comparison should show, written down before it runs, and whether it did. Pure.

Each claim is a table in [[compare.claims]]: a figure of one method, of which others, and the limit. A pattern,
`eager:*`, stands for the best of the methods that it fits, by the loss with the first seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from zeroband.errors import ConfigError
from zeroband.tools.compare.table import Row, gap, ppl_ratio

FIGURES = {
    "ppl_ratio": "perplexity of `of` over that of `over`",
    "loss_ratio": "held-out loss of `of` over that of `over`",
    "gap": "(loss of `of` - loss of `over`) / (loss of `to` - loss of `over`)",
    "bytes_ratio": "bytes that `over` sends a token over those of `of`",
    "payload_ratio": "2 N bytes a step over what `of` has to say",
}


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
class ClaimVerdict:
    """A claim and what was found."""

    claim: Claim
    found: float | None
    """The figure that was found; None: what it needs is not there."""
    why: str = ""
    """Why nothing was found."""

    @property
    def is_met(self) -> bool | None:
        """Whether the claim holds; None where nothing was found."""
        if self.found is None:
            return None
        low, high = self.claim.at_least, self.claim.at_most
        return (low is None or self.found >= low) and (high is None or self.found <= high)

    def __str__(self) -> str:
        word = {True: "met", False: "NOT MET", None: "not measured"}[self.is_met]
        return f"{word}: {self.claim}; " + (self.why if self.found is None else f"found {self.found:.4g}")


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
    of, over, to = (_best(rows, name) for name in (claim.of, claim.over, claim.to))
    named = replace(claim, of=_named(claim.of, of), over=_named(claim.over, over), to=_named(claim.to, to))
    for name, row in ((claim.of, of), (claim.over, over), (claim.to, to)):
        if name and (why := _lacking(name, row, rows)):
            return ClaimVerdict(named, None, why)
    assert of is not None, "a claim is about a method"
    try:
        found = _figure(claim.figure, of, over, to)
    except (OverflowError, ZeroDivisionError) as error:
        return ClaimVerdict(named, None, f"the figure cannot be computed: {error}")
    if found is None:
        return ClaimVerdict(named, None, "the runs do not give this figure")
    return ClaimVerdict(named, found) if math.isfinite(found) else ClaimVerdict(named, None, f"the figure is {found}")


def _lacking(name: str, row: Row | None, rows: Sequence[Row]) -> str:
    """What keeps a method from being evidence; empty where nothing does."""
    if row is None:
        is_there = any(_fits(one, name) for one in rows)
        return f"no run of {name} ended with a loss" if is_there else f"{name} is not in this comparison"
    lost = (*row.lost, *row.failures)
    return f"{row.arm} has a run without a loss ({lost[0].partition(chr(10))[0]})" if lost else ""


def _best(rows: Sequence[Row], name: str) -> Row | None:
    """The best of the methods that ended well and have this name or fit this pattern."""
    fitting = [row for row in rows if row.losses and _fits(row, name)]
    return min(fitting, key=lambda row: row.losses[0], default=None)


def _fits(row: Row, name: str) -> bool:
    return row.arm == name or fnmatchcase(row.arm, name)


def _named(name: str, row: Row | None) -> str:
    return name if row is None or row.arm == name else f"{name} ({row.arm})"


def _figure(figure: str, of: Row, over: Row | None, to: Row | None) -> float | None:
    figures: Mapping[str, float | None] = {
        "ppl_ratio": ppl_ratio(of, over),
        "loss_ratio": None if over is None or over.loss is None or of.loss is None else of.loss / over.loss,
        "gap": gap(of, over, to),
        "bytes_ratio": _bytes_ratio(of, over),
        "payload_ratio": of.payload_ratio,
    }
    return figures[figure]


def _bytes_ratio(of: Row, over: Row | None) -> float | None:
    if over is None or of.measured is None or over.measured is None or not of.measured.sent_per_token:
        return None
    return over.measured.sent_per_token / of.measured.sent_per_token
