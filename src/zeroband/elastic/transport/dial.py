"""Dialling other nodes: a connection to the node's port, and the mutually authenticated handshake.

A node that cannot be dialled is reached through a relay, another member that copies bytes. The handshake runs end to
end, so the relay sees only encrypted data. If their NATs permit it, the two ends bypass the relay (`hole_punching`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.membership.reach import DialRoute
from zeroband.elastic.transport.descriptors import with_descriptors
from zeroband.elastic.transport.handshake import ANSWER_BYTES, Caller, Introduction, Purpose, StreamKeys
from zeroband.elastic.transport.hole_punching import OBSERVED_BYTES, may_punch, note_outcome, punch, share_port
from zeroband.errors import HandshakeFailed

_T = TypeVar("_T")

Address = tuple[str, int]

_LOOP_DESCRIPTORS = 3
"""Descriptors of an event loop: its selector and the socket pair that wakes it."""
_ANSWER_S = 5.0
_PUNCHED_S = 2.0
_NEXT_ROUTE_S = 0.5
"""Delay before the next route is tried in parallel."""
_REACH_S, _STAYS_S = 2.0, 1.0
_KEEP_ALIVE_S, _KEEP_ALIVE_AGAIN_S, _KEEP_ALIVES = 30, 10, 3
"""Frequent enough for routers that drop connections after a minute without traffic."""

SILENT_S = float(_KEEP_ALIVE_S + _KEEP_ALIVES * _KEEP_ALIVE_AGAIN_S)
"""Longest silence of a connection before keep-alive ends it."""

Prepare = Callable[[socket.socket], None]


@dataclass(frozen=True)
class DialledConnection:
    """An authenticated connection, owned by the caller."""

    connection: socket.socket
    keys: StreamKeys
    route: DialRoute
    """Route that succeeded."""
    is_punched: bool = False
    """Hole punching succeeded: the connection bypasses the relay."""


def run_blocking(calling: Coroutine[Any, Any, _T], *, is_aborted: Callable[[], bool] = lambda: False) -> _T:
    """Run a coroutine to completion, even in a thread with a running event loop, such as a notebook's.

    `is_aborted`: polled while no descriptors are free. Raises OSError if none become free in time.
    """

    def run() -> _T:
        try:
            loop = with_descriptors("no other node can be called", _new_loop, is_aborted=is_aborted)
        except BaseException:
            calling.close()
            raise
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            return runner.run(calling)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    with ThreadPoolExecutor(1, "zeroband-dial") as pool:
        return pool.submit(run).result()


def _new_loop() -> asyncio.AbstractEventLoop:
    """Make an event loop. Raises OSError without enough free descriptors."""
    with contextlib.ExitStack() as stack:  # checked first, since asyncio leaks descriptors if it runs out half-way
        for _ in range(_LOOP_DESCRIPTORS):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
    return asyncio.new_event_loop()


def keep_alive(connection: socket.socket) -> None:
    """Enable TCP_NODELAY and keep-alive, which detects a peer that vanished silently."""
    wanted = [
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEP_ALIVE_AGAIN_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEP_ALIVES),
    ]
    for level, option, value in wanted:
        with contextlib.suppress(OSError):  # not every system supports all options
            connection.setsockopt(level, option, value)


async def dial_member(
    key: RunKey, introduction: Introduction, routes: Sequence[DialRoute], prepare: Prepare = keep_alive
) -> DialledConnection:
    """Connect to a member over the first route that works, trying them staggered in parallel (like Happy Eyeballs).

    `prepare`: sets socket options before connecting. Raises the last route's OSError, EOFError, TimeoutError or
    HandshakeFailed.
    """
    left, trying = [*routes], set[asyncio.Task[DialledConnection]]()
    problem: BaseException = OSError(f"{introduction.callee} can only dial out, and no node relays calls to it")
    try:
        while left or trying:
            if left:
                trying.add(asyncio.create_task(_try(key, introduction, left.pop(0), prepare)))
            limit_s = _NEXT_ROUTE_S if left else None
            done, _ = await asyncio.wait(trying, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            trying -= done
            came = [task for task in done if task.exception() is None]
            for other in came[1:]:
                other.result().connection.close()
            if came:
                return came[0].result()
            problem = next((error for task in done if (error := task.exception()) is not None), problem)
        raise problem
    finally:
        for task in trying:
            task.cancel()
        for outcome in await asyncio.gather(*trying, return_exceptions=True):
            if isinstance(outcome, DialledConnection):
                outcome.connection.close()


async def _try(key: RunKey, introduction: Introduction, route: DialRoute, prepare: Prepare) -> DialledConnection:
    if not route.relay:
        return DialledConnection(*await call(key, introduction, route.address, prepare), route)
    asked = Introduction(introduction.caller, route.relay, introduction.callee, introduction.is_sealed, Purpose.RELAY)
    relayed, _ = await call(key, asked, route.address, prepare)
    with contextlib.ExitStack() as otherwise:
        otherwise.callback(relayed.close)
        observed = await read_observed_address(relayed)
        if introduction.purpose != Purpose.PROBE and may_punch(introduction.callee):
            met = await punch(relayed.getsockname(), observed, prepare)
            with contextlib.suppress(
                OSError, EOFError, TimeoutError, HandshakeFailed
            ):  # punching may have succeeded at this end only
                if met is not None:
                    keys = await _introduce(key, introduction, met, _PUNCHED_S)
                    note_outcome(introduction.callee, is_punched=True)
                    return DialledConnection(met, keys, route, is_punched=True)
            note_outcome(introduction.callee, is_punched=False)
        keys = await _introduce(key, introduction, relayed)
        otherwise.pop_all()
    return DialledConnection(relayed, keys, route)


async def read_observed_address(relayed: socket.socket) -> bytes:
    """Read a relay's first message: the other end's address. Raises OSError, EOFError, TimeoutError."""
    async with asyncio.timeout(_ANSWER_S):
        return await read_exactly(relayed, OBSERVED_BYTES)


async def call(
    key: RunKey, introduction: Introduction, address: Address, prepare: Prepare = keep_alive
) -> tuple[socket.socket, StreamKeys]:
    """Connect to the member that listens at an address; errors as for `dial_member`."""
    async with asyncio.timeout(_ANSWER_S):
        connection = await _connect(address, prepare)
        return connection, await _introduce(key, introduction, connection)


async def _introduce(
    key: RunKey, introduction: Introduction, connection: socket.socket, within_s: float = _ANSWER_S
) -> StreamKeys:
    """Do the caller's part of the handshake. Closes the connection on failure."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(within_s):
            caller = Caller(key, introduction)
            await loop.sock_sendall(connection, caller.hello)
            proof, keys = caller.take(await read_exactly(connection, ANSWER_BYTES))
            await loop.sock_sendall(connection, proof)
    except BaseException:
        connection.close()
        raise
    return keys


