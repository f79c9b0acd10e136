"""The board's page on a server of its own, beside a scripted run: static files, documents and orders, and no more."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from tests.board_run import ScriptedRun

STATIC = Path(__file__).resolve().parents[1] / "src" / "zeroband" / "tools" / "board" / "static"
TOKEN = "the run's token"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
SECURITY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def asset(name: str) -> Path:
    """A file under /static/: uPlot's from its wheel, all others from the package."""
    spec = importlib.util.find_spec("youplot")
    assert spec is not None and spec.origin is not None
    vendor = Path(spec.origin).parent / "vendor"
    return {"uplot.js": vendor / "uplot.iife.min.js", "uplot.css": vendor / "uplot.min.css"}.get(name, STATIC / name)


class BoardServer(ThreadingHTTPServer):
    """Serves one run. What the test sets here, the page sees; `tell()` says so to the open streams."""

    daemon_threads = True

    def __init__(self, run: ScriptedRun, now_s: float, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Request)
        self.run = run
        self.now_s = now_s
        self.is_away = False
        """Whether every connection is closed without an answer."""
        self.has_room = True
        """Whether there is room for one more stream."""
        self.orders: list[dict[str, Any]] = []
        """Orders that were accepted."""
        self.refusal: tuple[int, str] | None = None
        self.changed = threading.Condition()
        self.version = 0
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), name="board")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    def tell(self, now_s: float | None = None) -> None:
        """Let the open streams know that something changed."""
        with self.changed:
            self.now_s = self.now_s if now_s is None else now_s
            self.version += 1
            self.changed.notify_all()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_away = True
        self.tell()
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Request(BaseHTTPRequestHandler):
    server: BoardServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.server.is_away:
            self.close_connection = True
            return
        address = urlsplit(self.path)
        asked = {key: values[0] for key, values in parse_qs(address.query).items()}
        match address.path:
            case "/api/state":
                at_s = float(asked["at"]) if "at" in asked else None
                self._send_json(200, self.server.run.state(self.server.now_s, at_s))
            case "/api/series":
                self._send_json(200, self.server.run.series(self.server.now_s, asked.get("by", "tokens")))
            case "/api/stream" if not self.server.has_room:
                self._send_json(503, {"error": "too many pages are open"})
            case "/api/stream":
                self._stream()
            case path:
                self._send_file("index.html" if path == "/" else path.removeprefix("/static/"))

    def do_POST(self) -> None:
        order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._send_json(403, {"error": "this is not the run's token"})
        elif self.headers["Content-Type"] != "application/json" or self.headers["Origin"] != self.server.url[:-1]:
            self._send_json(403, {"error": "orders come from the page alone"})
        elif self.server.refusal is not None:
            self._send_json(self.server.refusal[0], {"error": self.server.refusal[1]})
        else:
            self.server.orders.append(order)
            self._send_json(200, {"words": "In force from the next round on"})

    def _send_json(self, status: int, document: Mapping[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(document, allow_nan=False).encode())

    def _send_file(self, name: str) -> None:
        path = asset(name)
        if path.is_file():
            self._send(200, TYPES[path.suffix], path.read_bytes())
        else:
            self._send(404, "text/plain", b"")

    def _send(self, status: int, type: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in {**SECURITY, "Content-Type": type, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b"retry: 200\n\n")
        told = -1
        while not self.server.is_away:
            with self.server.changed:
                version = self.server.version
                if version == told:
                    self.server.changed.wait(timeout=1.0)
                    continue
            told = version
            document = {"to_s": self.server.now_s, "version_of_state": version}
            try:
                self.wfile.write(f"event: state\ndata: {json.dumps(document)}\n\n".encode())
            except OSError:  # the page is gone
                return
