"""Calling another node: a connection to its port, and the handshake that makes both ends sure of each other."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from zeroband.plane.handshake import ANSWER_BYTES, Caller, Introduction, RunKey, StreamKeys
from zeroband.plane.port import read_exactly

Address = tuple[str, int]

_ANSWER_S = 5.0


async def call(
    key: RunKey,
    introduction: Introduction,
    address: Address,
    prepare: Callable[[socket.socket], None] = lambda connection: None,
) -> tuple[socket.socket, StreamKeys]:
    """A connection whose other end is who it should be, and its keys; it is the caller's to close.

    `prepare`: sets options before it connects. Raises OSError, EOFError, TimeoutError, HandshakeFailed.
    """
    loop, caller = asyncio.get_running_loop(), Caller(key, introduction)
    async with asyncio.timeout(_ANSWER_S):
        found = await loop.getaddrinfo(*address, type=socket.SOCK_STREAM)
        connection = socket.socket(found[0][0], socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            prepare(connection)
            await loop.sock_connect(connection, found[0][4])
            await loop.sock_sendall(connection, caller.hello)
            proof, keys = caller.take(await read_exactly(connection, ANSWER_BYTES))
            await loop.sock_sendall(connection, proof)
        except BaseException:
            connection.close()
            raise
    return connection, keys
