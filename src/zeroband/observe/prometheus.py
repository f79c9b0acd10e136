"""/metrics, /healthz and /readyz of a node, computed from its lines.

The trainer writes lines; the server's threads answer requests. Series: `observe/metrics.py`. Needs the extra
`prometheus`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from zeroband.errors import ConfigError, way_to_extra
from zeroband.observe.events import EVENTS
from zeroband.observe.hardware import disk_space
from zeroband.observe.log import ROOT, get_logger
from zeroband.observe.metrics import METRICS, NODE_STATES, SERIES, PrometheusSeries, metric_of, prometheus_name
from zeroband.observe.node_history import NodeHistory

TARGETS_FOLDER = ".prometheus"
"""Folder in run.dir with a file `<node id>@<run id>.json` for each served node of this machine.

One folder for all runs: `file_sd_configs` cannot search subfolders."""

_WATCHED_PARTS = ("elastic.store.redis_run", "observe.jsonl", "observe.sinks")
"""Parts whose counters start at 0, so that the first warning is an increase."""
_DIGEST_DIGITS = 12
"""48 bits: a double holds 53."""
_LOOK_S = 1.0
"""Lifetime of a cached health check, so that probes stay cheap."""
_ANSWER_S = 10.0
_SHUTDOWN_POLL_S = 0.1
_MOST_ANSWERS = 16
_BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Histogram buckets: from small rounds on one machine to large states over slow links."""
_OUTER_STEP = ("outer/wait_s", "outer/transfer_s", "outer/apply_s")
_FETCHED = ("received", "state")
"""Labels of bytes received outside rounds."""
_SAVED = ("checkpoint_committed", "checkpoint_share_written")
_IDENTITY = ("run", "node")
_ROWS: Mapping[str, PrometheusSeries] = {
    **{
        prometheus_name(name): PrometheusSeries(
            "counter" if row.adds_up else "gauge",
            f"{row.meaning} ({row.unit})",
            ("source",) if name.endswith("/<source>") else (),
        )
        for name, row in METRICS.items()
    },
    **SERIES,
}
"""Exported series by name."""

_log = get_logger(__name__)


