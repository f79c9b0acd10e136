"""What is learned of links from transfer to transfer, and set for the next: rates, streams, congestion, pace. Pure.

A measured rate is only a lower bound, so the best of the last few transfers counts. CUBIC shares an access link most
fairly; BBR tolerates packet loss. Each link tries both, then growing numbers of streams, and keeps what is faster. On a
slow link fewer streams send, as decided by TCP's counters.

Links that share a slow access link are paced slightly below its capacity. TCP finds a link's rate by filling its queue
until packets are lost. If several links share an access link, some get more and finish early, the access link is then
partly idle, and packets lost at the receiver's end were sent in vain. With rates at which all links finish together,
slightly below capacity, nothing queues and nothing is lost. The target duration is estimated from the middle of an
unpaced transfer, when all links are busy, and then refined by trial. All members learn the last duration from the plan,
so all compute the same target.

Rates are in Mbit/s, in one direction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zeroband.elastic.transport.engine import LinkState

# -- rates -------------------------------------------------------------------------------------------------------------

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


# -- the congestion control and the streams of a link ------------------------------------------------------------------

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


# -- the pace of links that share an access link -----------------------------------------------------------------------

_MID_RANGE = (0.25, 0.65)
"""Measured range of a transfer: before it TCP is in slow start, after it the first links are done."""

_UNPACED_TRIALS = 2
"""Unpaced transfers before the first paced one; the faster counts, since link measurements may disturb the other."""

_MIN_S = 1.0
"""Shorter transfers are not paced: latency dominates them."""

_MAX_BYTES_PER_S = 8e6
"""Highest paced rate of a link. Faster ones need several streams, and are no home access links."""

_KEPT_FACTOR, _KEPT_SLACK_S = 1.03, 0.05
"""A transfer kept its target if it took at most this factor plus these seconds: pacing does not include latency."""

_SLOWER, _MAX_SLOWER = 1.03, 1.08
"""While no target was kept, it is slowed by the first factor, up to the second in total: TCP is hardly slower."""

_STEP, _MAX_STEP, _BACK = 0.02, 0.16, 4
"""A kept target is sped up by the first fraction, doubling up to the second, until one is missed; then steps are
divided by the third number. Missing with the smallest step ends the search."""

_HARMFUL, _MAX_HARMFUL = 1.5, 2
"""A paced transfer is harmful if it takes this factor of the kept time (the links have changed) or, if none was kept,
of the target (a single stream is too slow, as on a lossy link). After the second number in a row pacing stops."""

_LATE, _MAX_LATE = 1.1, 3
"""A found target is late beyond the first factor; after that many late transfers in a row the search restarts."""

_REST, _LONG_REST = 32, 1024
"""Transfers before a finished search resumes; the long one if pacing was harmful."""


class MidTransfer:
    """Extrapolates a transfer's duration from the rate of its middle part."""

    def __init__(self, to_receive_bytes: int) -> None:
        self._to_receive = to_receive_bytes
        self._marks: list[tuple[int, float]] = []

    def see(self, received_bytes: int, now_s: float) -> None:
        """Record the bytes received since the transfer began."""
        if len(self._marks) < len(_MID_RANGE) and received_bytes >= _MID_RANGE[len(self._marks)] * self._to_receive:
            self._marks.append((received_bytes, now_s))

    @property
    def whole_s(self) -> float:
        """Extrapolated duration; 0 if the transfer was too short to measure."""
        if len(self._marks) < len(_MID_RANGE):
            return 0.0
        (first, first_s), (last, last_s) = self._marks
        return self._to_receive * (last_s - first_s) / (last - first) if last > first else 0.0


