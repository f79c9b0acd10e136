"""Work beside training: a round on its way to its verdict, on each local rank; an entry for the journal."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


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
