"""Calling another node: a connection to its port, and the handshake that makes both ends sure of each other."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from zeroband.elastic.membership.run_key import RunKey
from zeroband.elastic.transport.handshake import ANSWER_BYTES, Caller, Introduction, StreamKeys

Address = tuple[str, int]

_ANSWER_S = 5.0
_REACH_S, _STAYS_S = 2.0, 1.0


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
        connection = await _connect(address, prepare)
        try:
            await loop.sock_sendall(connection, caller.hello)
            proof, keys = caller.take(await read_exactly(connection, ANSWER_BYTES))
            await loop.sock_sendall(connection, proof)
        except BaseException:
            connection.close()
            raise
    return connection, keys


def answers(address: Address) -> bool:
    """Whether a program listens at an address, and not only a forwarder in front of it, which hangs up at once."""
    try:
        connection = socket.create_connection(address, timeout=_REACH_S)
    except OSError:
        return False
    with connection:
        connection.settimeout(_STAYS_S)
        try:
            return connection.recv(1) != b""
        except TimeoutError:  # it waits for what we have to say
            return True
        except OSError:
            return False


async def read_exactly(connection: socket.socket, size: int) -> bytes:
    """Raises EOFError when the connection ends before."""
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < size:
        part = await loop.sock_recv(connection, size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


async def _connect(address: Address, prepare: Callable[[socket.socket], None]) -> socket.socket:
    """Connect to the first of the host's addresses that takes it; a silent one leaves the others their share of time.

    Raises OSError, of the last one.
    """
    found = await asyncio.get_running_loop().getaddrinfo(*address, type=socket.SOCK_STREAM)
    problem = OSError(f"{address[0]} has no address")
    for family, _, _, _, at in found:
        try:
            async with asyncio.timeout(_ANSWER_S / len(found)):
                return await _connect_to(family, at, prepare)
        except OSError as error:  # also where this machine has no IPv6
            problem = error
    raise problem


async def _connect_to(family: int, at: Any, prepare: Callable[[socket.socket], None]) -> socket.socket:
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        prepare(connection)
        await asyncio.get_running_loop().sock_connect(connection, at)
    except BaseException:
        connection.close()
        raise
    return connection
