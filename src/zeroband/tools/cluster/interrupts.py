"""Ctrl-C, SIGTERM and SIGHUP as facts that a loop asks for, not as exceptions in the middle of a clean-up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Counts how often this process was asked to end."""

    def __init__(self) -> None:
        self.count = 0
        self.first: signal.Signals | None = None

    def note(self, number: int, _frame: FrameType | None) -> None:
        """A signal handler."""
        self.count += 1
        self.first = self.first or signal.Signals(number)

    @property
    def exit_code(self) -> int:
        """What a shell reports of a program that this signal ended."""
        assert self.first is not None, "not interrupted"
        return 128 + self.first


@contextmanager
def counted_interrupts() -> Generator[Interrupts]:
    """Count the signals that ask this process to end; ignored ones (nohup) stay so. Main thread."""
    interrupts = Interrupts()
    with _handled_by(interrupts.note):
        yield interrupts


@contextmanager
def uninterrupted() -> Generator[None]:
    """Hold the signals that ask this process to end off; they are lost. Does nothing outside the main thread."""
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
