"""A donor's side of live recovery: serves copies of the committed state and the journal over HTTP, to nodes of the run.

Runs in threads of local rank 0; training waits for none of it but the copy in memory. Only raw buffers and JSON cross
the wire. A manifest names the hash of every chunk, so that what one donor claims can be held against the others.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from torch import Tensor

from zeroband.elastic.recovery.copies import COPY_LIFE_S, Copies, Entries, Hasher, Promise, ServedEntry, ServedState
from zeroband.elastic.recovery.state_chunks import CHUNK_BYTES, bytes_of
from zeroband.elastic.transport.handshake import StreamKeys
from zeroband.elastic.transport.sealed import Connection, sealed_by
from zeroband.errors import RecoveryFailed
from zeroband.observe.log import get_logger

HASHES_AWAITED_S = 0.25
"""A manifest whose hashes take longer is answered by 202 and its round: the joiner turns to other donors meanwhile."""

_NUMBER_DIGITS = 18

_log = get_logger(__name__)


class StateServer:
    """Answers the connections that it is given, after their handshake, until `close()`.

    `copy_state`, `journal_entry` and `current_round` are called in threads of the server. `current_round` tells the
    round of the state without a copy of it; with it, one copy of a round serves all joiners that ask for it.
    """

    def __init__(
        self,
        copy_state: Callable[[], ServedState],
        journal_entry: Callable[[int], ServedEntry | None],
        *,
        current_round: Callable[[], int] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._hasher = Hasher(chunk_bytes)
        self._copies = Copies(copy_state, self._hasher, current_round)
        self._stop = threading.Event()
        library = _Library(self._copies, Entries(journal_entry, self._hasher), chunk_bytes)

        class Handler(_Handler):
            def answer(self) -> None:
                self.serve(library)

        self._server = _Server(Handler)
        self._sweeper = threading.Thread(target=self._sweep, name="state-copies", daemon=True)
        self._sweeper.start()

    def take(self, connection: socket.socket, keys: StreamKeys) -> None:
        """Answer a connected socket, in a thread of its own; after `close()`, hang up. Any thread."""
        if self._stop.is_set():
            connection.close()
            return
        connection.setblocking(True)
        self._server.process_request(sealed_by(connection, keys), connection.getpeername())

    def _sweep(self) -> None:
        while not self._stop.wait(COPY_LIFE_S / 4):
            self._copies.drop_unused()

    def close(self) -> None:
        self._stop.set()
        self._hasher.close()
        self._server.server_close()
        self._server.cut()


class _Library:
    """What there is to be asked for."""

    def __init__(self, copies: Copies, entries: Entries, chunk_bytes: int) -> None:
        self.copies = copies
        self.entries = entries
        self.chunk_bytes = chunk_bytes

    def chunk(self, section: Tensor, index: int) -> memoryview:
        """Empty behind the end of the section."""
        return bytes_of(section)[index * self.chunk_bytes : (index + 1) * self.chunk_bytes]


class _Server(ThreadingHTTPServer):
    """A thread for each connection; a joiner that goes away in the middle is no news."""

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("", 0), handler, bind_and_activate=False)  # connections come from elsewhere
        self.socket.close()
        self._connections: set[Connection] = set()
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def cut(self) -> None:
        """End the connections that are open; their threads end with them."""
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        _log.debug("a joiner's connection broke", exc_info=True, extra={"fields": {"from": str(client_address)}})


class _Handler(BaseHTTPRequestHandler):
    """GET /state[/ROUND], /state/ROUND/SECTION/INDEX, /journal/ROUND, /journal/ROUND/update/INDEX."""

    protocol_version = "HTTP/1.1"
    timeout = 30
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        raise NotImplementedError

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: the trainer's log is the one log."""

    def serve(self, library: _Library) -> None:
        try:
            self._serve_path(library)
        except RecoveryFailed:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE)

    def _serve_path(self, library: _Library) -> None:
        match [_number(part) for part in self.path.strip("/").split("/")]:
            case ["state"]:
                self._send_manifest(library.copies.newest())
            case ["state", int(round)]:
                self._send_manifest(library.copies.at(round))
            case ["journal", int(round)]:
                self._send_manifest(library.entries.at(round))
            case ["state", int(round), str(section), int(index)]:
                with library.copies.sending(round) as copy:
                    self._send_chunk(library, None if copy is None else copy.sections.get(section), index)
            case ["journal", int(round), str(section), int(index)]:
                self._send_chunk(library, library.entries.sections(round).get(section), index)
            case _:
                self._refuse(HTTPStatus.NOT_FOUND)

    def _send_manifest(self, promise: Promise | None) -> None:
        if promise is None:
            return self._refuse(HTTPStatus.NOT_FOUND)
        manifest = promise.await_json(HASHES_AWAITED_S)
        if manifest is None:
            self._send(json.dumps({"round": promise.round}).encode(), HTTPStatus.ACCEPTED)
        else:
            self._send(manifest)

    def _send_chunk(self, library: _Library, section: Tensor | None, index: int) -> None:
        data = b"" if section is None else library.chunk(section, index)
        self._send(data) if data else self._refuse(HTTPStatus.NOT_FOUND)

    def _send(self, data: bytes | memoryview, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, status: HTTPStatus) -> None:
        self._send(b"", status)


def _number(part: str) -> str | int:
    """A part of a path; a whole number where it is one."""
    return int(part) if part.isascii() and part.isdecimal() and len(part) <= _NUMBER_DIGITS else part
