"""What a link carries, measured by a short burst when two nodes meet: a first guess, until transfers show more.

The caller sends up to some megabytes for up to a second; the callee says how fast they came at their fastest. Runs in
the guardians. A long link is not yet at its full rate when the burst ends, so that this is a lower bound.
"""

from __future__ import annotations

import asyncio
import socket
import time

from zeroband.plane.calling import Address, call
from zeroband.plane.handshake import Introduction, RunKey
from zeroband.plane.port import read_exactly

BURST_BYTES = 4 << 20
BURST_S = 1.0

_PIECE_BYTES = 1 << 16
_WINDOW_S = 0.05
_ANSWER_BYTES = 4
_PATIENCE_S = 5.0
_MOST_MBIT = 10**6


async def measure_rate(key: RunKey, introduction: Introduction, address: Address) -> int:
    """Mbit/s from here to there, at least 1. Raises OSError, EOFError, TimeoutError, HandshakeFailed."""
    connection, _ = await call(key, introduction, address)
    loop, piece = asyncio.get_running_loop(), bytes(_PIECE_BYTES)
    with connection:
        async with asyncio.timeout(_PATIENCE_S):
            end_s = time.monotonic() + BURST_S
            for _ in range(BURST_BYTES // _PIECE_BYTES):
                await loop.sock_sendall(connection, piece)
                if time.monotonic() > end_s:
                    break
            connection.shutdown(socket.SHUT_WR)
            answer = int.from_bytes(await read_exactly(connection, _ANSWER_BYTES), "big")
    return min(max(answer, 1), _MOST_MBIT)


async def answer_rate(connection: socket.socket) -> None:
    """The other end of it; the connection stays the caller's. Raises OSError, EOFError, TimeoutError."""
    loop, received, fastest = asyncio.get_running_loop(), 0, 0.0
    async with asyncio.timeout(_PATIENCE_S):
        began_at_s, window_s, before = time.monotonic(), time.monotonic(), 0
        while part := await loop.sock_recv(connection, _PIECE_BYTES):
            received, now_s = received + len(part), time.monotonic()
            if received > BURST_BYTES:
                raise EOFError("more than a burst")
            if now_s - window_s >= _WINDOW_S:
                fastest = max(fastest, (received - before) / (now_s - window_s))
                window_s, before = now_s, received
        took_s = max(time.monotonic() - began_at_s, 1e-6)
        mbit = round(max(fastest, received / took_s) * 8 / 1e6)
        await loop.sock_sendall(connection, min(mbit, _MOST_MBIT).to_bytes(_ANSWER_BYTES, "big"))
