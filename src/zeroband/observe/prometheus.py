"""/metrics, /healthz and /readyz of a node: what its lines say, as a Prometheus and probes ask for it.

The trainer hands the lines in and goes on; a server's threads answer. Names: the tables of
`observe/metrics.py`. Needs the extra `prometheus`.
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
"""Name inside run.dir: holds `<node id>@<run id>.json` for each node of this machine that is served.

For `file_sd_configs`, whose patterns know one folder."""

_WATCHED_PARTS = ("elastic.store.redis_run", "observe.jsonl", "observe.sinks")
"""Parts whose warnings are counted from 0 on, so that the first one shows as an increase."""
_DIGEST_DIGITS = 12
"""A digit is 4 bits, and a double holds 53."""
_LOOK_S = 1.0
"""How long an answer about the node's health stands, so that probes cost nothing however many there are."""
_ANSWER_S = 10.0
_LOOKS_FOR_THE_END_S = 0.1
_MOST_ANSWERS = 16
_BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Bounds of histograms: small rounds on one machine take milliseconds, a large state over a thin link many minutes."""
_OUTER_STEP = ("outer/wait_s", "outer/transfer_s", "outer/apply_s")
_FETCHED = ("received", "state")
"""Labels of what comes in outside of rounds."""
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
"""What is exported, by its name."""

_log = get_logger(__name__)


class Exporter(logging.Handler):
    """A sink of metrics and events, and a handler of log lines, that a Prometheus reads.

    `build`: the labels of `zeroband_build_info`. `folders`: by the key of the configuration that names them; their file
    systems are looked at in each answer. `ailments`: what is wrong with the trainer, a line each. Any thread. Raises
    ConfigError without the extra.
    """

    def __init__(
        self,
        *,
        run_id: str,
        node_id: str,
        build: Mapping[str, str],
        folders: Mapping[str, Path],
        saves: bool,
        ailments: Callable[[], Sequence[str]],
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
        """By exported name."""
        self._identity = (run_id, node_id)
        self._folders = folders
        self._look = _Seldom(ailments)
        self._state = threading.Lock()
        self._history = NodeHistory(node_id)
        self._fetched_bytes = 0
        """Bytes of the state that is being fetched."""
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
        """The series with this exported name and these label values, which is exported from now on."""
        if name not in self._families:
            row = _ROWS[name]
            more: dict[str, Any] = {"buckets": _BOUNDS_S} if row.type == "histogram" else {}
            make = getattr(self._client, row.type.capitalize())
            self._families[name] = make(name, row.meaning, [*_IDENTITY, *row.labels], registry=self._registry, **more)
        return self._families[name].labels(*self._identity, *own)

    # -- what it is told ------------------------------------------------------------------------------------------

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
        """Count what came of a state since the last time; fewer than then: of another state."""
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
        """Count a line of the log."""
        with self._state:
            self._series("zeroband_log_warnings_total", record.name.removeprefix(f"{ROOT}.")).inc()

    # -- what it answers ------------------------------------------------------------------------------------------

    def ailments(self) -> Sequence[str]:
        """What is wrong with the trainer, a line each; none where it lives and gets on."""
        return self._look()

    def unready(self) -> str | None:
        """Why this node is no member that trains; None where it is one."""
        with self._state:
            view = self._history.newest
        if view.join is not None:
            return f"{view.state} ({view.join.state})"
        return None if view.is_at_work else view.state

    def exposition(self, accepted: str) -> tuple[str, bytes]:
        """Content type and text of an answer to a scraper that accepts these types."""
        is_up, is_ready = not self.ailments(), self.unready() is None
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
        """All series, as an encoder asks for them, without the times at which each was made."""
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


class MetricsServer:
    """Answers GET of /metrics, /healthz and /readyz for one node, each in its own thread.

    `port` 0: any that is free. `node_dir`: `<run.dir>/<run.id>/<node id>`; the address is written next to the runs.
    Raises ConfigError where it cannot listen.
    """

    def __init__(self, exporter: Exporter, *, host: str, port: int, node_dir: Path) -> None:
        try:
            self._server = _Server(exporter, host, port)
        except OSError as error:
            raise ConfigError(
                f"observe.prometheus cannot listen on {host}, port {port}: {error.strerror}; give each node of a "
                "machine another observe.prometheus.port, or 0, which takes any that is free"
            ) from error
        self._exporter = exporter
        self._targets = node_dir.parent.parent / TARGETS_FOLDER / f"{node_dir.name}@{node_dir.parent.name}.json"
        self._is_closed = False
        self.host, self.port = host, int(self._server.server_address[1])
        self._announce()
        logging.getLogger(ROOT).addHandler(exporter)
        serve = partial(self._server.serve_forever, poll_interval=_LOOKS_FOR_THE_END_S)
        threading.Thread(target=serve, name="metrics-server", daemon=True).start()

    def _announce(self) -> None:
        """Say where this node is scraped, in the log and in a file that Prometheus follows."""
        reached = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host
        place = f"[{reached}]:{self.port}" if ":" in reached else f"{reached}:{self.port}"
        _log.info("metrics are served", extra={"fields": {"url": f"http://{place}/metrics"}})
        draft = self._targets.with_suffix(".new")
        try:
            self._targets.parent.mkdir(exist_ok=True)
            draft.write_text(json.dumps([{"targets": [place]}]) + "\n", encoding="utf-8")
            draft.replace(self._targets)
        except OSError as error:
            _log.warning("no file for Prometheus", extra={"fields": {"path": self._targets, "why": str(error)}})

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
    """A thread for each answer, at most `_MOST_ANSWERS`; who comes then is hung up on."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, exporter: Exporter, host: str, port: int) -> None:
        self.exporter = exporter
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._places = threading.BoundedSemaphore(_MOST_ANSWERS)
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("an answer broke off", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = _ANSWER_S

    def do_GET(self) -> None:
        exporter, path = self.server.exporter, self.path.partition("?")[0]
        if path == "/metrics":
            content_type, body = exporter.exposition(self.headers.get("Accept", ""))
            self._answer(HTTPStatus.OK, body, content_type)
        elif path == "/healthz":
            self._probe(exporter.ailments(), "well")
        elif path == "/readyz":
            why = exporter.unready()
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


class _Seldom:
    """Asks a question at most once in `_LOOK_S`, for all that want to know."""

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