class Exporter(logging.Handler):
    """A sink of metrics and events and a log handler that exports Prometheus series. Any thread.

    `build`: labels of `zeroband_build_info`. `folders`: by configuration key; their disk space is measured at each
    scrape. `problems`: returns what is wrong with the trainer, one line each. Raises ConfigError without the extra.
    """

    def __init__(
        self,
        *,
        run_id: str,
        node_id: str,
        build: Mapping[str, str],
        folders: Mapping[str, Path],
        saves: bool,
        problems: Callable[[], Sequence[str]],
        now: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(logging.WARNING)
        try:
            self._client: Any = importlib.import_module("prometheus_client")
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"observe.prometheus needs {error.name}, which is not installed; {way_to_extra('prometheus')}"
            ) from None
        self._registry = self._client.CollectorRegistry()
        self._families: dict[str, Any] = {}
        self._identity = (run_id, node_id)
        self._folders = folders
        self.problems = _Cached(problems)
        """Return what is wrong with the trainer, one line each; empty while it is healthy."""
        self._state = threading.Lock()
        self._history = NodeHistory(node_id)
        self._fetched_bytes = 0
        """Bytes of the state being fetched."""
        started_s = now()
        self._series("zeroband_build_info", *(build[label] for label in SERIES["zeroband_build_info"].labels)).set(1)
        self._series("zeroband_started_timestamp_seconds").set(started_s)
        if saves:
            self._series("zeroband_last_checkpoint_timestamp_seconds").set(started_s)
        for name, row in SERIES.items():
            if row.type == "histogram":
                self._series(name)
        for name, metric in METRICS.items():
            if metric.adds_up and not name.endswith("/<source>"):
                self._series(prometheus_name(name), *metric.labels.values())
        self._series("zeroband_steps_total")
        self._series("zeroband_comm_bytes_total", *_FETCHED)
        for kind in EVENTS:
            self._series("zeroband_events_total", kind)
        for part in _WATCHED_PARTS:
            self._series("zeroband_log_warnings_total", part)

    def _series(self, name: str, *own: str) -> Any:
        """Return a series by name and label values, creating it if needed."""
        if name not in self._families:
            row = _ROWS[name]
            more: dict[str, Any] = {"buckets": _BOUNDS_S} if row.type == "histogram" else {}
            make = getattr(self._client, row.type.capitalize())
            self._families[name] = make(name, row.meaning, [*_IDENTITY, *row.labels], registry=self._registry, **more)
        return self._families[name].labels(*self._identity, *own)

    # -- input ----------------------------------------------------------------------------------------------------

    def write(self, record: Mapping[str, Any]) -> None:
        with self._state:
            self._history.add(record)
            if "kind" in record:
                self._take_event(record)
            else:
                self._take_metrics(record)

    def _take_event(self, record: Mapping[str, Any]) -> None:
        kind, at_s = record["kind"], record["at_s"]
        self._series("zeroband_events_total", kind).inc()
        if kind == "round_committed":
            self._series("zeroband_last_round_timestamp_seconds").set(at_s)
        elif kind in _SAVED:
            self._series("zeroband_last_checkpoint_timestamp_seconds").set(at_s)
        elif kind == "epoch_changed":
            self._series("zeroband_membership_epoch").set(record["epoch"])
        elif kind == "recovered":
            self._series("zeroband_recovery_seconds").observe(float(record["took_s"]))
        elif kind == "join_progress":
            self._take_fetched(int(record["bytes"]))

    def _take_fetched(self, fetched_bytes: int) -> None:
        """Count the bytes fetched since the last call; a smaller number starts another state."""
        before = self._fetched_bytes if fetched_bytes >= self._fetched_bytes else 0
        self._series("zeroband_comm_bytes_total", *_FETCHED).inc(fetched_bytes - before)
        self._fetched_bytes = fetched_bytes

    def _take_metrics(self, record: Mapping[str, Any]) -> None:
        self._series("zeroband_step").set(record["step"])
        self._series("zeroband_steps_total").inc()
        self._series("zeroband_last_step_timestamp_seconds").set(record["at_s"])
        if "train/tokens_per_s" in record:
            tokens = round(record["train/tokens_per_s"] * record["train/step_s"])
            self._series("zeroband_tokens_total").inc(tokens)
        if "outer/round" in record:
            took_s = sum(float(record.get(part, 0.0)) for part in _OUTER_STEP)
            self._series("zeroband_outer_step_seconds").observe(took_s)
        for name, value in record.items():
            if name in ("step", "at_s"):
                continue
            row = metric_of(name)
            labels = (name.rpartition("/")[2],) if row != name else METRICS[row].labels.values()
            series = self._series(prometheus_name(row), *labels)
            number = int(value[:_DIGEST_DIGITS], 16) if isinstance(value, str) else float(value)
            if METRICS[row].adds_up:
                series.inc(max(0.0, number))
            else:
                series.set(number)

    def emit(self, record: logging.LogRecord) -> None:
        """Count a log line."""
        with self._state:
            self._series("zeroband_log_warnings_total", record.name.removeprefix(f"{ROOT}.")).inc()

    # -- output ---------------------------------------------------------------------------------------------------

    def unready_reason(self) -> str | None:
        """Return why this node does not train as a member; None if it does."""
        with self._state:
            view = self._history.newest
        if view.join is not None:
            return f"{view.state} ({view.join.state})"
        return None if view.is_at_work else view.state

    def exposition(self, accepted: str) -> tuple[str, bytes]:
        """Return content type and body for a scraper's Accept header."""
        is_up, is_ready = not self.problems(), self.unready_reason() is None
        with self._state:
            view = self._history.newest
            self._series("zeroband_node_up").set(is_up)
            self._series("zeroband_node_ready").set(is_ready)
            for state in NODE_STATES:
                self._series("zeroband_node_state", state).set(state == ("training" if view.is_at_work else view.state))
            for key, folder in self._folders.items():
                if (space := disk_space(folder)) is not None:
                    self._series("zeroband_disk_free_bytes", key).set(space[0])
                    self._series("zeroband_disk_size_bytes", key).set(space[1])
        encode, content_type = self._client.exposition.choose_encoder(accepted)
        return content_type, encode(self)

    def collect(self) -> Iterator[Any]:
        """Yield all series for an encoder, without `_created` samples."""
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


