"""How long nothing may move in a transfer before it is called a stall. Pure; time is an argument."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from zeroband.config.time_outs import TimeOuts
from zeroband.elastic.transport.dial import SILENT_S

_LEAST_CONNECT_S = 15.0
"""Three times what one handshake may take."""
_BEATS = 8


@dataclass(frozen=True)
class TransferBounds:
    """The waits of a transfer, in seconds. A member that waits longer gives the round up, which is opened again."""

    stall_s: float
    """No byte of the transfer moves, or a member's link is not heard, for so long at first."""
    max_stall_s: float
    """What that grows to where links or members are slow."""
    stream_s: float
    """One stream of a link is not heard, or what it sent is not acknowledged, while others go on."""
    connect_s: float
    """No further stream to another member comes up."""

    @staticmethod
    def of(time_outs: TimeOuts) -> TransferBounds:
        """Derive bounds shorter than `fault.hung_s`, by which a lease ends: only a node that really hangs loses it."""
        half_s = time_outs.hung_s / 2
        return TransferBounds(
            stall_s=min(2 * time_outs.detect_s, half_s),
            max_stall_s=half_s,
            stream_s=min(max(SILENT_S, 6 * time_outs.detect_s), half_s),
            connect_s=min(max(_LEAST_CONNECT_S, 2 * time_outs.detect_s), half_s),
        )

    @property
    def beat_s(self) -> float:
        """Pause after which a stream that has nothing else to send shows its other end that this one is there."""
        return self.stall_s / _BEATS


@dataclass
class StallLimit:
    """A bound that gives way to links and nodes that are slow, and comes back from it.

    `least_s`: where it begins, and comes back to. `most_s`: never more than that. After a stall it doubles, so that
    what is only slow gets the time that it needs; after a success it is twice the longest pause that was seen.
    """

    least_s: float
    most_s: float
    limit_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.limit_s = self.least_s

    def stalled(self) -> None:
        """Note that the limit was reached, and what had come so far is lost."""
        self.limit_s = min(2 * self.limit_s, max(self.most_s, self.least_s))

    def succeeded(self, longest_pause_s: float) -> None:
        """Note that the limit was not reached, and how long the longest pause was."""
        self.limit_s = min(max(2 * longest_pause_s, self.least_s), max(self.most_s, self.least_s))


@dataclass
class StallWatch:
    """Tells since when a figure that grows has not.

    `look_s`: how often it is looked at; a longer pause between two looks was this process's own, and no
    peer's fault.
    """

    look_s: float
    at_s: float
    value: int = -1
    paused_s: float = 0.0
    longest_s: float = 0.0

    def see(self, value: int, now_s: float) -> float:
        """Return for how long the value has not grown by now."""
        passed_s, self.at_s = now_s - self.at_s, now_s
        if value != self.value:
            self.value, self.paused_s = value, 0.0
        elif passed_s <= 4 * self.look_s:
            self.paused_s += passed_s
        self.longest_s = max(self.longest_s, self.paused_s)
        return self.paused_s


@dataclass
class StallLimits:
    """The limits of a data path: one for transfers as a whole, and one for the link to each member."""

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
