"""A donor's side of live recovery: serves copies of the committed state and the journal over HTTP.

Runs in threads of local rank 0; training waits for none of it but the copy in memory. Only raw buffers and JSON cross
the wire. Every chunk carries its hash, and the whole state its digest.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, Protocol, cast

from torch import Tensor
from typing_extensions import Buffer

from zeroband.errors import RecoveryFailed
from zeroband.observe.log import get_logger

CHUNK_BYTES = 8 << 20
HASH_HEADER = "X-Zeroband-Hash"
COPY_LIFE_S = 120.0
"""A copy that nobody asked for during this time is dropped."""

_CLOSE_POLL_S = 0.05

_log = get_logger(__name__)


class ServedState(Protocol):
    """A copy of the outer state after a committed round."""

    @property
    def round(self) -> int: ...
    @property
    def sections(self) -> Mapping[str, Tensor]: ...
    @property
    def payload(self) -> Mapping[str, Any]: ...
    @property
    def state(self) -> str: ...


class ServedEntry(Protocol):
    """The averaged update of one committed round."""

    @property
    def round(self) -> int: ...
    @property
    def result(self) -> Tensor: ...
    @property
    def payload(self) -> Mapping[str, Any]: ...
    @property
    def state(self) -> str: ...


def access_key(token: str | None, run_id: str) -> str:
    """What a joiner shows to a donor: proof that it knows the run's token, without the token."""
    return hmac.new((token or "").encode(), f"zeroband recovery {run_id}".encode(), hashlib.sha256).hexdigest()


def chunk_hash(data: bytes | memoryview) -> str:
    """Hash of what crosses the wire, against a cut or a flipped bit."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class _Copies:
    """The newest copy, made when it is asked for and dropped when it is not."""

    def __init__(self, copy_state: Callable[[], ServedState]) -> None:
        self._copy_state = copy_state
        self._lock = threading.Lock()
        self._copies: dict[int, ServedState] = {}
        self._used_at_s = 0.0

    def fresh(self) -> ServedState:
        copy = self._copy_state()
        with self._lock:
            self._used_at_s = time.monotonic()
            newest = max(self._copies, default=copy.round)
            self._copies = {r: c for r, c in self._copies.items() if r == newest} | {copy.round: copy}
        return copy

    def of_round(self, round: int) -> ServedState | None:
        with self._lock:
            self._used_at_s = time.monotonic()
            return self._copies.get(round)

    def drop_unused(self) -> None:
        with self._lock:
            if time.monotonic() - self._used_at_s > COPY_LIFE_S:
                self._copies = {}


class StateServer:
    """Listens on a free port of `host` until `close()`. `port` tells which."""

    def __init__(
        self,
        host: str,
        key: str,
        copy_state: Callable[[], ServedState],
        journal_entry: Callable[[int], ServedEntry | None],
    ) -> None:
        copies = _Copies(copy_state)
        self._stop = threading.Event()

        class Handler(_Handler):
            def answer(self) -> None:
                self.serve(key, copies, journal_entry)

        class Server(_Server):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        self._server = Server((host, 0), Handler)
        self.port: int = self._server.server_address[1]
        serve: Callable[[], None] = lambda: self._server.serve_forever(poll_interval=_CLOSE_POLL_S)  # noqa: E731
        self._thread = threading.Thread(target=serve, name="state-server", daemon=True)
        self._thread.start()
        self._sweeper = threading.Thread(target=self._sweep, args=(copies,), name="state-copies", daemon=True)
        self._sweeper.start()

    def _sweep(self, copies: _Copies) -> None:
        while not self._stop.wait(COPY_LIFE_S / 4):
            copies.drop_unused()

    def close(self) -> None:
        self._stop.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


class _Server(ThreadingHTTPServer):
    """A thread for each connection; a joiner that goes away in the middle is no news."""

    daemon_threads = True

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's own asks the name service for our name, which may take long

    def handle_error(self, request: object, client_address: object) -> None:
        _log.debug("a joiner's connection broke", exc_info=True, extra={"fields": {"from": str(client_address)}})


class _Handler(BaseHTTPRequestHandler):
    """GET /state, /chunk/ROUND/SECTION/INDEX, /journal/ROUND."""

    protocol_version = "HTTP/1.1"
    timeout = 30
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        raise NotImplementedError

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: the trainer's log is the one log."""

    def serve(self, key: str, copies: _Copies, journal_entry: Callable[[int], ServedEntry | None]) -> None:
        shown = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(shown.encode(), key.encode()):
            return self._refuse(HTTPStatus.FORBIDDEN)
        match self.path.strip("/").split("/"):
            case ["state"]:
                try:
                    self._send(json.dumps(_manifest(copies.fresh())).encode())
                except RecoveryFailed:
                    self._refuse(HTTPStatus.SERVICE_UNAVAILABLE)
            case ["chunk", round, section, index] if round.isdecimal() and index.isdecimal():
                self._send_chunk(copies.of_round(int(round)), section, int(index))
            case ["journal", round] if round.isdecimal():
                entry = journal_entry(int(round))
                self._refuse(HTTPStatus.NOT_FOUND) if entry is None else self._send(*_journal_parts(entry))
            case _:
                self._refuse(HTTPStatus.NOT_FOUND)

    def _send_chunk(self, copy: ServedState | None, section: str, index: int) -> None:
        if copy is None or section not in copy.sections:
            return self._refuse(HTTPStatus.NOT_FOUND)
        data = bytes_of(copy.sections[section])
        self._send(data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])

    def _send(self, *parts: bytes | memoryview) -> None:
        digest = hashlib.blake2b(digest_size=16)
        for part in parts:
            digest.update(part)
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Length", str(sum(len(part) for part in parts)))
        self.send_header(HASH_HEADER, digest.hexdigest())
        self.end_headers()
        for part in parts:
            self.wfile.write(part)

    def _refuse(self, status: HTTPStatus) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    return memoryview(cast(Buffer, tensor.numpy())).cast("B")


def _manifest(copy: ServedState) -> dict[str, Any]:
    return {
        "round": copy.round,
        "state": copy.state,
        "payload": copy.payload,
        "sections": {name: tensor.numel() for name, tensor in copy.sections.items()},
        "chunk_bytes": CHUNK_BYTES,
    }


def _journal_parts(entry: ServedEntry) -> tuple[bytes, memoryview]:
    head = json.dumps({"round": entry.round, "payload": entry.payload, "state": entry.state}).encode()
    return len(head).to_bytes(8, "little") + head, bytes_of(entry.result)