@dataclass(frozen=True)
class PacedKind:
    """Search state of one kind of transfer."""

    target_s: float | None = None
    """Target duration of the next one; None: unpaced."""
    guess_s: float = math.inf
    """Shortest extrapolated duration of the unpaced transfers."""
    free: int = 0
    """Number of unpaced transfers."""
    kept_s: float = math.inf
    """Shortest target that was kept."""
    step: float = 0.0
    """Step from that to the current target; 0: none was kept."""
    is_fine: bool = False
    """A target was missed: steps no longer grow."""
    bad: int = 0
    """Consecutive late or harmful transfers."""
    rests: int = 0
    """Transfers until the search resumes."""

    def after(self, took_s: float) -> PacedKind:
        """Return the state after another transfer. `took_s` of an unpaced one is extrapolated from its middle."""
        if self.rests > 0:
            return self._resting(took_s)
        if self.target_s is None:
            return self._left_to_tcp(took_s)
        if took_s > _HARMFUL * (self.target_s if self.kept_s == math.inf else self.kept_s):
            return self._harmed()
        if took_s <= _KEPT_FACTOR * self.target_s + _KEPT_SLACK_S:
            return self._kept(self.target_s)
        return self._missed(self.target_s)

    def _harmed(self) -> PacedKind:
        if self.bad + 1 < _MAX_HARMFUL:
            return replace(self, bad=self.bad + 1)
        return PacedKind(rests=_LONG_REST) if self.kept_s == math.inf else PacedKind()

    def _left_to_tcp(self, took_s: float) -> PacedKind:
        seen = replace(self, guess_s=min(self.guess_s, took_s), free=self.free + 1)
        if seen.free < _UNPACED_TRIALS:
            return seen
        return replace(seen, target_s=seen.guess_s) if seen.guess_s >= _MIN_S else PacedKind(rests=_REST)

    def _kept(self, target_s: float) -> PacedKind:
        step = self.step if self.is_fine else min(2 * self.step, _MAX_STEP) or _STEP
        return replace(self, kept_s=target_s, target_s=target_s / (1 + step), step=step, bad=0)

    def _missed(self, target_s: float) -> PacedKind:
        kept_s = self.kept_s
        if kept_s == math.inf:
            slower_s = _SLOWER * target_s
            pays = slower_s <= _MAX_SLOWER * self.guess_s
            return replace(self, target_s=slower_s, bad=0) if pays else PacedKind(rests=_REST)
        if self.step <= _STEP:
            return PacedKind(target_s=kept_s, kept_s=kept_s, rests=_REST)
        step = max(self.step / _BACK, _STEP)
        return replace(self, target_s=kept_s / (1 + step), step=step, is_fine=True, bad=0)

    def _resting(self, took_s: float) -> PacedKind:
        is_late = self.target_s is not None and took_s > _LATE * self.target_s + _KEPT_SLACK_S
        bad = self.bad + 1 if is_late else 0
        if bad == _MAX_LATE:
            return PacedKind()
        if self.rests > 1:
            return replace(self, bad=bad, rests=self.rests - 1)
        if self.target_s is None:
            return PacedKind()
        return PacedKind(target_s=self.target_s / (1 + _STEP), kept_s=self.target_s, step=_STEP)


Kind = tuple[int, ...]
"""Kind of a transfer: the total bytes of all members, and what else tells it from others."""


@dataclass
class RateControl:
    """Targets of all transfers among the same members, equal on all of them; each kind has a separate search."""

    _between: tuple[int, tuple[str, ...]] = (0, ())
    """Epoch and its members."""
    _kinds: dict[Kind, PacedKind] = field(default_factory=dict[Kind, PacedKind])
    _last: tuple[Kind, int] | None = None
    """The last transfer, and its round."""

    def target_s(
        self, epoch: int, members: tuple[str, ...], kind: Kind, outer_round: int, last_took_s: float
    ) -> float | None:
        """Return a transfer's target duration; None: unpaced.

        `last_took_s`: duration of the previous round's transfer, as the plan tells all members; 0: unknown.
        """
        if (epoch, members) != self._between:
            self._between, self._kinds, self._last = (epoch, members), {}, None
        if self._last is not None and self._last[1] != outer_round and last_took_s > 0:
            last = self._last[0]
            self._kinds[last] = self._kinds.get(last, PacedKind()).after(last_took_s)
        self._last = (kind, outer_round)
        target_s = self._kinds.get(kind, PacedKind()).target_s
        if target_s is None or len(members) < 3 or 2 * kind[0] / len(members) > _MAX_BYTES_PER_S * target_s:
            return None  # two members share no access link, or the link is fast
        return target_s
