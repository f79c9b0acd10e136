"""How far a preparation is, and what is said on the way: a bar that redraws itself on a terminal, else plain lines."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from zeroband.observe.log import ROOT, format_fields
from zeroband.observe.status import human_count

_LINE_EVERY_S = 10.0


class Shown:
    """What of some bytes of text is done, and how many tokens they gave.

    total: bytes of all of it, as the plan has them; done: of what was finished before.
    """

    def __init__(self, what: str, total: int, done: int, stream: TextIO, now: Callable[[], float] = time.monotonic):
        self._what = what
        self._total = max(total, 1)
        self._finished = self._begun_at = done
        self._read = 0
        self._tokens = 0
        self._now = now
        self._began_s = self._line_s = now()
        self._stream = stream
        console = Console(file=stream)
        self._bar = _bar(console, now) if stream.isatty() and not console.is_dumb_terminal else None
        self._task = (
            TaskID(0) if self._bar is None else self._bar.add_task(what, total=self._total, completed=done, counts="")
        )

    @property
    def block(self) -> AbstractContextManager[object]:
        """The time in which it is shown."""
        return self._bar or nullcontext()

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

    @property
    def share(self) -> float:
        """What is done, in 0..1."""
        return min(1.0, (self._finished + self._read) / self._total)

    @property
    def tokens_per_s(self) -> float:
        return self._tokens / max(self._now() - self._began_s, 1e-9)

    @property
    def remaining_s(self) -> float | None:
        """Seconds until all is done, if it goes on like this; None where nothing says."""
        here = self.share - self._begun_at / self._total
        return None if here <= 0 else (1 - self.share) / here * (self._now() - self._began_s)

    def _show(self) -> None:
        counts = f"{human_count(self._tokens)} tokens, {human_count(self.tokens_per_s)}/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=self.share * self._total, counts=counts)
        elif self._now() - self._line_s >= _LINE_EVERY_S:
            self._line_s = self._now()
            left = "" if self.remaining_s is None else f", {self.remaining_s:.0f} s left"
            print(f"{self._what}: {self.share:.0%}, {counts}{left}", file=self._stream, flush=True)


def _bar(console: Console, now: Callable[[], float]) -> Progress:
    text, counts = TextColumn("{task.description}"), TextColumn("{task.fields[counts]}")
    share = TextColumn("{task.percentage:>3.0f}%")
    return Progress(text, BarColumn(), share, counts, TimeRemainingColumn(), console=console, get_time=now)


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
