"""Commands for a node's store: a caller's sealed connection is joined with the server, which knows no other clients.

Runs in the loop of the node's port. Knows no commands: what callers may do, the server's own rules say.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import cast

from zeroband.elastic.guardian.port import SeenCalls, shake_hands
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.transport.dial import keep_alive
from zeroband.elastic.transport.sealed import LENGTH_BYTES, RECORD_BYTES, STORE, RecordCipher, record_size


class StoreCalls:
    """Answers calls for a store. `server`: the Unix socket on which it listens."""

    def __init__(self, key: RunKey, server: Path) -> None:
        self._key, self._server = key, server
        self._heard = SeenCalls()

    async def answer(self, connection: socket.socket) -> None:
        """Join a caller of this run with the server until one of the two ends. Raises what `shake_hands` does."""
        told = await shake_hands(connection, self._key, callee=STORE, is_sealed=True, heard=self._heard)
        assert told.keys.seal is not None and told.keys.open is not None
        keep_alive(connection)
        loop, sealer = asyncio.get_running_loop(), _Sealer(told.keys.seal)
        caller, server = _End(_Opener(told.keys.open), sealer.last), _End(sealer)
        caller.other, server.other = server, caller
        try:
            await loop.create_unix_connection(lambda: server, str(self._server))
            await loop.connect_accepted_socket(lambda: caller, connection.dup())
            await caller.is_over.wait()
        finally:
            caller.abort()
            server.abort()


class _End(asyncio.Protocol):
    """One end of a connection that is passed on: what comes goes to the other end, no faster than that takes it.

    `translate`: what is written to the other end, in place of what came. `last`: written here when the other one ends.
    """

    other: _End

    def __init__(self, translate: Callable[[bytes], Iterable[bytes]], last: Callable[[], bytes] = bytes) -> None:
        self._translate, self.last = translate, last
        self.transport: asyncio.Transport | None = None
        self.is_over = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            for piece in self._translate(data):
                self.other.write(piece)
        except ConnectionAbortedError:  # somebody changed it on the way
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_over.set()
        if self.other.transport is not None and not self.other.is_over.is_set():
            self.other.write(self.other.last())
            self.other.transport.close()

    def pause_writing(self) -> None:
        if self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other.transport is not None:
            self.other.transport.resume_reading()

    def write(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)

    def abort(self) -> None:
        """Hang up; what was not sent yet is lost."""
        if self.transport is not None:
            self.transport.abort()


class _Opener:
    """Opens the records of a caller."""

    def __init__(self, key: bytes) -> None:
        self._plan, self._came = RecordCipher(key), bytearray()

    def __call__(self, data: bytes) -> Iterator[bytes]:
        """What is whole by now. Raises ConnectionAbortedError."""
        self._came += data
        while len(self._came) >= LENGTH_BYTES and len(self._came) >= (size := record_size(self._came)):
            record = bytes(self._came[:size])
            del self._came[:size]
            yield self._plan.opened(record[:LENGTH_BYTES], record[LENGTH_BYTES:])


class _Sealer:
    """Seals what the server says."""

    def __init__(self, key: bytes) -> None:
        self._sealing = RecordCipher(key)

    def __call__(self, data: bytes) -> Iterator[bytes]:
        for start in range(0, len(data), RECORD_BYTES):
            yield self._sealing.record(data[start : start + RECORD_BYTES])

    def last(self) -> bytes:
        """Tell the end of the stream from a cut."""
        return self._sealing.record(b"")
