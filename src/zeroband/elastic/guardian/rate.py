"""What a link carries, measured by a short burst when two nodes meet: a first guess, until transfers show more.

The caller sends some megabytes, for a second at most; the callee says how fast they came at their fastest, as soon as
they come no faster: a slow link is not taken from others for long. Runs in the guardians. A long link is not yet at its
full rate when the burst ends, so that this is a lower bound.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time

from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.membership.reach import DialRoutes
from zeroband.elastic.membership.topology import RELAY_COST
from zeroband.elastic.transport.dial import dial_member, read_exactly
from zeroband.elastic.transport.handshake import Introduction

BURST_BYTES = 4 << 20
BURST_S = 1.0

_PIECE_BYTES = 1 << 16
_WINDOW_S = 0.05
_FASTER = 1.1
_WINDOWS_NO_FASTER = 4
_ANSWER_BYTES = 4
_TIMEOUT_S = 5.0
_MOST_MBIT = 10**6
_DROP_THE_REST = struct.pack("ii", 1, 0)
"""SO_LINGER: a connection that is closed takes what was not sent with it."""


async def measure_rate(key: RunKey, introduction: Introduction, routes: DialRoutes) -> int:
    """Mbit/s from here to there, at least 1; through a relay only a part of what passed when nothing else did.

    Raises OSError, EOFError, TimeoutError, HandshakeFailed.
    """
    called = await dial_member(key, introduction, routes)
    with called.connection as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DROP_THE_REST)
        async with asyncio.timeout(_TIMEOUT_S):
            pouring = asyncio.create_task(_pour(connection))
            try:
                answer = int.from_bytes(await read_exactly(connection, _ANSWER_BYTES), "big")
            finally:
                pouring.cancel()
                await asyncio.gather(pouring, return_exceptions=True)
    is_relayed = bool(called.route.relay) and not called.is_punched
    return min(max(answer // RELAY_COST if is_relayed else answer, 1), _MOST_MBIT)


async def _pour(connection: socket.socket) -> None:
    """Send the burst, to its end."""
    loop, piece, end_s = asyncio.get_running_loop(), bytes(_PIECE_BYTES), time.monotonic() + BURST_S
    for _ in range(BURST_BYTES // _PIECE_BYTES):
        await loop.sock_sendall(connection, piece)
        if time.monotonic() > end_s:
            break
    connection.shutdown(socket.SHUT_WR)


async def answer_rate(connection: socket.socket) -> None:
    """The other end of it; the connection stays the caller's. Raises OSError, EOFError, TimeoutError."""
    loop, gauge, is_told = asyncio.get_running_loop(), _Gauge(), False
    async with asyncio.timeout(_TIMEOUT_S):
        while part := await loop.sock_recv(connection, _PIECE_BYTES):  # to the end: unread bytes would undo the answer
            gauge.see(len(part))
            if gauge.received > BURST_BYTES:
                raise EOFError("more than a burst")
            if gauge.is_sure and not is_told:
                await loop.sock_sendall(connection, gauge.answer())
                is_told = True
        if not is_told:
            await loop.sock_sendall(connection, gauge.answer())


class _Gauge:
    """How fast bytes came over the fastest window so far."""

    def __init__(self) -> None:
        self.received = 0
        self._began_at_s = self._window_s = time.monotonic()
        self._before, self._fastest, self._no_faster = 0, 0.0, 0

    def see(self, came: int) -> None:
        """Count the bytes that came."""
        self.received, now_s = self.received + came, time.monotonic()
        if now_s - self._window_s < _WINDOW_S:
            return
        rate = (self.received - self._before) / (now_s - self._window_s)
        self._no_faster = 0 if rate > _FASTER * self._fastest else self._no_faster + 1
        self._fastest = max(self._fastest, rate)
        self._window_s, self._before = now_s, self.received

    @property
    def is_sure(self) -> bool:
        """Whether they have come no faster for a while; where nothing comes, no window ends."""
        return self._no_faster >= _WINDOWS_NO_FASTER

    def answer(self) -> bytes:
        """Mbit/s, as it travels."""
        took_s = max(time.monotonic() - self._began_at_s, 1e-6)
        mbit = round(max(self._fastest, self.received / took_s) * 8 / 1e6)
        return min(mbit, _MOST_MBIT).to_bytes(_ANSWER_BYTES, "big")
