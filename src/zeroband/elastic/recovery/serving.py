"""A donor's side of live recovery: serves the committed state and the journal over HTTP, to nodes of the run.

Runs in threads of local rank 0. A large state is served as it lies there, chunk by chunk, until the next round is
applied; then joiners go on with that one. A small one is copied, once for all who ask, and dropped when nobody uses it.
Training waits for a copy in memory alone, of a chunk or of a small state: hashes are computed in a thread of their own,
one state at a time, so that joiners cost a donor at most one core. Only raw buffers and JSON cross the wire. A manifest
names the hash of every chunk, so that what one donor claims can be held against the others.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

import torch
from torch import Tensor

from zeroband.elastic.recovery.state_chunks import CHUNK_BYTES, StateManifest, bytes_of, chunk_hash
from zeroband.elastic.transport.handshake import StreamKeys
from zeroband.elastic.transport.sealed import Connection, sealed_by
from zeroband.errors import RecoveryFailed
from zeroband.observe.log import get_logger

HASHES_AWAITED_S = 0.25
"""A manifest whose hashes take longer is answered by 202 and its round: the joiner turns to other donors meanwhile."""

_NUMBER_DIGITS = 18

COPY_LIFE_S = 120.0
"""A copy that nobody asked for during this time is dropped."""

IDLE_S = 2.0
"""A copy that nobody asked for during this time makes room for a newer one."""

MAX_COPIES = 2

_AWAITED_S = 2.0
"""Members apply a verdict at slightly different times: the next round is awaited so long."""

_POLL_S = 0.02
_MAX_ENTRIES = 256

_log = get_logger(__name__)

Read = Callable[[Tensor], Tensor | None]
_NOTHING = torch.empty(0, dtype=torch.uint8)


class ServedState(Protocol):
    """The outer state after a committed round: a copy, or itself as long as it is that."""

    @property
    def round(self) -> int: ...
    @property
    def sections(self) -> Mapping[str, Tensor]: ...
    @property
    def record(self) -> Mapping[str, Any]: ...
    @property
    def state_digest(self) -> str: ...
    @property
    def is_gone(self) -> bool:
        """Whether the next round was applied to it."""
        ...

    def read(self, part: Tensor) -> Tensor | None:
        """A part of a section, which nobody writes to any more; None where it is gone."""
        ...


class ServedEntry(Protocol):
    """What one committed round did."""

    @property
    def round(self) -> int: ...
    @property
    def update(self) -> Tensor: ...
    @property
    def record(self) -> Mapping[str, Any]: ...
    @property
    def state_digest(self) -> str: ...


class Promise:
    """A manifest whose hashes are being computed."""

    def __init__(self, round: int) -> None:
        self.round = round
        self._done = threading.Event()
        self._manifest: bytes | None = None

    def keep(self, manifest: bytes) -> None:
        self._manifest = manifest
        self._done.set()

    def give_up(self) -> None:
        """What was to be hashed is gone."""
        self._done.set()

    @property
    def is_given_up(self) -> bool:
        return self._done.is_set() and self._manifest is None

    @property
    def is_kept(self) -> bool:
        return self._done.is_set()

    def await_json(self, patience_s: float) -> bytes | None:
        """The manifest; None if it is not there in time, or given up."""
        return self._manifest if self._done.wait(patience_s) else None


def _pieces(section: Tensor, nbytes: int) -> tuple[Tensor, ...]:
    """A section in views of so many bytes each, (n,) uint8, but for the last."""
    return section.view(torch.uint8).split(nbytes) if section.numel() else ()


class Hasher:
    """Computes manifests, one after the other, each in a thread that ends with it. `close()` ends them early."""

    def __init__(self, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._is_closed = threading.Event()
        self._turn = threading.Lock()

    def start(self, served: ServedState) -> Promise:
        """Begin with the hashes of a state."""
        return self._start(served, served.sections, served.read)

    def start_entry(self, entry: ServedEntry) -> Promise:
        """Begin with the hashes of an entry."""
        return self._start(entry, {"update": entry.update}, lambda part: part)

    def _start(self, served: ServedState | ServedEntry, sections: Mapping[str, Tensor], read: Read) -> Promise:
        promise = Promise(served.round)
        target: Callable[[], None] = lambda: self._hash(promise, served, sections, read)  # noqa: E731
        threading.Thread(target=target, name="state-hashes", daemon=True).start()
        return promise

    def _hash(
        self, promise: Promise, served: ServedState | ServedEntry, sections: Mapping[str, Tensor], read: Read
    ) -> None:
        parts = {name: _pieces(section, self.chunk_bytes) for name, section in sections.items()}
        with self._turn:
            hashes = {name: tuple(self._hashes(pieces, read)) for name, pieces in parts.items()}
        if all(len(hashes[name]) == len(pieces) for name, pieces in parts.items()):
            lengths = {name: section.nbytes for name, section in sections.items()}
            manifest = StateManifest(
                served.round, served.state_digest, served.record, self.chunk_bytes, lengths, hashes
            )
            promise.keep(manifest.to_json())
        else:
            promise.give_up()

    def _hashes(self, parts: Sequence[Tensor], read: Read) -> Iterator[str]:
        """Until one of them is gone."""
        for part in parts:
            data = None if self._is_closed.is_set() else read(part)
            if data is None:
                return
            yield chunk_hash(bytes_of(data))

    def close(self) -> None:
        self._is_closed.set()


@dataclass
class _Held:
    copy: ServedState
    promise: Promise
    used_at_s: float = 0.0
    sending: int = 0
    """Chunks on their way to joiners at this moment."""

    def is_idle(self, now_s: float, idle_s: float) -> bool:
        return self.copy.is_gone or (self.promise.is_kept and self.sending == 0 and now_s - self.used_at_s > idle_s)


class Copies:
    """At most two copies of the state, or of what tells where it lies. Any thread but the main one.

    `current_round` tells the round of the state without copying it; without it, each request for the newest state
    makes a copy.
    """

    def __init__(
        self, copy_state: Callable[[], ServedState], hasher: Hasher, current_round: Callable[[], int] | None = None
    ) -> None:
        self._copy_state = copy_state
        self._hasher = hasher
        self._current_round = current_round
        self._making = threading.Lock()
        """Held while a copy is made. Those who use an older copy do not need it."""
        self._lock = threading.Lock()
        """Held for moments; guards the table."""
        self._held: dict[int, _Held] = {}

    def newest(self) -> Promise:
        """The state as it is now; where two older copies are in use, the newer one of these."""
        with self._making:
            with self._lock:
                latest = self._held.get(max(self._held, default=-1))
                is_current = latest is not None and self._is_current(latest.copy.round)
                if latest is not None and (is_current or not self._make_room()):
                    latest.used_at_s = time.monotonic()
                    return latest.promise
            copy = self._copy_state()
            with self._lock:
                held = self._held.get(copy.round)
                if held is None:
                    held = self._held[copy.round] = _Held(copy, self._hasher.start(copy))
                held.used_at_s = time.monotonic()
                return held.promise

    def _is_current(self, round: int) -> bool:
        return self._current_round is not None and self._current_round() == round

    def _make_room(self) -> bool:
        """Drop the copy that is unused for longest, if one is; False where all places are in use."""
        if len(self._held) < MAX_COPIES:
            return True
        now_s = time.monotonic()
        idle = [held for held in self._held.values() if held.is_idle(now_s, IDLE_S)]
        if not idle:
            return False
        del self._held[min(idle, key=lambda held: held.used_at_s).copy.round]
        return True

    def at(self, round: int) -> Promise | None:
        """The state after exactly this round; None if it is neither held nor the state of now."""
        promise = self._promise(round)
        if promise is not None or not self._await(round):
            return promise
        made = self.newest()
        return made if made.round == round else self._promise(round)

    def _promise(self, round: int) -> Promise | None:
        with self._lock:
            held = self._held.get(round)
            if held is None or held.copy.is_gone:
                return None
            held.used_at_s = time.monotonic()
            return held.promise

    def _await(self, round: int) -> bool:
        """Whether the state may be that of the round, after a short wait where it is about to be."""
        if self._current_round is None:
            return True
        deadline_s = time.monotonic() + _AWAITED_S
        while (now := self._current_round()) + 1 == round and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        return now == round

    @contextmanager
    def sending(self, round: int) -> Generator[ServedState | None]:
        """The copy of a round while a part of it is sent; None if it is not held. No lock is held inside."""
        with self._lock:
            held = self._held.get(round)
            if held is not None:
                held.sending += 1
        try:
            yield held and held.copy
        finally:
            if held is not None:
                with self._lock:
                    held.sending -= 1
                    held.used_at_s = time.monotonic()

    def drop_unused(self) -> None:
        """Drop the copies that nobody asked for lately."""
        now_s = time.monotonic()
        with self._lock:
            self._held = {r: held for r, held in self._held.items() if not held.is_idle(now_s, COPY_LIFE_S)}


class Entries:
    """The rounds of the journal with their hashes. Keeps the hashes only: how long an entry lives is the journal's."""

    def __init__(self, journal_entry: Callable[[int], ServedEntry | None], hasher: Hasher) -> None:
        self._journal_entry = journal_entry
        self._hasher = hasher
        self._lock = threading.Lock()
        self._promises: OrderedDict[int, Promise] = OrderedDict()

    def at(self, round: int) -> Promise | None:
        """The entry of a round, hashed once; None where the journal does not hold it."""
        entry = self._journal_entry(round)
        if entry is None:
            return None
        with self._lock:
            if round not in self._promises:
                self._promises[round] = self._hasher.start_entry(entry)
            while len(self._promises) > _MAX_ENTRIES:
                self._promises.popitem(last=False)
            return self._promises.get(round)

    def sections(self, round: int) -> Mapping[str, Tensor]:
        """The sections of an entry; none where the journal does not hold it."""
        entry = self._journal_entry(round)
        return {} if entry is None else {"update": entry.update}


