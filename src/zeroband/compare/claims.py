"""What a comparison should show, written down before it runs, and whether it did. Pure.

Each claim is a table in [[compare.claims]]: a figure of one method, of which others, and the limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zeroband.compare.table import Row, find, gap, ppl_ratio
from zeroband.errors import ConfigError

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
class Verdict:
    """A claim and what was found."""

    claim: Claim
    found: float | None
    """None: a run that it needs did not end well."""

    @property
    def is_met(self) -> bool | None:
        """None where nothing was found."""
        if self.found is None:
            return None
        low, high = self.claim.at_least, self.claim.at_most
        return (low is None or self.found >= low) and (high is None or self.found <= high)

    def __str__(self) -> str:
        word = {True: "met", False: "NOT MET", None: "not measured"}[self.is_met]
        return f"{word}: {self.claim}" + ("" if self.found is None else f"; found {self.found:.4g}")


def parse_claims(value: Any) -> tuple[Claim, ...]:
    """From the tables of a file. Raises ConfigError."""
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


def check(claims: Sequence[Claim], rows: Sequence[Row]) -> tuple[Verdict, ...]:
    """What the rows say of each claim."""
    return tuple(Verdict(claim, _figure(claim, rows)) for claim in claims)


def _figure(claim: Claim, rows: Sequence[Row]) -> float | None:
    of, over, to = (find(rows, name) for name in (claim.of, claim.over, claim.to))
    if of is None:
        return None
    figures: Mapping[str, float | None] = {
        "ppl_ratio": ppl_ratio(of, over),
        "loss_ratio": None if over is None or over.loss is None or of.loss is None else of.loss / over.loss,
        "gap": gap(of, over, to),
        "bytes_ratio": _bytes_ratio(of, over),
        "payload_ratio": of.payload_ratio,
    }
    return figures[claim.figure]


def _bytes_ratio(of: Row, over: Row | None) -> float | None:
    if over is None or of.measured is None or over.measured is None or not of.measured.sent_per_token:
        return None
    return over.measured.sent_per_token / of.measured.sent_per_token
