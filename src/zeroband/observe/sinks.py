"""Where metric records go: the file that is the truth, and services that may fail without hurting the run."""

from __future__ import annotations

import importlib
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from zeroband.observe.jsonl import JsonlWriter
from zeroband.observe.log import get_logger

MetricValue = float | int | str
"""What a metric can be; the only strings are digests."""

_BACKLOG_RECORDS = 10_000
_CLOSE_DEADLINE_S = 15.0
_SETTINGS = {"console": "off", "silent": True, "disable_git": True, "save_code": False, "x_disable_meta": True}
"""x_disable_meta: it would record the command line, which may hold a secret. Older versions than 0.19 refuse it."""

_log = get_logger(__name__)


class Sink(Protocol):
    """Takes every record once, in order, from one thread; neither raises nor blocks."""

    def write(self, record: Mapping[str, MetricValue]) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """Appends every record to a file as one line. Raises ConfigError where it cannot be opened."""

    def __init__(self, path: Path) -> None:
        self._writer = JsonlWriter(path)

    def write(self, record: Mapping[str, MetricValue]) -> None:
        self._writer.append(record)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Hands every record to Weights & Biases from a thread of its own, which also imports and starts it.

    Whatever goes wrong in there, hanging included, is logged once and the sink takes nothing more. Each start of a node
    is a run of its own in the group `run_id`. `config`: the resolved configuration, without secrets.
    """

    def __init__(
        self, *, project: str, mode: Literal["online", "offline"], node_dir: Path, config: Mapping[str, object]
    ) -> None:
        self._init_arguments: dict[str, Any] = {
            "project": project,
            "mode": mode,
            "dir": str(node_dir),
            "group": node_dir.parent.name,
            "name": f"{node_dir.parent.name}/{node_dir.name}",
            "config": dict(config),
        }
        self._records: queue.Queue[dict[str, MetricValue] | None] = queue.Queue(_BACKLOG_RECORDS)
        self._is_dropped = threading.Event()
        self._thread = threading.Thread(target=self._forward, name="wandb-sink", daemon=True)
        self._thread.start()

    def write(self, record: Mapping[str, MetricValue]) -> None:
        if self._is_dropped.is_set():
            return
        try:
            self._records.put_nowait(dict(record))
        except queue.Full:
            self._drop(f"{_BACKLOG_RECORDS} records behind")

    def close(self) -> None:
        """Let the backlog be written, for a while at most."""
        if self._is_dropped.is_set():
            return
        try:
            self._records.put(None, timeout=_CLOSE_DEADLINE_S)
        except queue.Full:
            self._drop(f"{_BACKLOG_RECORDS} records behind at the end of the run")
            return
        self._thread.join(_CLOSE_DEADLINE_S)
        if self._thread.is_alive():
            self._drop(f"not finished after {_CLOSE_DEADLINE_S:g} s")

    def _forward(self) -> None:
        try:
            wandb: Any = importlib.import_module("wandb")
            settings = wandb.Settings(**_SETTINGS)
            run = wandb.init(settings=settings, **self._init_arguments)
            run.define_metric("*", step_metric="step")
            while (record := self._records.get()) is not None:
                run.log(record)
            run.finish()
        except Exception as error:  # noqa: BLE001 - it raises what it likes, and none of that may reach the run
            self._drop(f"{type(error).__name__}: {error}")

    def _drop(self, reason: str) -> None:
        if not self._is_dropped.is_set():
            self._is_dropped.set()
            _log.warning("going on without wandb", extra={"fields": {"reason": reason}})
