"""Sinks of metric and event records: the file, which is the source of truth, and services that may fail."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from zeroband.observe.jsonl import JsonlWriter
from zeroband.observe.log import get_logger

MetricValue = float | int | str
"""Value of a metric; strings are digests."""

_BACKLOG_RECORDS = 10_000
_CLOSE_DEADLINE_S = 15.0

_log = get_logger(__name__)


class Sink(Protocol):
    """Receives every record once, in order, from one thread at a time; neither raises nor blocks."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a line of metrics.jsonl or events.jsonl."""
        ...

    def close(self) -> None:
        """Close the sink. Idempotent."""
        ...


class RecordLog:
    """Writes each record to a file, then to other sinks. `now`: wall clock, for display.

    Raises ConfigError if the file cannot be opened.
    """

    def __init__(self, path: Path, sinks: Sequence[Sink] = (), *, now: Callable[[], float] = time.time) -> None:
        self._sinks: tuple[Sink, ...] = (JsonlWriter(path), *sinks)
        self._now = now

    def _write(self, record: Mapping[str, Any]) -> None:
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        """Close all sinks in parallel; may wait some seconds for background sinks."""
        closing = [threading.Thread(target=sink.close) for sink in self._sinks]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()


class Service(Protocol):
    """Receives the records of a BackgroundSink. Called by one thread; may raise and block."""

    every_s: float | None = None
    """Approximate interval of `pass_time`; None: never called."""

    def write(self, record: Mapping[str, Any]) -> None: ...

    def pass_time(self) -> None:
        """Do periodic work."""

    def close(self) -> None:
        """Flush and close; not called after an exception."""
        ...


class BackgroundSink:
    """Forwards every record to a service in a separate thread, which also opens it: `open_service` may import.

    Any failure of the service, even a hang, is logged once and disables the sink.
    """

    def __init__(self, name: str, open_service: Callable[[], Service]) -> None:
        self._name = name
        self._open_service = open_service
        self._records: queue.Queue[dict[str, Any] | None] = queue.Queue(_BACKLOG_RECORDS)
        self._is_dropped = threading.Event()
        self._pass_time_at_s = time.monotonic()
        self._thread = threading.Thread(target=self._forward, name=f"{name}-sink", daemon=True)
        self._thread.start()

    def write(self, record: Mapping[str, Any]) -> None:
        if self._is_dropped.is_set():
            return
        try:
            self._records.put_nowait(dict(record))
        except queue.Full:
            self._drop(f"{_BACKLOG_RECORDS} records behind")

    def close(self) -> None:
        """Write the backlog, for at most `_CLOSE_DEADLINE_S`."""
        if self._is_dropped.is_set():
            return
        until_s = time.monotonic() + _CLOSE_DEADLINE_S
        try:
            self._records.put(None, timeout=_CLOSE_DEADLINE_S)
        except queue.Full:
            self._drop(f"{_BACKLOG_RECORDS} records behind at the end of the run")
            return
        self._thread.join(max(0.0, until_s - time.monotonic()))
        if self._thread.is_alive():
            self._drop(f"not finished after {_CLOSE_DEADLINE_S:g} s")

    def _forward(self) -> None:
        try:
            service = self._open_service()
            while (record := self._next(service)) is not None:
                service.write(record)
            service.close()
        except Exception as error:  # noqa: BLE001 - third-party code; nothing may reach the run
            self._drop(f"{type(error).__name__}: {error}")

    def _next(self, service: Service) -> dict[str, Any] | None:
        """Return the next record, None at the end; call `pass_time` while waiting."""
        while service.every_s is not None:
            try:
                return self._records.get(timeout=max(0.0, self._pass_time_at_s - time.monotonic()))
            except queue.Empty:
                service.pass_time()
                self._pass_time_at_s = time.monotonic() + service.every_s
        return self._records.get()

    def _drop(self, reason: str) -> None:
        if not self._is_dropped.is_set():
            self._is_dropped.set()
            _log.warning(f"continuing without {self._name}", extra={"fields": {"reason": reason}})
