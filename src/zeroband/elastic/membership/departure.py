"""Departure of this node on request: by a signal at once, or by an operator's drain after its round. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager

from zeroband.observe.events import noop


class Departure:
    """A request to leave, polled by the training loop and wherever this node waits for others.

    `grace_s`: how long the node may wait for the others to take over its last contribution.
    """

    def __init__(self, grace_s: float) -> None:
        self.holds_work = False
        """Whether there is work to hand over: only once the node is a member."""
        self.is_in_step = False
        self.is_cut_short = False
        """Whether the node stopped within the step because its time was over."""
        self.on_cut_off: Callable[[], object] = noop
        """Called before the process exits within an inner step that does not stop."""
        self._grace_s = grace_s
        self._asked_at_s: float | None = None
        self._is_drained = False

    @contextmanager
    def in_step(self) -> Generator[None]:
        """Mark the part of an inner step before parameters change: stopping there leaves nothing half done."""
        self.is_in_step = True
        try:
            yield
        finally:
            self.is_in_step = False

    def ask(self, now_s: float) -> None:
        """Request to leave as soon as possible; idempotent."""
        if self._asked_at_s is None:
            self._asked_at_s = now_s

    def drain(self) -> None:
        """Request to leave after the current round, however long it takes."""
        self._is_drained = True

    @property
    def is_asked(self) -> bool:
        return self.is_urgent or self._is_drained

    @property
    def is_urgent(self) -> bool:
        """Whether a signal asked, so that this node does not finish the current round."""
        return self._asked_at_s is not None

    def time_left_s(self, now_s: float) -> float:
        """Remaining time; infinite unless a signal asked."""
        return math.inf if self._asked_at_s is None else max(0.0, self._asked_at_s + self._grace_s - now_s)

    def is_overdue(self, now_s: float) -> bool:
        """Whether the node must leave now, even with work not handed over."""
        return self.time_left_s(now_s) == 0.0
