"""Measures the rate of a link with a short burst when two nodes first connect: an estimate until transfers show more.

The caller sends a few megabytes for at most a second; the callee reports the highest rate as soon as it stops growing,
so that a slow link is not occupied for long. Runs in the guardians. A lower bound: TCP on a long link has not reached
its full rate when the burst ends.
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
_GROWTH = 1.1
_STEADY_WINDOWS = 4
"""The rate is final after this many windows without this growth."""
_ANSWER_BYTES = 4
_TIMEOUT_S = 5.0
_MAX_MBIT = 10**6
_DROP_UNSENT = struct.pack("ii", 1, 0)
"""SO_LINGER: closing the connection discards unsent data."""


async def measure_rate(key: RunKey, introduction: Introduction, routes: DialRoutes) -> int:
    """Return the rate to another node in Mbit/s, at least 1; of a relayed link only a fraction, as relays are shared.

    Raises OSError, EOFError, TimeoutError, HandshakeFailed.
    """
    called = await dial_member(key, introduction, routes)
    with called.connection as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DROP_UNSENT)
        async with asyncio.timeout(_TIMEOUT_S):
            burst = asyncio.create_task(_send_burst(connection))
            try:
                answer = int.from_bytes(await read_exactly(connection, _ANSWER_BYTES), "big")
            finally:
                burst.cancel()
                await asyncio.gather(burst, return_exceptions=True)
    is_relayed = bool(called.route.relay) and not called.is_punched
    return min(max(answer // RELAY_COST if is_relayed else answer, 1), _MAX_MBIT)


async def _send_burst(connection: socket.socket) -> None:
    loop, piece, end_s = asyncio.get_running_loop(), bytes(_PIECE_BYTES), time.monotonic() + BURST_S
    for _ in range(BURST_BYTES // _PIECE_BYTES):
        await loop.sock_sendall(connection, piece)
        if time.monotonic() > end_s:
            break
    connection.shutdown(socket.SHUT_WR)


async def answer_rate(connection: socket.socket) -> None:
    """Answer `measure_rate`; does not close the connection. Raises OSError, EOFError, TimeoutError."""
    loop, gauge, is_answered = asyncio.get_running_loop(), _Gauge(), False
    async with asyncio.timeout(_TIMEOUT_S):
        while part := await loop.sock_recv(connection, _PIECE_BYTES):  # to the end: closing with unread data resets
            gauge.add(len(part))
            if gauge.received > BURST_BYTES:
                raise EOFError("more than a burst")
            if gauge.is_steady and not is_answered:
                await loop.sock_sendall(connection, gauge.answer())
                is_answered = True
        if not is_answered:
            await loop.sock_sendall(connection, gauge.answer())


class _Gauge:
    """Highest rate of received bytes over a window."""

    def __init__(self) -> None:
        self.received = 0
        self._began_at_s = self._window_s = time.monotonic()
        self._before, self._fastest, self._steady_windows = 0, 0.0, 0

    def add(self, size: int) -> None:
        """Count received bytes."""
        self.received, now_s = self.received + size, time.monotonic()
        if now_s - self._window_s < _WINDOW_S:
            return
        rate = (self.received - self._before) / (now_s - self._window_s)
        self._steady_windows = 0 if rate > _GROWTH * self._fastest else self._steady_windows + 1
        self._fastest = max(self._fastest, rate)
        self._window_s, self._before = now_s, self.received

    @property
    def is_steady(self) -> bool:
        """Whether the rate has stopped growing."""
        return self._steady_windows >= _STEADY_WINDOWS

    def answer(self) -> bytes:
        """The rate in Mbit/s, encoded."""
        took_s = max(time.monotonic() - self._began_at_s, 1e-6)
        mbit = round(max(self._fastest, self.received / took_s) * 8 / 1e6)
        return min(mbit, _MAX_MBIT).to_bytes(_ANSWER_BYTES, "big")
