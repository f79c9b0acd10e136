"""Fault points: named places in a round where a test or the chaos soak makes this node fail."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from zeroband.errors import ConfigError
from zeroband.node.processes import ranks_of

POINTS = (
    *("restoring", "restored", "joining", "inner", "ready", "waiting", "opened", "transfer50", "transfer99"),
    *("reduced", "voted", "committed", "applied", "leaving"),
)
"""Points in the order of a node's life: before and after reading a checkpoint; while fetching the state; in the first
inner step of a round, at its boundary, while waiting for the others, before the transfer, at 50 and 99 % of its bytes,
before the vote, between vote and verdict, before and after the apply; when asked to leave. The points without a round
(checkpoint, `joining`, `leaving`) have round 0."""

_WITHOUT_ROUND = ("restoring", "restored", "joining", "leaving")
_IN_TRANSFER = (("transfer50", 0.5), ("transfer99", 0.99))

OUT_OF_MEMORY, SLOW, TAKES = "OOM", "SLOW", "TAKES"

_SPEC = re.compile(
    rf"^(?P<point>[a-z0-9]+)@(?P<relative>\+?)(?P<round>\d+)="
    rf"(?P<action>SIG[A-Z]+|{OUT_OF_MEMORY}|(?P<pace>{SLOW}|{TAKES})(?P<number>\d+(\.\d+)?))$"
)


@dataclass(frozen=True)
class Fault:
    """A fault of this node at `point` of `round`."""

    point: str
    round: int
    action: str
    """A signal's name: sent to the whole node. OOM: SIGKILL to its last rank. SLOW multiplies the time of all later
    inner steps, TAKES sets their least seconds; both sleep, so that the machine's processors stay free."""
    number: float = 0.0
    """Argument of SLOW and TAKES."""
    is_relative: bool = False
    """`round` counts the rounds that this node has applied, starting at 0, for a joiner as well."""


def parse_fault(spec: str) -> Fault:
    """Parse `POINT@ROUND=ACTION`: `opened@3=SIGKILL`, or `opened@+2=SIGKILL` for the node's third round.

    Raises ConfigError.
    """
    match = _SPEC.match(spec)
    is_known = match is not None and (
        not match["action"].startswith("SIG") or match["action"] in signal.Signals.__members__
    )
    is_slower = match is not None and (match["pace"] != SLOW or float(match["number"]) >= 1)
    if match is None or not (is_known and is_slower) or match["point"] not in POINTS:
        raise ConfigError(
            f"fault.inject={spec!r} is not POINT@ROUND=ACTION with POINT one of {', '.join(POINTS)} and ACTION a "
            "signal, OOM, SLOW with a factor of 1 or more, or TAKES with seconds, for example opened@3=SIGKILL, "
            "inner@2=SLOW10, or opened@+3=SIGKILL once this node has taken part in three rounds"
        )
    action, number = match["pace"] or match["action"], float(match["number"] or 0.0)
    return Fault(match["point"], int(match["round"]), action, number, bool(match["relative"]))


def signal_node(action: str) -> None:
    """Send a signal to this rank; SIGKILL also to its launcher, which simulates the loss of the machine."""
    if action == OUT_OF_MEMORY:
        ranks = ranks_of(os.getppid())
        os.kill(ranks[-1] if ranks else os.getpid(), signal.SIGKILL)
        return
    number = signal.Signals[action]
    if number == signal.SIGKILL:
        os.kill(os.getppid(), number)
    os.kill(os.getpid(), number)


@dataclass
class TransferPoints:
    """The fault points of one transfer."""

    faults: FaultPoints
    round: int
    stops: list[float]
    """Progress, ascending, at which a fault strikes: there the transfer pauses until `reach` returns."""
    _left: list[tuple[str, float]] = field(default_factory=lambda: list(_IN_TRANSFER))

    def reach(self, done: float) -> None:
        """Pass the points up to the progress `done`, 0 to 1."""
        while self._left and done >= self._left[0][1]:
            self.faults.at(self._left.pop(0)[0], self.round)


class FaultPoints:
    """The faults to inject into this node; each strikes once. Local rank 0 passes the points for all ranks."""

    def __init__(self, specs: Sequence[str], strike: Callable[[str], None] = signal_node) -> None:
        self._faults = [parse_fault(spec) for spec in specs]
        self._strike = strike
        self._applied = 0
        """Rounds that this node has applied."""
        self._slowness, self._least_step_s = 1.0, 0.0

    def at(self, point: str, round: int) -> None:
        """Pass a fault point."""
        assert point in POINTS, point
        for fault in [f for f in self._faults if self._is_due(f, point, round)]:
            self._faults.remove(fault)
            self._strike_fault(fault)
        self._applied += point == "applied"

    def _is_due(self, fault: Fault, point: str, round: int) -> bool:
        # a joiner or late node misses round numbers, so a relative fault counts the node's own rounds
        since = (self._applied if fault.is_relative and point not in _WITHOUT_ROUND else round) - fault.round
        lasts = fault.action in (SLOW, TAKES)
        return fault.point == point and (since == 0 or (lasts and since > 0))

    def _strike_fault(self, fault: Fault) -> None:
        if fault.action == SLOW:
            self._slowness = fault.number
        elif fault.action == TAKES:
            self._least_step_s = fault.number
        else:
            self._strike(fault.action)

    def transfer(self, round: int) -> TransferPoints:
        """Return the points of a transfer that begins now."""
        due = [share for point, share in _IN_TRANSFER if any(self._is_due(f, point, round) for f in self._faults)]
        return TransferPoints(self, round, due)

    def extra_s(self, step_s: float) -> float:
        """Return the delay to add to a step of this length."""
        return max(self._slowness * step_s, self._least_step_s) - step_s
