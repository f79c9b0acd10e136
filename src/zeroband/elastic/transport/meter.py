"""What transfers show of the links: never more than a lower bound, so the best of the last few counts. Pure.

Rates are in Mbit/s, in one direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

WINDOW_S = 0.5
"""Long enough that bursts of acknowledgements do not look like a rate."""

LEAST_WINDOWS = 2
"""A transfer that is over sooner says nothing: TCP was still looking for the rate."""

KEPT = 4
"""Number of transfers of which the best counts: a member that was given little to send is not slow. Fewer say nothing:
the first ones share their links with nodes that meet, and shards sized by those would keep later ones from showing
more."""


class Meter:
    """The highest rate that one transfer reached over a window: what an access link carries at least."""

    def __init__(self) -> None:
        self._began: tuple[int, int, float] | None = None
        self._windows = 0
        self._best_sent = self._best_received = 0.0

    def see(self, sent_bytes: int, received_bytes: int, now_s: float) -> None:
        """Take note of what has moved since the transfer began."""
        if self._began is None:
            self._began = (sent_bytes, received_bytes, now_s)
        sent, received, since_s = self._began
        if now_s - since_s >= WINDOW_S:
            self._best_sent = max(self._best_sent, (sent_bytes - sent) / (now_s - since_s))
            self._best_received = max(self._best_received, (received_bytes - received) / (now_s - since_s))
            self._began = (sent_bytes, received_bytes, now_s)
            self._windows += 1

    @property
    def rate(self) -> int:
        """Rate of the slower direction; 0 where the transfer was too short."""
        return round(min(self._best_sent, self._best_received) * 8e-6) if self._windows >= LEAST_WINDOWS else 0


@dataclass(frozen=True)
class LearnedRates:
    """What the last transfers of a node showed."""

    own: tuple[int, ...] = ()
    """Rates of its access link; the newest comes last."""
    links: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """Rates to other members."""

    @property
    def own_rate(self) -> int:
        """Best rate of its access link; 0 where too little is known."""
        return _best(self.own)

    def link_rates(self) -> dict[str, int]:
        """Rates to the members that it last had a transfer with; 0 where too little is known."""
        return {member: _best(rates) for member, rates in self.links.items()}

    def after(self, own: int, links: Mapping[str, int]) -> LearnedRates:
        """What is known after another transfer: a rate of 0 says nothing, and who is not in `links` is forgotten."""
        return LearnedRates(_with(self.own, own), {m: _with(self.links.get(m, ()), rate) for m, rate in links.items()})


def _with(rates: tuple[int, ...], rate: int) -> tuple[int, ...]:
    return (*rates, rate)[-KEPT:] if rate > 0 else rates


def _best(rates: tuple[int, ...]) -> int:
    return max(rates) if len(rates) == KEPT else 0
