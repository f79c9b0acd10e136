"""Calling another node: a connection to its port, and the handshake that makes both ends sure of each other.

A node that cannot be dialled is called through another member, the relay, which passes the call on. The handshake runs
inside, from end to end: what the relay copies is sealed. Where NATs let them, the two ends meet without it (`meeting`).
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
from zeroband.elastic.transport.hole_punching import SIGHT_BYTES, may_meet, meet, note_met, share_port
from zeroband.errors import HandshakeFailed

_T = TypeVar("_T")

Address = tuple[str, int]

_OF_LOOP = 3
"""Descriptors of an event loop: its selector and the two ends that wake it."""
_ANSWER_S = 5.0
_MET_S = 2.0
_NEXT_WAY_S = 0.5
"""Pause after one way before the next one is tried in parallel."""
_REACH_S, _STAYS_S = 2.0, 1.0
_KEEP_ALIVE_S, _KEEP_ALIVE_AGAIN_S, _KEEP_ALIVES = 30, 10, 3
"""Often enough for routers that forget a connection on which nothing moves for a minute or more."""

SILENT_S = float(_KEEP_ALIVE_S + _KEEP_ALIVES * _KEEP_ALIVE_AGAIN_S)
"""Longest silence of a connection whose other end should answer."""

Prepare = Callable[[socket.socket], None]


@dataclass(frozen=True)
class Called:
    """A connection whose other end is who it should be; it is the caller's to close."""

    connection: socket.socket
    keys: StreamKeys
    way: DialRoute
    """How it came about."""
    is_met: bool = False
    """The two ends have dialled one another at once, as a relay had told them: nothing passes there."""


def run_here(calling: Coroutine[Any, Any, _T], *, is_aborted: Callable[[], bool] = lambda: False) -> _T:
    """Call, and wait for the result; also in a thread that has an event loop at work, as a notebook's has.

    `is_aborted`: asked while there are no descriptors for it. Raises OSError where there are none for too long.
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
    """An event loop. Raises OSError where there are no descriptors for it, before half of it is made."""
    with contextlib.ExitStack() as stack:  # asyncio leaks what it has when it finds no descriptor half-way
        for _ in range(_OF_LOOP):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
    return asyncio.new_event_loop()


def keep_alive(connection: socket.socket) -> None:
    """Send small pieces at once, and notice where the other end is gone without a word."""
    wanted = [
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEP_ALIVE_AGAIN_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEP_ALIVES),
    ]
    for level, option, value in wanted:
        with contextlib.suppress(OSError):  # a machine may lack or refuse it
            connection.setsockopt(level, option, value)


async def reach(
    key: RunKey, introduction: Introduction, ways: Sequence[DialRoute], prepare: Prepare = keep_alive
) -> Called:
    """Call a member on the first way that leads there; each has a moment before the next one is tried in parallel.

    `prepare`: sets options before it connects. Raises the last way's OSError, EOFError, TimeoutError, HandshakeFailed.
    """
    left, trying = [*ways], set[asyncio.Task[Called]]()
    problem: BaseException = OSError(f"{introduction.callee} can only dial out, and no node relays calls to it")
    try:
        while left or trying:
            if left:
                trying.add(asyncio.create_task(_try(key, introduction, left.pop(0), prepare)))
            limit_s = _NEXT_WAY_S if left else None
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
            if isinstance(outcome, Called):
                outcome.connection.close()


async def _try(key: RunKey, introduction: Introduction, way: DialRoute, prepare: Prepare) -> Called:
    if not way.relay:
        return Called(*await call(key, introduction, way.address, prepare), way)
    asked = Introduction(introduction.caller, way.relay, introduction.callee, introduction.is_sealed, Purpose.RELAY)
    relayed, _ = await call(key, asked, way.address, prepare)
    with contextlib.ExitStack() as otherwise:
        otherwise.callback(relayed.close)
        sight = await read_sight(relayed)
        if introduction.purpose != Purpose.PROBE and may_meet(introduction.callee):
            met = await meet(relayed.getsockname(), sight, prepare)
            with contextlib.suppress(OSError, EOFError, TimeoutError, HandshakeFailed):  # the other end may not have it
                if met is not None:
                    keys = await _introduce(key, introduction, met, _MET_S)
                    note_met(introduction.callee, is_met=True)
                    return Called(met, keys, way, is_met=True)
            note_met(introduction.callee, is_met=False)
        keys = await _introduce(key, introduction, relayed)
        otherwise.pop_all()
    return Called(relayed, keys, way)


async def read_sight(relayed: socket.socket) -> bytes:
    """What a relay says first. Raises OSError, EOFError, TimeoutError."""
    async with asyncio.timeout(_ANSWER_S):
        return await read_exactly(relayed, SIGHT_BYTES)


async def call(
    key: RunKey, introduction: Introduction, address: Address, prepare: Prepare = keep_alive
) -> tuple[socket.socket, StreamKeys]:
    """A connection to the member that listens at an address, and its keys; errors as those of `reach`."""
    async with asyncio.timeout(_ANSWER_S):
        connection = await _connect(address, prepare)
        return connection, await _introduce(key, introduction, connection)


async def _introduce(
    key: RunKey, introduction: Introduction, connection: socket.socket, within_s: float = _ANSWER_S
) -> StreamKeys:
    """The caller's part of the handshake. Closes the connection where it fails."""
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


async def readable(connection: socket.socket) -> None:
    """Wait until something came; unlike a read, this may be given up at any moment without losing it."""
    loop, came = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
    loop.add_reader(connection, lambda: came.done() or came.set_result(None))
    try:
        await came
    finally:
        loop.remove_reader(connection)


async def read_exactly(connection: socket.socket, size: int) -> bytes:
    """Raises EOFError when the connection ends before."""
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < size:
        part = await loop.sock_recv(connection, size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


async def _connect(address: Address, prepare: Prepare) -> socket.socket:
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
