"""Stall detection: how long a transfer may make no progress before it fails. Pure; time is an argument."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from zeroband.config.time_outs import TimeOuts
from zeroband.elastic.transport.dial import SILENT_S

_LEAST_CONNECT_S = 15.0
"""Three times the time-out of a handshake."""
_BEATS = 8


@dataclass(frozen=True)
class TransferBounds:
    """Time-outs of a transfer in seconds. A member that reaches one fails the round, which is then retried."""

    stall_s: float
    """Initial limit for a transfer without moved bytes, and for a silent link."""
    max_stall_s: float
    """What that limit may grow to for slow links or members."""
    stream_s: float
    """Limit for one silent or unacknowledged stream while the link's others are alive."""
    connect_s: float
    """Limit for connecting, since the last new stream."""

    @staticmethod
    def of(time_outs: TimeOuts) -> TransferBounds:
        """Derive bounds below `fault.hung_s`, after which a node loses its lease: only a node that really hangs may."""
        half_s = time_outs.hung_s / 2
        return TransferBounds(
            stall_s=min(2 * time_outs.detect_s, half_s),
            max_stall_s=half_s,
            stream_s=min(max(SILENT_S, 6 * time_outs.detect_s), half_s),
            connect_s=min(max(_LEAST_CONNECT_S, 2 * time_outs.detect_s), half_s),
        )

    @property
    def beat_s(self) -> float:
        """Idle time after which a stream sends a beat."""
        return self.stall_s / _BEATS


@dataclass
class StallLimit:
    """An adaptive time-out between `least_s` and `most_s`.

    It doubles after a stall, so that a merely slow peer gets enough time, and becomes twice the longest observed pause
    after a success.
    """

    least_s: float
    most_s: float
    limit_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.limit_s = self.least_s

    def stalled(self) -> None:
        """Record that the limit was reached."""
        self.limit_s = min(2 * self.limit_s, max(self.most_s, self.least_s))

    def succeeded(self, longest_pause_s: float) -> None:
        """Record a success with its longest pause."""
        self.limit_s = min(max(2 * longest_pause_s, self.least_s), max(self.most_s, self.least_s))


@dataclass
class StallWatch:
    """Measures how long a growing counter has stood still.

    `look_s`: polling interval. A much longer gap between two polls means that this process was stopped, which is no
    peer's fault, so it does not count.
    """

    look_s: float
    at_s: float
    value: int = -1
    paused_s: float = 0.0
    longest_s: float = 0.0

    def see(self, value: int, now_s: float) -> float:
        """Return how long the value has stood still."""
        passed_s, self.at_s = now_s - self.at_s, now_s
        if value != self.value:
            self.value, self.paused_s = value, 0.0
        elif passed_s <= 4 * self.look_s:
            self.paused_s += passed_s
        self.longest_s = max(self.longest_s, self.paused_s)
        return self.paused_s


@dataclass
class StallLimits:
    """Stall limits of a data plane: one for whole transfers, and one per link."""

    bounds: TransferBounds
    transfer: StallLimit = field(init=False)
    _links: dict[str, StallLimit] = field(default_factory=dict[str, StallLimit])

    def __post_init__(self) -> None:
        self.transfer = self._new()

    def _new(self) -> StallLimit:
        return StallLimit(self.bounds.stall_s, self.bounds.max_stall_s)

    def of_link(self, member: str) -> StallLimit:
        return self._links.setdefault(member, self._new())

    def forget_all_but(self, members: Iterable[str]) -> None:
        kept = set(members)
        self._links = {member: limit for member, limit in self._links.items() if member in kept}
