"""The donor's side of live recovery: serves the committed state and the journal over HTTP to nodes of the run.

Runs in threads of local rank 0. A large state is served in place, chunk by chunk, until the next round is applied; then
joiners continue with that one. A small state is copied once for all joiners, and dropped when unused. Training waits
only for a copy in memory, of a chunk or of a small state.

Chunks are hashed in stretches just before a joiner fetches them, in one thread: joiners cost a donor at most one core
and do not wait for the hashes of a whole state. A manifest lists the hashes of a stretch, so that donors' claims can be
compared. Only raw buffers and JSON cross the wire.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import Tensor

from zeroband.elastic.recovery.state_chunks import CHUNK_BYTES, Section, StateManifest, chunk_hash, stretch_of
from zeroband.elastic.transport.handshake import StreamKeys
from zeroband.elastic.transport.sealed import RECORD_BYTES, Connection, wrap
from zeroband.errors import RecoveryFailed
from zeroband.observe.log import get_logger
from zeroband.state.round_state import RoundState, RoundUpdate
from zeroband.state.slot import bytes_of

HASHES_AWAITED_S = 0.25
"""If hashing takes longer, the manifest request is answered by 202 and the joiner retries."""

_NUMBER_DIGITS = 18

COPY_LIFE_S = 120.0
"""Unused copies are dropped after this time."""

IDLE_S = 2.0
"""Copies unused for this time are replaced by a newer one."""

MAX_COPIES = 2

_AWAITED_S = 2.0
"""How long to wait for the next round: members apply a verdict at slightly different times."""

YIELD_S = 1.0
KEEPALIVE_BYTES = 1 << 10
"""While a round needs the link, each connection sends this much per YIELD_S, so that joiners see a live donor."""

_UNSENT_BYTES = 1 << 17
"""Limit of unsent data in the kernel (TCP_NOTSENT_LOWAT), so that yielding the link takes effect at once."""

_NICENESS = 10
"""Nice value of the hashing thread: training has priority."""

_POLL_S = 0.02

_log = get_logger(__name__)

_NOTHING = torch.empty(0, dtype=torch.uint8)


def _pages(nbytes: int) -> Tensor:
    """Allocate (nbytes,) uint8 with mmap: malloc's per-thread arenas would keep the memory after the thread ends."""
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


class Served:
    """A state or update that joiners fetch, with a manifest per requested stretch; each chunk is hashed once."""

    def __init__(self, hasher: Hasher, state: RoundState) -> None:
        self.state = state
        self.used_at_s = time.monotonic()
        self._hasher = hasher
        self._bytes = {name: section.view(torch.uint8) for name, section in state.sections.items()}
        self._made: dict[int, Future[bytes | None]] = {}
        self._hashes: dict[tuple[str, int], str] = {}
        """Hashes by section and chunk number; only the hasher's thread."""
        self._sending = 0
        """Chunks currently being sent."""
        self._lock = threading.Lock()

    def is_idle(self, now_s: float, idle_s: float) -> bool:
        """Whether the state is gone, or has been unused for this time."""
        with self._lock:
            is_busy = self._sending > 0 or not all(made.done() for made in self._made.values())
        return self.state.is_gone or (not is_busy and now_s - self.used_at_s > idle_s)

    def manifest(self, first: int) -> Future[bytes | None] | None:
        """Return the future manifest of the chunks from number `first`; None: there is no such chunk.

        Its result is None if the state is gone before it is hashed.
        """
        longest = max((section.numel() for section in self._bytes.values()), default=0)
        if first > 0 and first * self._hasher.chunk_bytes >= longest:
            return None
        with self._lock:
            if first not in self._made:
                self._made[first] = self._hasher.start(lambda buffer: self._hash(first, buffer))
            return self._made[first]

    def _hash(self, first: int, buffer: Tensor) -> bytes | None:
        hashes = {name: tuple(self._hashes_of(name, first, buffer)) for name in self._bytes}
        if any("" in listed for listed in hashes.values()):
            return None
        sections = {name: Section(self._bytes[name].numel(), listed) for name, listed in hashes.items()}
        state, chunk_bytes = self.state, self._hasher.chunk_bytes
        manifest = StateManifest(state.round, state.state_digest, state.record, chunk_bytes, first, sections)
        return manifest.to_json()

    def _hashes_of(self, name: str, first: int, buffer: Tensor) -> Iterator[str]:
        """Yield the hashes of a stretch; empty once the state is gone."""
        for index in stretch_of(self._bytes[name].numel(), self._hasher.chunk_bytes, first):
            if (name, index) not in self._hashes:
                data = None if self._hasher.is_closed else self.chunk(name, index, buffer)
                self._hashes[name, index] = "" if data is None else chunk_hash(bytes_of(data))
            yield self._hashes[name, index]

    def chunk(self, name: str, index: int, buffer: Tensor) -> Tensor | None:
        """Return a chunk, (nbytes,) uint8, possibly in the `buffer`; None: no such chunk, or the state is gone."""
        size = self._hasher.chunk_bytes
        part = self._bytes.get(name, _NOTHING)[index * size : (index + 1) * size]
        return self.state.read(part, buffer) if part.numel() else None

    @contextmanager
    def sending(self) -> Generator[None]:
        """Count as used while a chunk is sent. No lock is held inside."""
        with self._lock:
            self._sending += 1
        try:
            yield
        finally:
            with self._lock:
                self._sending -= 1
                self.used_at_s = time.monotonic()


