"""Encrypted connections between nodes: a stream of AES-256-GCM records behind a socket-like interface.

A record is a length (4 bytes, big-endian) and at most RECORD_BYTES of encrypted data. The nonce is the record's number,
the length is authenticated, and each direction has its own key, so changed, repeated, dropped or reordered records are
detected. An empty record marks the end, which tells a complete stream from a cut one.
"""

from __future__ import annotations

import contextlib
import io
import socket
import threading
from collections.abc import Generator

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from typing_extensions import Buffer

from zeroband.elastic.transport.handshake import StreamKeys

RECORD_BYTES = 1 << 16
"""Most plaintext bytes in a record."""

Bytes = bytes | bytearray | memoryview

LENGTH_BYTES = 4
"""Size of a record's length prefix."""

_TAG_BYTES, _NONCE_BYTES = 16, 12


class SealedSocket:
    """A connected socket with encrypted records at both ends. One thread may read and one write; any may `shutdown`.

    A read interrupted by TimeoutError or BlockingIOError may be repeated. Reads raise ConnectionAbortedError if a
    record does not authenticate or the stream is cut. After an error in one direction, that direction is closed.
    """

    def __init__(self, connection: socket.socket, seal_key: bytes, open_key: bytes) -> None:
        self._connection = connection
        self._sealing = RecordCipher(seal_key)
        self._opening = RecordCipher(open_key)
        self._came, self._came_bytes = bytearray(LENGTH_BYTES + RECORD_BYTES + _TAG_BYTES), 0
        """Received bytes of the next record; only the first `_came_bytes` are valid."""
        self._opened = memoryview(b"")
        self._is_at_end = False
        # http.client closes the socket of a response and then reads its file to the end, so users are counted: the
        # last one closes the connection.
        self._users = 1
        self._lock = threading.Lock()
        self._is_closed = False

    # -- sending ------------------------------------------------------------------------------------------------

    def sendall(self, data: Bytes) -> None:
        """Encrypt and send all data."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), RECORD_BYTES):
            self._send_record(view[start : start + RECORD_BYTES])

    def _send_record(self, data: Bytes) -> None:
        with self._sealing.broken_by_errors():
            self._connection.sendall(self._sealing.record(data))

    # -- receiving ----------------------------------------------------------------------------------------------

    def recv_into(self, target: Bytes) -> int:
        """Read at least one byte into `target`, as many as available; return their number, 0 at the end."""
        view = memoryview(target).cast("B")
        if not self._opened and not self._is_at_end and len(view) > 0:
            self._opened = memoryview(self._receive_record())
            self._is_at_end = len(self._opened) == 0
        n = min(len(view), len(self._opened))
        view[:n] = self._opened[:n]
        self._opened = self._opened[n:]
        return n

    def recv(self, size: int) -> bytes:
        """Return 1 to `size` bytes; empty at the end."""
        buffer = bytearray(size)
        return bytes(memoryview(buffer)[: self.recv_into(buffer)])

    def _receive_record(self) -> bytes:
        self._fill(LENGTH_BYTES)
        with self._opening.broken_by_errors():
            record_bytes = record_size(self._came)
        self._fill(record_bytes)
        with self._opening.broken_by_errors(), memoryview(self._came) as came:
            opened = self._opening.opened(came[:LENGTH_BYTES], came[LENGTH_BYTES:record_bytes])
        left = self._came[record_bytes : self._came_bytes]
        self._came[: len(left)], self._came_bytes = left, len(left)
        return opened

    def _fill(self, size: int) -> None:
        """Read until at least this many bytes are buffered."""
        while self._came_bytes < size:
            n = self._connection.recv_into(memoryview(self._came)[self._came_bytes :])
            if n == 0:
                with self._opening.broken_by_errors():
                    raise ConnectionAbortedError("the sealed stream was cut")
            self._came_bytes += n

    # -- as of any socket ---------------------------------------------------------------------------------------

    def makefile(self, mode: str = "rb", buffering: int = -1) -> io.BufferedReader:
        """Return a file to read from, which keeps the connection open until closed."""
        assert mode == "rb", f"a sealed socket is written to by sendall, not by a file of mode {mode}"
        with self._lock:
            self._users += 1
        return io.BufferedReader(_Reader(self), io.DEFAULT_BUFFER_SIZE if buffering <= 0 else buffering)

    def settimeout(self, seconds: float | None) -> None:
        """Set the time-out of each socket operation."""
        self._connection.settimeout(seconds)

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Set an option of the connection's socket."""
        self._connection.setsockopt(level, option, value)

    def shutdown(self, how: int) -> None:
        """End the stream: SHUT_WR sends the end marker, in the writer's thread; SHUT_RDWR cuts both directions."""
        if how == socket.SHUT_WR:
            self._send_record(b"")
        self._connection.shutdown(how)

    def close(self) -> None:
        """Close the socket; the connection stays open while a file of it is."""
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
        if is_first:
            self.release()

    def release(self) -> None:
        """Remove one user; the last one closes the connection."""
        with self._lock:
            self._users -= 1
            is_last = self._users == 0
        if is_last:
            self._connection.close()


Connection = socket.socket | SealedSocket


def record_size(came: Bytes) -> int:
    """Return the size of a record from its length prefix. Raises ConnectionAbortedError if it is invalid."""
    sealed_bytes = int.from_bytes(came[:LENGTH_BYTES], "big")
    if not _TAG_BYTES <= sealed_bytes <= RECORD_BYTES + _TAG_BYTES:
        raise ConnectionAbortedError("received data that is no sealed record")
    return LENGTH_BYTES + sealed_bytes


class RecordCipher:
    """Cipher of one direction: its key and the number of the next record."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._number = 0
        self._is_broken = False

    def _nonce(self) -> bytes:
        """Return the next nonce, unique per key."""
        self._number += 1
        return self._number.to_bytes(_NONCE_BYTES, "big")

    def record(self, data: Bytes) -> bytes:
        """Encrypt at most RECORD_BYTES; empty data marks the end of the stream."""
        length = (memoryview(data).nbytes + _TAG_BYTES).to_bytes(LENGTH_BYTES, "big")
        return length + self._cipher.encrypt(self._nonce(), data, length)

    def opened(self, length: Bytes, sealed: Bytes) -> bytes:
        """Decrypt a record's body. Raises ConnectionAbortedError."""
        try:
            return self._cipher.decrypt(self._nonce(), sealed, length)
        except InvalidTag as error:
            raise ConnectionAbortedError("a record failed authentication") from error

    @contextlib.contextmanager
    def broken_by_errors(self) -> Generator[None]:
        """Refuse all further records after an error: half a record makes the rest unreadable."""
        if self._is_broken:
            raise ConnectionAbortedError("the sealed stream broke before")
        self._is_broken = True  # reset only on success: an error leaves half a record on the wire, or a used nonce
        yield
        self._is_broken = False


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
            self._sealed.release()


def wrap(connection: socket.socket, keys: StreamKeys) -> Connection:
    """Return the connection after its handshake, encrypted if there are keys."""
    if keys.seal is None or keys.open is None:
        return connection
    return SealedSocket(connection, keys.seal, keys.open)