def is_listening(address: Address) -> bool:
    """Whether a program listens at an address, not only a port forwarder, which hangs up at once."""
    try:
        connection = socket.create_connection(address, timeout=_REACH_S)
    except OSError:
        return False
    with connection:
        connection.settimeout(_STAYS_S)
        try:
            return connection.recv(1) != b""
        except TimeoutError:  # it waits for our first message
            return True
        except OSError:
            return False


async def readable(connection: socket.socket) -> None:
    """Wait until data is readable; unlike a read, this may be cancelled without losing data."""
    loop, came = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
    loop.add_reader(connection, lambda: came.done() or came.set_result(None))
    try:
        await came
    finally:
        loop.remove_reader(connection)


async def read_exactly(connection: socket.socket, size: int) -> bytes:
    """Read this many bytes. Raises EOFError if the connection ends before."""
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < size:
        part = await loop.sock_recv(connection, size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


async def _connect(address: Address, prepare: Prepare) -> socket.socket:
    """Connect to the first of the host's addresses that accepts; each gets an equal share of the time-out.

    Raises the last one's OSError.
    """
    found = await asyncio.get_running_loop().getaddrinfo(*address, type=socket.SOCK_STREAM)
    problem = OSError(f"{address[0]} has no address")
    for family, _, _, _, at in found:
        try:
            async with asyncio.timeout(_ANSWER_S / len(found)):
                return await _connect_to(family, at, prepare)
        except OSError as error:  # also if this machine has no IPv6
            problem = error
    raise problem


async def _connect_to(family: int, at: Any, prepare: Prepare) -> socket.socket:
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        share_port(connection)
        prepare(connection)
        await asyncio.get_running_loop().sock_connect(connection, at)
    except BaseException:
        connection.close()
        raise
    return connection
