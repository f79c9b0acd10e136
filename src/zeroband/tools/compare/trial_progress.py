"""What the user sees while runs go on: a bar with the time that is left, and a line for each run that is over."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from zeroband.tools.compare.results import Outcome

_RATE_OVER_S = 3600.0
"""Time behind the rate by which the time to go is told: runs begin slowly, and differ."""


class Bar:
    """Work done of all work, in samples. `total` may grow when runs are added. One thread; a `with` block."""

    def __init__(self, total: float, console: Console) -> None:
        self._total, self._done = total, 0.0
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, speed_estimate_period=_RATE_OVER_S)
        self._task = self._progress.add_task("", total=total)

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
        self._progress.update(self._task, total=self._total)

    def drop(self, work: float, line: str) -> None:
        """Count less work: it was done before, or is given up."""
        self.add(-work)
        self._say(line)

    def running(self, name: str, work: float) -> Callable[[float], None]:
        """A run of so much work begins; what is returned takes the part of it that is done."""
        self._progress.update(self._task, description=name)
        return lambda share: self._progress.update(self._task, completed=self._done + share * work)

    def over(self, work: float, line: str) -> None:
        """Count work as done."""
        self._done += work
        self._progress.update(self._task, completed=self._done)
        self._say(line)

    def _say(self, line: str) -> None:
        self._progress.console.print(line, highlight=False, markup=False, soft_wrap=True)


def line_of(outcome: Outcome, *, is_kept: bool) -> str:
    """One finished run."""
    name = f"{outcome.arm}, lr {outcome.lr:g}, seed {outcome.seed}"
    if outcome.failure:
        return f"{name}: failed: {outcome.failure.splitlines()[0]}"
    loss = "diverged" if outcome.loss is None else f"loss {outcome.loss:.4f}"
    return f"{name}: {loss}, {'kept from before' if is_kept else f'{outcome.took_s:.0f} s'}"
