"""What transfers show of the links, and how each link is driven by it. Pure.

What is seen of a rate is never more than a lower bound, so the best of the last few transfers counts. A link is driven
by a congestion control and a number of streams; what makes it faster is kept. CUBIC shares an access link best among
several neighbours; BBR does not mind lost packets. Which of the two a link needs shows only when both were tried, and
so does the number of streams. On a slow link fewer of them send, as TCP's own counters tell.

Rates are in Mbit/s, in one direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zeroband.elastic.transport.engine import LinkState

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


CUBIC, BBR = "cubic", "bbr"

_FIRST, MAX_STREAMS = 8, 32
_WORTH = 1.1
"""What does not bring a tenth more is not worth it."""

_LEAST_BYTES = 4 << 20
"""Least size of a transfer that tells something: less is over before TCP has found the rate of the link."""

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
    """Bytes per second as it was driven before."""

    @staticmethod
    def fixed(streams: int) -> LinkTuning:
        """Return the tuning for a number of streams that the user chose."""
        return LinkTuning(streams, may_grow=False)

    @property
    def is_lossy(self) -> bool:
        """Whether it loses packets by itself, as far as that was found out."""
        return self.knows_congestion and self.congestion == BBR

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
        if not self.may_grow or 2 * self.streams > MAX_STREAMS:
            return replace(self, is_settled=True)
        return replace(self, streams=2 * self.streams, trials=0, best=0.0, before=self.best)


_JUDGED_PACKETS = 128
"""Number of packets that tell what part of them is lost."""

_CROWDED, _CROWDED_WINDOW = 0.05, 5
"""Streams may crowd one another out where more than this share of packets is sent again and none may have more packets
under way than this: TCP learns of a loss from three packets that come after it (RFC 5681), or from a time-out."""

_THEIRS = 0.5
"""Losses are of the streams' own making where one alone loses less than this part of what all did."""

_ROOMY_WINDOW = 24


@dataclass(frozen=True)
class Senders:
    """How many of a link's streams send: one alone where they crowd one another out, and more as it finds room.

    `count`: None for all of them. `lost`: the share that all of them lost, while one is tried. `sent_packets`,
    `resent_packets`: the link's counters when they were judged last.
    """

    count: int | None = None
    lost: float | None = None
    is_emptying: bool = False
    """What the other streams had begun is still under way."""
    is_settled: bool = False
    """The losses are not of the streams' making."""
    sent_packets: int = 0
    resent_packets: int = 0

    def of(self, streams: int) -> int:
        """Return how many of `streams` streams send."""
        return streams if self.count is None else min(self.count, streams)

    def after(self, link: LinkState) -> Senders:
        """What follows from a link's counters, looked at while it sends."""
        sent, resent = link.sent_packets - self.sent_packets, link.resent_packets - self.resent_packets
        if 0 <= sent < _JUDGED_PACKETS or link.window == 0:
            return self
        seen = replace(self, sent_packets=link.sent_packets, resent_packets=link.resent_packets, is_emptying=False)
        if sent < 0 or self.is_emptying:  # other streams than those that were counted, or not yet one alone
            return seen
        return seen._judge(resent / sent, link)

    def _judge(self, lost: float, link: LinkState) -> Senders:
        if self.lost is not None:
            is_alone = lost < _THEIRS * self.lost
            return replace(self, lost=None, count=1 if is_alone else None, is_settled=not is_alone)
        is_crowded = lost > _CROWDED and link.window <= _CROWDED_WINDOW
        if self.count is None:
            is_tried = is_crowded and link.streams > 1 and not self.is_settled
            return replace(self, count=1, lost=lost, is_emptying=True) if is_tried else self
        if is_crowded:
            return replace(self, count=max(1, self.count // 2))
        if link.window >= _ROOMY_WINDOW:
            return replace(self, count=2 * self.count if 2 * self.count < link.streams else None)
        return self
