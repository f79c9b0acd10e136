"""Calls to a node's store: decrypts a caller's connection and forwards it to the server, which has no other clients.

Runs in the event loop of the node's port. The server's ACL decides which commands are allowed.
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
from zeroband.elastic.transport.handshake import STORE
from zeroband.elastic.transport.sealed import LENGTH_BYTES, RECORD_BYTES, RecordCipher, record_size


class StoreCalls:
    """Answers calls to a store. `server`: its Unix socket."""

    def __init__(self, key: RunKey, server: Path) -> None:
        self._key, self._server = key, server
        self._heard = SeenCalls()

    async def answer(self, connection: socket.socket) -> None:
        """Connect a caller of this run with the server until either closes. Raises like `shake_hands`."""
        call = await shake_hands(connection, self._key, callee=STORE, is_sealed=True, heard=self._heard)
        assert call.keys.seal is not None and call.keys.open is not None
        keep_alive(connection)
        loop, sealer = asyncio.get_running_loop(), _Sealer(call.keys.seal)
        caller, server = _End(_Opener(call.keys.open), sealer.last), _End(sealer)
        caller.other, server.other = server, caller
        try:
            await loop.create_unix_connection(lambda: server, str(self._server))
            await loop.connect_accepted_socket(lambda: caller, connection.dup())
            await caller.is_over.wait()
        finally:
            caller.abort()
            server.abort()


class _End(asyncio.Protocol):
    """One end of a forwarded connection; data goes to the other end, no faster than that takes it.

    `translate`: encrypts or decrypts data for the other end. `last`: is written here when the other end closes.
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
        except ConnectionAbortedError:  # tampered with in transit
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
        """Close at once; unsent data is lost."""
        if self.transport is not None:
            self.transport.abort()


class _Opener:
    """Decrypts a caller's records."""

    def __init__(self, key: bytes) -> None:
        self._sealing, self._buffer = RecordCipher(key), bytearray()

    def __call__(self, data: bytes) -> Iterator[bytes]:
        """Yield the complete records. Raises ConnectionAbortedError."""
        self._buffer += data
        while len(self._buffer) >= LENGTH_BYTES and len(self._buffer) >= (size := record_size(self._buffer)):
            record = bytes(self._buffer[:size])
            del self._buffer[:size]
            yield self._sealing.opened(record[:LENGTH_BYTES], record[LENGTH_BYTES:])


class _Sealer:
    """Encrypts the server's answers."""

    def __init__(self, key: bytes) -> None:
        self._sealing = RecordCipher(key)

    def __call__(self, data: bytes) -> Iterator[bytes]:
        for start in range(0, len(data), RECORD_BYTES):
            yield self._sealing.record(data[start : start + RECORD_BYTES])

    def last(self) -> bytes:
        """The record that tells the end of the stream from a truncation."""
        return self._sealing.record(b"")
