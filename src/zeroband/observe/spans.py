"""Durations: how long the named parts of a step took. A stopwatch belongs to one thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, TracebackType


@dataclass(frozen=True)
class Spans:
    """What a stopwatch measured since its last lap."""

    took_s: Mapping[str, float]
    """Sum of the durations of each name."""
    counts: Mapping[str, int]
    """How often each name was entered."""

    def seconds(self, name: str) -> float:
        """Time spent under a name; 0 where it was never entered."""
        return self.took_s.get(name, 0.0)


class Stopwatch:
    """Adds up the time spent in named spans; spans may nest, and each counts all that happens inside it.

    `now`: a clock in seconds that never goes back. Work that a GPU does later counts where something waits for it.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._took_s: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def span(self, name: str) -> Span:
        """Time a `with` block; also when it ends by an exception."""
        return Span(self, name)

    def now(self) -> float:
        return self._now()

    def add(self, name: str, took_s: float) -> None:
        """Count a duration that was measured elsewhere."""
        self._took_s[name] = self._took_s.get(name, 0.0) + took_s
        self._counts[name] = self._counts.get(name, 0) + 1

    def lap(self) -> Spans:
        """What was measured since the last lap. Starts the next one; a span still open counts there."""
        spans = Spans(MappingProxyType(self._took_s), MappingProxyType(self._counts))
        self._took_s, self._counts = {}, {}
        return spans


class Span:
    """One open measurement of a stopwatch."""

    __slots__ = ("_name", "_started_s", "_stopwatch")

    def __init__(self, stopwatch: Stopwatch, name: str) -> None:
        self._stopwatch = stopwatch
        self._name = name
        self._started_s = 0.0

    def __enter__(self) -> Span:
        self._started_s = self._stopwatch.now()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopwatch.add(self._name, self._stopwatch.now() - self._started_s)
