"""How far a preparation is, and what is said on the way: a bar that redraws itself on a terminal, else plain lines."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from zeroband.observe.log import ROOT, format_fields
from zeroband.observe.status import human_count

_LINE_EVERY_S = 10.0
_RATE_OVER_S = 600.0
"""Time behind the rate by which the time to go is told."""


class Shown:
    """What of some bytes of text is done, and how many tokens they gave.

    total: bytes of all of it, as the plan has them; done: of what was finished before.
    """

    def __init__(self, what: str, total: int, done: int, stream: TextIO, now: Callable[[], float] = time.monotonic):
        self._what, self._stream, self._now = what, stream, now
        self._total = max(total, 1)
        self._finished, self._read, self._tokens = done, 0, 0
        self._line_s = now()
        console = Console(file=stream)
        self._is_live = stream.isatty() and not console.is_dumb_terminal
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[counts]}"),
        )
        self.block = Progress(
            *(*columns, TimeRemainingColumn()),
            console=console,
            get_time=now,
            disable=not self._is_live,
            speed_estimate_period=_RATE_OVER_S,
        )
        """The time in which it is shown."""
        self.block.add_task(what, total=self._total, completed=done, counts="")

    def advance(self, size_bytes: int, tokens: int) -> None:
        """Take note of text that was read."""
        self._read += size_bytes
        self._tokens += tokens
        self._show()

    def finish(self, planned_bytes: int) -> None:
        """Take note of a unit that is finished, by what the plan has of it: what was read may be more or less."""
        self._finished += planned_bytes
        self._read = max(0, self._read - planned_bytes)
        self._show()

    def _show(self) -> None:
        (task,) = self.block.tasks
        rate = self._tokens / max(task.elapsed or 0.0, 1e-9)
        counts = f"{human_count(self._tokens)} tokens, {human_count(rate)}/s"
        self.block.update(task.id, completed=min(self._total, self._finished + self._read), counts=counts)
        if not self._is_live and self._now() - self._line_s >= _LINE_EVERY_S:
            self._line_s = self._now()
            left = "" if task.time_remaining is None else f", {task.time_remaining:.0f} s left"
            print(f"{self._what}: {task.percentage:.0f}%, {counts}{left}", file=self._stream, flush=True)


def say_warning(text: str) -> None:
    """Print what goes wrong and is not the end; above a bar where there is one."""
    print(f"zeroband data prepare: {text}", file=sys.stderr, flush=True)


@contextmanager
def warnings_to(say: Callable[[str], None]) -> Generator[None]:
    """Have the warnings of this package, and when it is over what they were about, told so inside the block."""
    logger, handler = logging.getLogger(ROOT), _Told(say)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _Told(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(f"{record.getMessage()} {format_fields(getattr(record, 'fields', {}))}".rstrip())
