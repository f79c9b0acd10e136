"""Work in the background of training: a round up to its verdict, on each local rank; writing a journal entry."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from zeroband.errors import ZerobandError

_T = TypeVar("_T")

LOOK_S = 0.25
"""Interval at which a training node that no round waits for checks the boundary of the next round."""


class BackgroundRound(Generic[_T]):
    """Starts `work` in a thread at once. The thread is a daemon: a trainer that crashes does not wait for it."""

    def __init__(self, work: Callable[[], _T], *, name: str = "outer-step") -> None:
        self._work = work
        self._outcome: list[_T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome.append(self._work())  # what it raises is raised again where it is waited for
        except BaseException as error:  # noqa: BLE001
            self._error = error

    @property
    def outcome(self) -> _T | None:
        """The work's result; None while it runs, or if it raised."""
        return self._outcome[0] if self._outcome else None

    def wait(self) -> _T:
        """Wait for the work; return its result or raise its error. Called once."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._outcome.pop()

    def is_over(self, timeout_s: float | None) -> bool:
        """Whether the work ended within this time, successfully or not; None: wait until it does."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


class BoundaryWatch:
    """Polls in a daemon thread whether a member stands at the boundary of the next round.

    `is_reached`: checks it; called in any thread.
    """

    def __init__(self, is_reached: Callable[[], bool], *, look_s: float = LOOK_S) -> None:
        self._is_reached = is_reached
        self._look_s = look_s
        self._is_closed = threading.Event()
        self._was_reached = threading.Event()
        self.thread = threading.Thread(target=self._run, name="boundary-watch", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self._is_closed.wait(self._look_s):
            if self._look():
                self._was_reached.set()
                return

    def _look(self) -> bool:
        try:
            return self._is_reached()
        except ZerobandError:  # the trainer meets it at the boundary, and decides
            return False

    @property
    def is_called(self) -> bool:
        """Whether one stood there at a look, and one does now: the round may have been committed meanwhile."""
        return self._was_reached.is_set() and self._look()

    def close(self) -> None:
        """Look no more."""
        self._is_closed.set()
