"""Departure: a node that was asked to leave, at once or after its round. Knows no signals and no clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager

from zeroband.observe.events import noop


class Departure:
    """Asked for by a signal, or by an operator of the run, who has time.

    Looked at by the trainer's loop, and wherever this node waits for others.

    `grace_s`: how long the node may wait for the others to take over what it learned.
    """

    def __init__(self, grace_s: float) -> None:
        self.holds_work = False
        """Whether there is anything to hand over: not before the node is a member."""
        self.is_in_step = False
        self.is_cut_short = False
        """Whether it stopped there, since its time was over."""
        self.on_cut_off: Callable[[], object] = noop
        """Called before the process ends in an inner step that does not stop."""
        self._grace_s = grace_s
        self._asked_at_s: float | None = None
        self._is_drained = False

    @contextmanager
    def in_step(self) -> Generator[None]:
        """In an inner step, before it changes the parameters: stopping there leaves nothing half done."""
        self.is_in_step = True
        try:
            yield
        finally:
            self.is_in_step = False

    def ask(self, now_s: float) -> None:
        """Leave at the next chance; asking again changes nothing."""
        if self._asked_at_s is None:
            self._asked_at_s = now_s

    def drain(self) -> None:
        """Leave after the round in progress, which is brought to its end however long that takes."""
        self._is_drained = True

    @property
    def is_asked(self) -> bool:
        return self.is_urgent or self._is_drained

    @property
    def is_urgent(self) -> bool:
        """Asked by a signal: the round in progress ends here."""
        return self._asked_at_s is not None

    def time_left_s(self, now_s: float) -> float:
        """How long the node may stay; infinite where no signal asked."""
        return math.inf if self._asked_at_s is None else max(0.0, self._asked_at_s + self._grace_s - now_s)

    def is_overdue(self, now_s: float) -> bool:
        """Whether the node must go now, with what it learned or without."""
        return self.time_left_s(now_s) == 0.0