def _yield_the_cores() -> None:
    """Lower this thread's priority; on other systems than Linux that would affect the whole process."""
    if sys.platform == "linux":
        niceness = max(_NICENESS, os.getpriority(os.PRIO_PROCESS, 0))
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


class Hasher:
    """Hashes stretches in one thread, in order. `close()` ends it early."""

    def __init__(self, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._is_closed = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state-hashes", initializer=_yield_the_cores)
        self._buffer = _pages(chunk_bytes)

    def start(self, hash_into: Callable[[Tensor], bytes | None]) -> Future[bytes | None]:
        """Queue a stretch. `hash_into` gets a buffer for one chunk."""
        try:
            return self._thread.submit(hash_into, self._buffer)
        except RuntimeError:  # closed
            never: Future[bytes | None] = Future()
            never.cancel()
            return never

    @property
    def is_closed(self) -> bool:
        return self._is_closed.is_set()

    def close(self) -> None:
        self._is_closed.set()
        self._thread.shutdown(wait=False, cancel_futures=True)


class Copies:
    """At most MAX_COPIES copies of the state, or references to it. Any thread except the main one.

    `current_round`: returns the round of the state without copying it.
    """

    def __init__(self, copy_state: Callable[[], RoundState], hasher: Hasher, current_round: Callable[[], int]) -> None:
        self._copy_state = copy_state
        self._hasher = hasher
        self._current_round = current_round
        self._making = threading.Lock()
        """Held while a copy is made; not needed to use an older one."""
        self._lock = threading.Lock()
        """Guards the table; held briefly."""
        self._held: dict[int, Served] = {}

    def newest(self) -> Served:
        """Return the current state, or the newest copy if all places are in use."""
        with self._making:
            with self._lock:
                latest = self._held.get(max(self._held, default=-1))
                is_current = latest is not None and self._current_round() == latest.state.round
                if latest is not None and (is_current or not self._make_room()):
                    latest.used_at_s = time.monotonic()
                    return latest
            copy = self._copy_state()
            with self._lock:
                held = self._held.setdefault(copy.round, Served(self._hasher, copy))
                held.used_at_s = time.monotonic()
                return held

    def _make_room(self) -> bool:
        """Drop the longest-unused copy if needed; False: all are in use."""
        if len(self._held) < MAX_COPIES:
            return True
        now_s = time.monotonic()
        idle = [held for held in self._held.values() if held.is_idle(now_s, IDLE_S)]
        if not idle:
            return False
        del self._held[min(idle, key=lambda held: held.used_at_s).state.round]
        return True

    def at(self, round: int) -> Served | None:
        """Return the state after exactly this round; None: it is neither held nor current."""
        held = self.held(round)
        if held is not None or not self._await(round):
            return held
        made = self.newest()
        return made if made.state.round == round else self.held(round)

    def held(self, round: int) -> Served | None:
        """Return the state after this round if it is held and not gone."""
        with self._lock:
            held = self._held.get(round)
        if held is None or held.state.is_gone:
            return None
        held.used_at_s = time.monotonic()
        return held

    def _await(self, round: int) -> bool:
        """Whether the state has reached the round, waiting briefly if it is the next one."""
        deadline_s = time.monotonic() + _AWAITED_S
        while (now := self._current_round()) + 1 == round and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        return now == round

    def drop_unused(self) -> None:
        """Drop copies that are unused for COPY_LIFE_S."""
        now_s = time.monotonic()
        with self._lock:
            self._held = {r: held for r, held in self._held.items() if not held.is_idle(now_s, COPY_LIFE_S)}


class Entries:
    """Journal entries with their hashes, and likewise offers; the journal decides how long an entry lives."""

    def __init__(self, journal_entry: Callable[[int], RoundUpdate | None], hasher: Hasher) -> None:
        self._journal_entry = journal_entry
        self._hasher = hasher
        self._lock = threading.Lock()
        self._held: dict[int, Served] = {}

    def at(self, round: int) -> Served | None:
        """Return a round's entry; None: the journal does not have it."""
        entry = self._journal_entry(round)
        if entry is None:
            return None
        with self._lock:
            held = self._held.get(round)
            if held is None or held.state.state_digest != entry.state_digest:
                update = RoundState(entry.round, entry.record, entry.state_digest, {"update": entry.update})
                self._held[round] = Served(self._hasher, update)
            return self._held[round]

    def held(self, round: int) -> Served | None:
        """Return a round's entry like `at`: the journal decides whether it is held."""
        return self.at(round)

    def drop_unused(self) -> None:
        """Drop entries that the journal has dropped; a reference would keep their disk space allocated."""
        with self._lock:
            self._held = {r: one for r, one in self._held.items() if self._journal_entry(r) is not None}


class StateServer:
    """Serves connections after their handshake until `close()`.

    `copy_state`, `journal_entry` and `current_round` are called in the server's threads. `copy_state` may return the
    state itself in place of a copy. `needs_link`: whether training waits for a round's transfer, to which joiners
    yield. `offered`: this node's contribution, for a carrier to fetch.
    """

    def __init__(
        self,
        copy_state: Callable[[], RoundState],
        journal_entry: Callable[[int], RoundUpdate | None],
        *,
        current_round: Callable[[], int],
        needs_link: Callable[[], bool] = lambda: False,
        offered: Callable[[], RoundUpdate | None] = lambda: None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.chunk_bytes = chunk_bytes
        self._needs_link = needs_link
        self._hasher = Hasher(chunk_bytes)
        self.copies = Copies(copy_state, self._hasher, current_round)
        self.offered = offered
        entries, offers = Entries(journal_entry, self._hasher), Entries(self._offer_of, self._hasher)
        self.kept: Mapping[str, Copies | Entries] = {"state": self.copies, "journal": entries, "offer": offers}
        """What is served, by the first part of its path."""
        self._stop = threading.Event()

        class Handler(_Handler):
            served = self

        self._server = _Server(Handler)
        self._sweeper = threading.Thread(target=self._sweep, name="state-copies", daemon=True)
        self._sweeper.start()

    def _offer_of(self, number: int) -> RoundUpdate | None:
        offer = self.offered()
        return offer if offer is not None and offer.round == number else None

    def take(self, connection: socket.socket, keys: StreamKeys) -> None:
        """Serve a connected socket in a new thread; after `close()`, close it. Any thread."""
        if self._stop.is_set():
            connection.close()
            return
        connection.setblocking(True)
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        self._server.process_request(wrap(connection, keys), connection.getpeername())

    def is_free(self) -> bool:
        """Wait up to YIELD_S until no round needs the link; return whether none does."""
        until_s = time.monotonic() + YIELD_S
        while is_needed := self._needs_link():
            if time.monotonic() >= until_s:
                break
            time.sleep(_POLL_S)
        return not is_needed

    def _sweep(self) -> None:
        while not self._stop.wait(COPY_LIFE_S / 4):
            for kept in self.kept.values():
                kept.drop_unused()

    def close(self) -> None:
        self._stop.set()
        self._hasher.close()
        self._server.server_close()
        self._server.cut()


class _Server(ThreadingHTTPServer):
    """One thread per connection; a joiner's disconnect is only logged at debug level."""

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("", 0), handler, bind_and_activate=False)  # connections are passed to `take`
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
        """Shut down open connections, which ends their threads."""
        with self._lock:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        _log.debug("a joiner's connection broke", exc_info=True, extra={"fields": {"from": str(client_address)}})


class _Handler(BaseHTTPRequestHandler):
    """Answers GET requests.

    /state returns the newest round, /state/ROUND/FIRST and /journal/ROUND/FIRST the manifest of a stretch, and
    /state/ROUND/SECTION/INDEX and /journal/ROUND/update/INDEX a chunk. /offer is like /state, for contributions to
    carry.
    """

    protocol_version = "HTTP/1.1"
    timeout = 30
    disable_nagle_algorithm = True
    served: StateServer

    def do_GET(self) -> None:
        try:
            self._serve_path()
        except RecoveryFailed:
            self._send_none(HTTPStatus.SERVICE_UNAVAILABLE)

    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests."""

    @cached_property
    def _buffer(self) -> Tensor:
        """Buffer for the chunk being sent."""
        return _pages(self.served.chunk_bytes)

    def _serve_path(self) -> None:
        served = self.served
        match [_number(part) for part in self.path.strip("/").split("/")]:
            case ["state"]:
                self._send_number(served.copies.newest().state.round)
            case ["offer"]:
                offer = served.offered()
                self._send_none(HTTPStatus.NOT_FOUND) if offer is None else self._send_number(offer.round)
            case [str(kind), int(round), int(first)] if kind in served.kept:
                self._send_manifest(served.kept[kind].at(round), first)
            case [str(kind), int(round), str(section), int(index)] if kind in served.kept:
                self._send_chunk(served.kept[kind].held(round), section, index)
            case _:
                self._send_none(HTTPStatus.NOT_FOUND)

    def _send_number(self, round: int) -> None:
        self._send(json.dumps({"round": round}).encode())

    def _send_manifest(self, held: Served | None, first: int) -> None:
        made = None if held is None else held.manifest(first)
        try:
            manifest = None if made is None else made.result(HASHES_AWAITED_S)
        except TimeoutError:
            return self._send_none(HTTPStatus.ACCEPTED)
        except CancelledError:
            manifest = None
        if manifest is None:
            self._send_none(HTTPStatus.NOT_FOUND)
        else:
            self._send(manifest)

    def _send_chunk(self, held: Served | None, section: str, index: int) -> None:
        with nullcontext() if held is None else held.sending():
            data = None if held is None else held.chunk(section, index, self._buffer)
            if data is None:
                return self._send_none(HTTPStatus.NOT_FOUND)
            self._begin(HTTPStatus.OK, data.numel())
            rest = bytes_of(data)
            while rest:
                size = RECORD_BYTES if self.served.is_free() else KEEPALIVE_BYTES
                self.wfile.write(rest[:size])
                rest = rest[size:]

    def _send(self, data: bytes, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._begin(status, len(data))
        self.wfile.write(data)

    def _send_none(self, status: HTTPStatus) -> None:
        self._send(b"", status)

    def _begin(self, status: HTTPStatus, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.end_headers()


def _number(part: str) -> str | int:
    """Convert a path component to an integer if it is one."""
    return int(part) if part.isascii() and part.isdecimal() and len(part) <= _NUMBER_DIGITS else part
