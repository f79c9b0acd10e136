"""Counts Ctrl-C, SIGTERM and SIGHUP for polling, instead of exceptions in the middle of a clean-up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Counts the signals that ask this process to end."""

    def __init__(self) -> None:
        self.count = 0
        self.first: signal.Signals | None = None

    def note(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal."""
        self.count += 1
        self.first = self.first or signal.Signals(number)

    @property
    def exit_code(self) -> int:
        """Exit code by shell convention: 128 + the first signal."""
        assert self.first is not None, "not interrupted"
        return 128 + self.first


@contextmanager
def counted_interrupts() -> Generator[Interrupts]:
    """Count the signals that ask this process to end; ignored ones (nohup) stay ignored. Main thread."""
    interrupts = Interrupts()
    with _handled_by(interrupts.note):
        yield interrupts


@contextmanager
def uninterrupted() -> Generator[None]:
    """Ignore the signals that ask this process to end. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _handled_by(lambda _number, _frame: None):
        yield


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Generator[None]:
    before = {number: signal.getsignal(number) for number in _ENDING}
    for number, old in before.items():
        if old is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            if old is not signal.SIG_IGN:
                signal.signal(number, old)
