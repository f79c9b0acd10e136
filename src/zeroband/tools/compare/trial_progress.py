"""What the user sees while runs go on: a bar with the time that is left, and a line for each run that is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from zeroband.tools.compare.results import Outcome


def remaining_s(elapsed_s: float, done: float, total: float) -> float | None:
    """Seconds to go at the mean rate so far; None before anything is done."""
    return elapsed_s * (total - done) / done if done > 0 else None


def said(seconds: float | None) -> str:
    """A time to go in words: minutes, as it is no better known."""
    if seconds is None:
        return "?"
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


class Bar:
    """Work done of all work, in samples. `total` may grow when runs are added. One thread; a `with` block."""

    def __init__(self, total: float, console: Console, *, now: Callable[[], float] = time.monotonic) -> None:
        self._total, self._done, self._now = total, 0.0, now
        self._began_s = now()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %, {task.fields[eta]}"),
        )
        self._progress = Progress(*columns, console=console)
        self._task: TaskID = self._progress.add_task("", total=total, eta="")

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def add(self, work: float) -> None:
        """Count more work than was known."""
        self._total += work
        self._show(0.0)

    def drop(self, work: float, line: str) -> None:
        """Count less work: it was done before, or is given up."""
        self.add(-work)
        self._say(line)

    def running(self, name: str, work: float) -> Callable[[float], None]:
        """A run of so much work begins; what is returned takes the part of it that is done."""
        self._progress.update(self._task, description=name)
        return lambda share: self._show(share * work)

    def over(self, work: float, line: str) -> None:
        """Count work as done."""
        self._done += work
        self._show(0.0)
        self._say(line)

    def _say(self, line: str) -> None:
        self._progress.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _show(self, more: float) -> None:
        done = self._done + more
        eta = f"{said(remaining_s(self._now() - self._began_s, done, self._total))} to go"
        self._progress.update(self._task, completed=done, total=self._total, eta=eta)


def line_of(outcome: Outcome, *, is_kept: bool) -> str:
    """One finished run."""
    name = f"{outcome.arm}, lr {outcome.lr:g}, seed {outcome.seed}"
    if outcome.failure:
        return f"{name}: failed: {outcome.failure.splitlines()[0]}"
    loss = "diverged" if outcome.loss is None else f"loss {outcome.loss:.4f}"
    return f"{name}: {loss}, {'kept from before' if is_kept else f'{outcome.took_s:.0f} s'}"