class StateServer:
    """Answers the connections that it is given, after their handshake, until `close()`.

    `copy_state`, `journal_entry` and `current_round` are called in threads of the server. `copy_state` may give the
    state itself instead of a copy. `current_round` tells the round of the state without a copy of it; with it, one copy
    of a round serves all joiners that ask for it.
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

    def chunk(self, sections: Mapping[str, Tensor], section: str, index: int) -> Tensor | None:
        """(nbytes,) uint8, where it lies; None where there is none."""
        data = sections[section].view(torch.uint8) if section in sections else _NOTHING
        chunk = data[index * self.chunk_bytes : (index + 1) * self.chunk_bytes]
        return chunk if chunk.numel() else None


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
                with suppress(OSError):
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
                    chunk = None if copy is None else library.chunk(copy.sections, section, index)
                    self._send_chunk(None if copy is None or chunk is None else copy.read(chunk))
            case ["journal", int(round), str(section), int(index)]:
                self._send_chunk(library.chunk(library.entries.sections(round), section, index))
            case _:
                self._refuse(HTTPStatus.NOT_FOUND)

    def _send_manifest(self, promise: Promise | None) -> None:
        manifest = None if promise is None else promise.await_json(HASHES_AWAITED_S)
        if promise is None or promise.is_given_up:
            self._refuse(HTTPStatus.NOT_FOUND)
        elif manifest is None:
            self._send(json.dumps({"round": promise.round}).encode(), HTTPStatus.ACCEPTED)
        else:
            self._send(manifest)

    def _send_chunk(self, data: Tensor | None) -> None:
        self._refuse(HTTPStatus.NOT_FOUND) if data is None else self._send(bytes_of(data))

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
