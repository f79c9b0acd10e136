"""Fault points: named places in a round where a test, or the chaos soak, has this node fail on purpose."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zeroband.errors import ConfigError

POINTS = ("inner", "ready", "opened", "reduced", "committed", "applied")
"""In the order of a round: in its first inner step, at its boundary, before the transfer, between the transfer and the
vote, between the verdict and the apply, after the apply."""

_SPEC = re.compile(r"^(?P<point>[a-z]+)@(?P<relative>\+?)(?P<round>\d+)=(?P<signal>SIG[A-Z]+)$")


@dataclass(frozen=True)
class Fault:
    """At `point` of `round`, the signal goes to this node."""

    point: str
    round: int
    signal: signal.Signals
    is_relative: bool = False
    """Rounds are counted from the first one whose points this node passes: its first one, or the one it joins in."""


def parse_fault(spec: str) -> Fault:
    """`POINT@ROUND=SIGNAL`, for example `opened@3=SIGKILL`, or `opened@+2=SIGKILL` two rounds after the node's first.

    Raises ConfigError.
    """
    match = _SPEC.match(spec)
    if match is None or match["point"] not in POINTS or match["signal"] not in signal.Signals.__members__:
        raise ConfigError(
            f"fault.inject={spec!r} is not POINT@ROUND=SIGNAL with POINT one of {', '.join(POINTS)}, "
            "for example opened@3=SIGKILL, or opened@+3=SIGKILL for three rounds after this node's first"
        )
    return Fault(match["point"], int(match["round"]), signal.Signals[match["signal"]], bool(match["relative"]))


def signal_node(number: signal.Signals) -> None:
    """Send a signal to this rank and to its launcher, which stands for losing the machine when it is SIGKILL."""
    if number == signal.SIGKILL:
        os.kill(os.getppid(), number)
    os.kill(os.getpid(), number)


class FaultPoints:
    """The faults that this node was asked to have; each strikes once."""

    def __init__(self, specs: Sequence[str], strike: Callable[[signal.Signals], None] = signal_node) -> None:
        self._faults = [parse_fault(spec) for spec in specs]
        self._strike = strike
        self._first_round: int | None = None

    def at(self, point: str, round: int) -> None:
        """Pass a fault point."""
        assert point in POINTS, point
        if self._first_round is None:
            self._first_round = round
        for fault in [f for f in self._faults if f.point == point]:
            if fault.round + (self._first_round if fault.is_relative else 0) == round:
                self._faults.remove(fault)
                self._strike(fault.signal)
