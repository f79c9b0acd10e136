"""A connection to another node as a stream of sealed records, with as much of a socket as its clients need; the calls.

A record is the length of what follows (4 bytes, big-endian) and at most RECORD_BYTES sealed with AES-256-GCM. Its
nonce is its number, its length is sealed along, and each direction has its own key: what was changed, repeated,
left out or moved on the way does not open. An empty record is the end, so that a cut stream is told from a whole one.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import threading
from collections.abc import Generator
from dataclasses import dataclass, replace

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from typing_extensions import Buffer

from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.membership.reach import DialRoutes
from zeroband.elastic.transport.dial import Address, Called, keep_alive, reach, run_here
from zeroband.elastic.transport.handshake import ANSWER_BYTES, Caller, Introduction, Purpose, StreamKeys
from zeroband.errors import HandshakeFailed

RECORD_BYTES = 1 << 16
"""Most bytes of what is sent in one record."""

Bytes = bytes | bytearray | memoryview

LENGTH_BYTES = 4
"""Bytes of a record's length, which it begins with."""

_TAG_BYTES, _NONCE_BYTES = 16, 12

STORE = "store"
"""What the store of a node is called in a handshake: it is there before the node has a name in its run."""


class SealedSocket:
    """A connected socket whose other end is one too. One thread reads and one writes; `shutdown` is for any.

    A read that is given up (TimeoutError, BlockingIOError) may be repeated. What is read raises ConnectionAbortedError
    where a record does not open or the stream ends without saying so. After an error in one direction nothing more goes
    that way.
    """

    def __init__(self, connection: socket.socket, seal_key: bytes, open_key: bytes) -> None:
        self._connection = connection
        self._sealing = Sealing(seal_key)
        self._plan = Sealing(open_key)
        self._came, self._came_bytes = bytearray(LENGTH_BYTES + RECORD_BYTES + _TAG_BYTES), 0
        """What was read and belongs to no opened record: its first bytes count."""
        self._opened = memoryview(b"")
        self._is_at_end = False
        # http.client closes a response's socket and reads its file to the end, so the last user closes the connection.
        self._users = 1
        self._lock = threading.Lock()
        self._is_closed = False

    # -- sending ------------------------------------------------------------------------------------------------

    def sendall(self, data: Bytes) -> None:
        """Send all of it."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), RECORD_BYTES):
            self._send_record(view[start : start + RECORD_BYTES])

    def _send_record(self, data: Bytes) -> None:
        with self._sealing.spoilt_by_errors():
            self._connection.sendall(self._sealing.record(data))

    # -- receiving ----------------------------------------------------------------------------------------------

    def recv_into(self, target: Bytes) -> int:
        """What has come, as far as it fits, at least one byte; 0 at the end."""
        view = memoryview(target).cast("B")
        if not self._opened and not self._is_at_end and len(view) > 0:
            self._opened = memoryview(self._receive_record())
            self._is_at_end = len(self._opened) == 0
        n = min(len(view), len(self._opened))
        view[:n] = self._opened[:n]
        self._opened = self._opened[n:]
        return n

    def recv(self, size: int) -> bytes:
        """What has come, at most `size` bytes and at least one; empty at the end."""
        room = bytearray(size)
        return bytes(memoryview(room)[: self.recv_into(room)])

    def _receive_record(self) -> bytes:
        self._fill(LENGTH_BYTES)
        with self._plan.spoilt_by_errors():
            record_bytes = record_size(self._came)
        self._fill(record_bytes)
        with self._plan.spoilt_by_errors(), memoryview(self._came) as came:
            opened = self._plan.opened(came[:LENGTH_BYTES], came[LENGTH_BYTES:record_bytes])
        left = self._came[record_bytes : self._came_bytes]
        self._came[: len(left)], self._came_bytes = left, len(left)
        return opened

    def _fill(self, size: int) -> None:
        """Have read this many bytes; more may come along."""
        while self._came_bytes < size:
            n = self._connection.recv_into(memoryview(self._came)[self._came_bytes :])
            if n == 0:
                with self._plan.spoilt_by_errors():
                    raise ConnectionAbortedError("the sealed stream was cut")
            self._came_bytes += n

    # -- as of any socket ---------------------------------------------------------------------------------------

    def makefile(self, mode: str = "rb", buffering: int = -1) -> io.BufferedReader:
        """A file to read from, which keeps the connection open until it is closed itself."""
        assert mode == "rb", f"a sealed socket is written to by sendall, not by a file of mode {mode}"
        with self._lock:
            self._users += 1
        return io.BufferedReader(_Reader(self), io.DEFAULT_BUFFER_SIZE if buffering <= 0 else buffering)

    def settimeout(self, seconds: float | None) -> None:
        """Set the limit of each wait for the network."""
        self._connection.settimeout(seconds)

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Set an option of the connection's socket."""
        self._connection.setsockopt(level, option, value)

    def shutdown(self, how: int) -> None:
        """SHUT_WR says that this was all, in the writer's thread; SHUT_RDWR cuts both directions at once."""
        if how == socket.SHUT_WR:
            self._send_record(b"")
        self._connection.shutdown(how)

    def close(self) -> None:
        """Give it up; the connection lives on while a file of it is open."""
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
        if is_first:
            self.give_up()

    def give_up(self) -> None:
        """One user less."""
        with self._lock:
            self._users -= 1
            is_last = self._users == 0
        if is_last:
            self._connection.close()


