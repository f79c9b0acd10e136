"""Measured link rates, and the tuning of each link: congestion control and number of streams. Pure.

A measured rate is only a lower bound, so the best of the last few transfers counts. CUBIC shares an access link most
fairly; BBR tolerates packet loss. Each link tries both, then growing numbers of streams, and keeps what is faster. On a
slow link fewer streams send, as decided by TCP's counters.

Rates are in Mbit/s, in one direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zeroband.elastic.transport.engine import LinkState

WINDOW_S = 0.5
"""Long enough to average over bursts of acknowledgements."""

MIN_WINDOWS = 2
"""Shorter transfers are ignored: TCP was still in slow start."""

KEPT_TRANSFERS = 4
"""Number of transfers of which the best counts: a member that had little to send is not slow. Fewer are ignored: the
first ones compete with joining nodes, and shards sized by them would hide higher rates later."""


class Meter:
    """The highest rate of one transfer over a window: a lower bound for the access link."""

    def __init__(self) -> None:
        self._began: tuple[int, int, float] | None = None
        self._windows = 0
        self._best_sent = self._best_received = 0.0

    def see(self, sent_bytes: int, received_bytes: int, now_s: float) -> None:
        """Record the bytes moved since the transfer began."""
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
        """Rate of the slower direction; 0 if the transfer was too short."""
        return round(min(self._best_sent, self._best_received) * 8e-6) if self._windows >= MIN_WINDOWS else 0


@dataclass(frozen=True)
class LearnedRates:
    """Rates measured in a node's last transfers."""

    own: tuple[int, ...] = ()
    """Rates of its access link, newest last."""
    links: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """Rates to other members."""

    @property
    def own_rate(self) -> int:
        """Best rate of its access link; 0: too few measurements."""
        return _best(self.own)

    def link_rates(self) -> dict[str, int]:
        """Best rates to the members of its last transfer; 0: too few measurements."""
        return {member: _best(rates) for member, rates in self.links.items()}

    def after(self, own: int, links: Mapping[str, int]) -> LearnedRates:
        """Add a transfer's rates: 0 is ignored, and members that are not in `links` are forgotten."""
        return LearnedRates(
            _appended(self.own, own), {m: _appended(self.links.get(m, ()), rate) for m, rate in links.items()}
        )


def _appended(rates: tuple[int, ...], rate: int) -> tuple[int, ...]:
    return (*rates, rate)[-KEPT_TRANSFERS:] if rate > 0 else rates


def _best(rates: tuple[int, ...]) -> int:
    return max(rates) if len(rates) == KEPT_TRANSFERS else 0


CUBIC, BBR = "cubic", "bbr"

_FIRST, MAX_STREAMS = 8, 32
_MIN_GAIN = 1.1
"""Gain for which a setting is kept."""

_MIN_BYTES = 4 << 20
"""Smaller transfers are ignored: they end in TCP's slow start."""

_TRIALS = 2
"""Transfers per setting; the faster one counts, since other traffic may share the link."""


@dataclass(frozen=True)
class LinkTuning:
    """Search state of one link; `streams` and `congestion` are its current settings."""

    streams: int = _FIRST
    congestion: str = CUBIC
    may_grow: bool = True
    """Whether the number of streams may be changed; False: the user set it."""
    is_settled: bool = False
    knows_congestion: bool = False
    """Whether both congestion controls were tried."""
    trials: int = 0
    best: float = 0.0
    """Bytes per second with the current settings."""
    before: float = 0.0
    """Bytes per second with the previous settings."""

    @staticmethod
    def fixed(streams: int) -> LinkTuning:
        """Return a tuning with the user's number of streams."""
        return LinkTuning(streams, may_grow=False)

    @property
    def is_lossy(self) -> bool:
        """Whether the link is known to lose packets without congestion: BBR was faster."""
        return self.knows_congestion and self.congestion == BBR

    def after(self, sent_bytes: int, took_s: float) -> LinkTuning:
        """Return the search state after another transfer."""
        if self.is_settled or sent_bytes < _MIN_BYTES or took_s <= 0:
            return self
        tried = replace(self, trials=self.trials + 1, best=max(self.best, sent_bytes / took_s))
        return tried if tried.trials < _TRIALS else tried._next()

    def _next(self) -> LinkTuning:
        if self.before == 0:
            return replace(self, congestion=BBR, trials=0, best=0.0, before=self.best)
        pays = self.best >= _MIN_GAIN * self.before
        if not self.knows_congestion:
            congestion, best = BBR if pays else CUBIC, max(self.best, self.before)
            return replace(self, congestion=congestion, knows_congestion=True, best=best)._grow()
        return self._grow() if pays else replace(self, is_settled=True)

    def _grow(self) -> LinkTuning:
        if not self.may_grow or 2 * self.streams > MAX_STREAMS:
            return replace(self, is_settled=True)
        return replace(self, streams=2 * self.streams, trials=0, best=0.0, before=self.best)


_SAMPLE_PACKETS = 128
"""Packets sent between two measurements of the loss rate."""

_CROWDED, _CROWDED_WINDOW = 0.05, 5
"""Loss rate above which, and mean congestion window up to which, streams may be starving each other: with so few
packets in flight TCP often gets no three duplicate ACKs (RFC 5681) and must wait for a time-out."""

_SELF_INFLICTED = 0.5
"""The streams cause the losses themselves if a single one loses less than this fraction of what all of them did."""

_ROOMY_WINDOW = 24


@dataclass(frozen=True)
class Senders:
    """How many of a link's streams send: a single one if they starve each other, and more as its window grows.

    `count`: None: all. `lost`: loss rate with all streams, while a single one is tried. `sent_packets`,
    `resent_packets`: the link's counters at the last decision.
    """

    count: int | None = None
    lost: float | None = None
    is_emptying: bool = False
    """The other streams are still draining, so losses do not count yet."""
    is_settled: bool = False
    """The streams do not cause the losses: no further trial."""
    sent_packets: int = 0
    resent_packets: int = 0

    def of(self, streams: int) -> int:
        """Return the number of sending streams out of `streams`."""
        return streams if self.count is None else min(self.count, streams)

    def after(self, link: LinkState) -> Senders:
        """Return the decision after reading a link's counters while it sends."""
        sent, resent = link.sent_packets - self.sent_packets, link.resent_packets - self.resent_packets
        if 0 <= sent < _SAMPLE_PACKETS or link.window == 0:
            return self
        seen = replace(self, sent_packets=link.sent_packets, resent_packets=link.resent_packets, is_emptying=False)
        if sent < 0 or self.is_emptying:  # the streams were replaced, or the others are still draining
            return seen
        return seen._judge(resent / sent, link)

    def _judge(self, lost: float, link: LinkState) -> Senders:
        if self.lost is not None:
            is_alone = lost < _SELF_INFLICTED * self.lost
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