class MetricsServer:
    """Serves /metrics, /healthz and /readyz of one node, a thread per request.

    `port` 0: any free one. `node_dir`: `<run.dir>/<run.id>/<node id>`; the address is written to run.dir for service
    discovery. Raises ConfigError if it cannot listen.
    """

    def __init__(self, exporter: Exporter, *, host: str, port: int, node_dir: Path) -> None:
        try:
            self._server = _Server(exporter, host, port)
        except OSError as error:
            raise ConfigError(
                f"observe.prometheus cannot listen on {host}, port {port}: {error.strerror}; give each node of a "
                "machine its own observe.prometheus.port, or 0 for any free port"
            ) from error
        self._exporter = exporter
        self._targets = node_dir.parent.parent / TARGETS_FOLDER / f"{node_dir.name}@{node_dir.parent.name}.json"
        self._is_closed = False
        self.host, self.port = host, int(self._server.server_address[1])
        self._announce()
        logging.getLogger(ROOT).addHandler(exporter)
        serve = partial(self._server.serve_forever, poll_interval=_SHUTDOWN_POLL_S)
        threading.Thread(target=serve, name="metrics-server", daemon=True).start()

    def _announce(self) -> None:
        """Publish the address in the log and in a file for Prometheus's service discovery."""
        host = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host
        address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        _log.info("serving metrics", extra={"fields": {"url": f"http://{address}/metrics"}})
        draft = self._targets.with_suffix(".new")
        try:
            self._targets.parent.mkdir(exist_ok=True)
            draft.write_text(json.dumps([{"targets": [address]}]) + "\n", encoding="utf-8")
            draft.replace(self._targets)
        except OSError as error:
            fields = {"path": self._targets, "why": str(error)}
            _log.warning("cannot write the Prometheus targets file", extra={"fields": fields})

    def write(self, record: Mapping[str, Any]) -> None:
        self._exporter.write(record)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        logging.getLogger(ROOT).removeHandler(self._exporter)
        self._server.shutdown()
        self._server.server_close()
        with contextlib.suppress(OSError):
            self._targets.unlink(missing_ok=True)


class _Server(ThreadingHTTPServer):
    """Serves at most `_MOST_ANSWERS` requests at a time; further connections are closed."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, exporter: Exporter, host: str, port: int) -> None:
        self.exporter = exporter
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._slots = threading.BoundedSemaphore(_MOST_ANSWERS)
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("request failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = _ANSWER_S

    def do_GET(self) -> None:
        exporter, path = self.server.exporter, self.path.partition("?")[0]
        if path == "/metrics":
            content_type, body = exporter.exposition(self.headers.get("Accept", ""))
            self._answer(HTTPStatus.OK, body, content_type)
        elif path == "/healthz":
            self._probe(exporter.problems(), "ok")
        elif path == "/readyz":
            why = exporter.unready_reason()
            self._probe([] if why is None else [why], "ready")
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"/metrics, /healthz or /readyz\n")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _probe(self, problems: Sequence[str], good: str) -> None:
        status = HTTPStatus.SERVICE_UNAVAILABLE if problems else HTTPStatus.OK
        self._answer(status, "".join(f"{line}\n" for line in problems or [good]).encode())

    def _answer(self, status: HTTPStatus, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


class _Cached:
    """Calls a function at most once per `_LOOK_S`, for all threads."""

    def __init__(self, ask: Callable[[], Sequence[str]]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._asked_at_s = -math.inf
        self._answer: Sequence[str] = ()

    def __call__(self) -> Sequence[str]:
        with self._lock:
            if time.monotonic() - self._asked_at_s > _LOOK_S:
                self._answer, self._asked_at_s = self._ask(), time.monotonic()
            return self._answer