Connection = socket.socket | SealedSocket


def record_size(came: Bytes) -> int:
    """Size in bytes of the record that begins like this. Raises ConnectionAbortedError where none does."""
    sealed_bytes = int.from_bytes(came[:LENGTH_BYTES], "big")
    if not _TAG_BYTES <= sealed_bytes <= RECORD_BYTES + _TAG_BYTES:
        raise ConnectionAbortedError("what came is no sealed record")
    return LENGTH_BYTES + sealed_bytes


class Sealing:
    """The key of one direction, and the number of its next record."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._number = 0
        self._is_spoilt = False

    def _nonce(self) -> bytes:
        """Never the same twice."""
        self._number += 1
        return self._number.to_bytes(_NONCE_BYTES, "big")

    def record(self, data: Bytes) -> bytes:
        """Seal at most RECORD_BYTES; none are the end of the stream."""
        length = (memoryview(data).nbytes + _TAG_BYTES).to_bytes(LENGTH_BYTES, "big")
        return length + self._cipher.encrypt(self._nonce(), data, length)

    def opened(self, length: Bytes, sealed: Bytes) -> bytes:
        """Open what follows the length of a record. Raises ConnectionAbortedError."""
        try:
            return self._cipher.decrypt(self._nonce(), sealed, length)
        except InvalidTag as error:
            raise ConnectionAbortedError("a record is not what the other end sealed") from error

    @contextlib.contextmanager
    def spoilt_by_errors(self) -> Generator[None]:
        """A record that stopped half-way leaves nothing behind it that could be understood."""
        if self._is_spoilt:
            raise ConnectionAbortedError("the sealed stream broke before")
        self._is_spoilt = True  # until all of it went well: half a record on the wire, or a nonce that was used, stays
        yield
        self._is_spoilt = False


class _Reader(io.RawIOBase):
    """A sealed socket as a file."""

    def __init__(self, sealed: SealedSocket) -> None:
        self._sealed = sealed

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        return self._sealed.recv_into(memoryview(buffer))

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._sealed.give_up()


def sealed_by(connection: socket.socket, keys: StreamKeys) -> Connection:
    """The connection after its handshake, sealed where there are keys."""
    if keys.seal is None or keys.open is None:
        return connection
    return SealedSocket(connection, keys.seal, keys.open)


@dataclass(frozen=True)
class Dialler:
    """Calls other nodes in the name of this one, to ask for their state."""

    key: RunKey
    caller: str
    is_sealed: bool

    def dial(self, callee: str, ways: DialRoutes, within_s: float) -> Connection:
        """A connection to this member after the handshake. `within_s`: in seconds, for each way.

        Raises the last way's OSError, and HandshakeFailed where the other end hangs up or is not of its run.
        """
        asked = Introduction(self.caller, callee, "", self.is_sealed, Purpose.STATE)

        async def call() -> Called:
            async with asyncio.timeout(within_s * max(1, len(ways))):
                return await reach(self.key, asked, ways)

        try:
            called = run_here(call())
        except (EOFError, ConnectionResetError) as error:
            reason = "it hung up on the handshake: are run.token and comm.encryption the same on both nodes?"
            raise HandshakeFailed(reason) from error
        called.connection.setblocking(True)
        return sealed_by(called.connection, called.keys)


def call_store(key: RunKey, address: Address, *, within_s: float) -> Connection:
    """A connection to the store of the node at this address; always sealed. `within_s`: the longest of its waits.

    Raises OSError, TimeoutError, and HandshakeFailed where the other end hangs up or is not of this run.
    """
    connection = socket.create_connection(address, within_s)
    try:
        keep_alive(connection)
        # The token alone admits here: a store is called before its node has a name, and what lies in it is signed.
        caller = Caller(replace(key, node=None), Introduction("", STORE, "", is_sealed=True, purpose=Purpose.STORE))
        connection.sendall(caller.hello)
        proof, keys = caller.take(_read_answer(connection))
        connection.sendall(proof)
    except BaseException:
        connection.close()
        raise
    return sealed_by(connection, keys)


def _read_answer(connection: socket.socket) -> bytes:
    answer = b""
    while len(answer) < ANSWER_BYTES:
        try:
            part = connection.recv(ANSWER_BYTES - len(answer))
        except ConnectionResetError:
            part = b""
        if not part:
            raise HandshakeFailed("it hung up on the handshake: are run.id and run.token the same there?")
        answer += part
    return answer
