"""Work beside training: a round on its way to its verdict, on each local rank; an entry for the journal."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from zeroband.errors import ZerobandError

_T = TypeVar("_T")

LOOK_S = 0.25
"""Between two looks at the boundary of the next round, of a node that trains and that no round waits for."""


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
        """What the work returned; None while it goes on, and where it raised an error."""
        return self._outcome[0] if self._outcome else None

    def wait(self) -> _T:
        """What the work returned; raises what it raised. Called once."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._outcome.pop()

    def is_over(self, timeout_s: float | None) -> bool:
        """Whether the work ended within this time, well or not; None: wait for it."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


class BoundaryWatch:
    """Looks again and again whether a member stands at the boundary of the next round. A daemon thread.

    `is_reached`: looks; any thread.
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
