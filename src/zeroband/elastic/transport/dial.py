"""Dialling other nodes: a connection to the node's port, and the mutually authenticated handshake.

A node that cannot be dialled is reached through a relay, another member that copies bytes. The handshake runs end to
end, so the relay sees only encrypted data. If their NATs permit it, the two ends bypass the relay by hole punching.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.membership.reach import DialRoute, DialRoutes
from zeroband.elastic.transport.descriptors import with_descriptors
from zeroband.elastic.transport.handshake import ANSWER_BYTES, STORE, Caller, Introduction, Purpose, StreamKeys
from zeroband.elastic.transport.sealed import Connection, wrap
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

OBSERVED_BYTES = 64
"""Size of a relay's first message: host and port at which it sees the other end, zero-padded."""

_PUNCH_S = 1.0
_RETRY_AFTER_S = 600.0
"""Time before a failed member is tried again, since each try delays the caller."""
_REDIAL_S = 0.05
_MAX_REFUSALS = 5
"""Refusals after which the other end is assumed not to be dialling."""

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


async def _connect_to(family: int, at: Any, prepare: Prepare, own: Any = None) -> socket.socket:
    """Connect to an address. `own`: the local address to do it from; None: any."""
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        share_port(connection)
        prepare(connection)
        if own is not None:
            connection.bind(own)
        await asyncio.get_running_loop().sock_connect(connection, at)
    except BaseException:
        connection.close()
        raise
    return connection


# -- hole punching: simultaneous open, for two nodes that can only dial out ------------------------------------------
#
# A relay tells each end the public address at which it sees the other. Both then dial that address from the local port
# of their relay connection. A NAT that reuses a port's mapping accepts packets from an address that the inside has just
# dialled, and the two SYNs become one connection (RFC 9293, 3.5; RFC 5382 requires it of NATs). Behind a NAT with a new
# mapping per destination it fails, and the ends keep the relay.


def observed_address(connection: socket.socket) -> bytes:
    """Encode the address at which this end sees the other one, for a third. Raises OSError."""
    host, port, *_ = connection.getpeername()
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return f"{mapped or address} {port}".encode().ljust(OBSERVED_BYTES, b"\0")


def _address_in(observed: bytes) -> tuple[str, int]:
    """Decode an observed address. Raises ValueError."""
    host, _, port = observed.rstrip(b"\0").decode("ascii").partition(" ")
    if not 0 < int(port) < 1 << 16:
        raise ValueError(f"no port: {port}")
    return str(ipaddress.ip_address(host)), int(port)


_failed_until_s: dict[str, float] = {}
"""Members with a failed try, and when to try again. Per process; any thread."""


def may_punch(member: str) -> bool:
    """Whether to try hole punching with a member."""
    return time.monotonic() >= _failed_until_s.get(member, 0.0)


def note_outcome(member: str, *, is_punched: bool) -> None:
    """Record the outcome of a try."""
    now_s = time.monotonic()
    for other in [m for m, until_s in _failed_until_s.copy().items() if until_s < now_s]:
        _failed_until_s.pop(other, None)
    if is_punched:
        _failed_until_s.pop(member, None)
    else:
        _failed_until_s[member] = now_s + _RETRY_AFTER_S


async def punch(own: Any, observed: bytes, prepare: Callable[[socket.socket], None]) -> socket.socket | None:
    """Connect directly to the other end of a relayed connection, which does the same now; None: a NAT prevents it.

    `own`: local address of the relayed connection. `observed`: the other end's address as seen by the relay. `prepare`:
    sets socket options before connecting.
    """
    with contextlib.suppress(OSError, ValueError, TimeoutError):
        other, refused = _address_in(observed), 0
        family = socket.AF_INET6 if ":" in own[0] else socket.AF_INET
        async with asyncio.timeout(_PUNCH_S):
            while refused < _MAX_REFUSALS:
                try:
                    return await _connect_to(family, other, prepare, own)
                except ConnectionRefusedError:
                    refused += 1
                    await asyncio.sleep(_REDIAL_S)
    return None


def share_port(connection: socket.socket) -> None:
    """Allow further connections from the same local port; all must set this before they bind."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


# -- encrypted connections ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dialler:
    """Connects to other nodes as this member, to fetch their state."""

    key: RunKey
    caller: str
    is_sealed: bool

    def dial(self, callee: str, routes: DialRoutes, within_s: float) -> Connection:
        """Connect to a member and complete the handshake. `within_s`: time-out per route.

        Raises the last route's OSError, and HandshakeFailed if the other end hangs up or is not of this run.
        """
        asked = Introduction(self.caller, callee, "", self.is_sealed, Purpose.STATE)

        async def call() -> DialledConnection:
            async with asyncio.timeout(within_s * max(1, len(routes))):
                return await dial_member(self.key, asked, routes)

        try:
            called = run_blocking(call())
        except (EOFError, ConnectionResetError) as error:
            reason = "it hung up on the handshake: are run.token and comm.encryption the same on both nodes?"
            raise HandshakeFailed(reason) from error
        called.connection.setblocking(True)
        return wrap(called.connection, called.keys)


def dial_store(key: RunKey, address: Address, *, within_s: float) -> Connection:
    """Connect to a node's store, always encrypted. `within_s`: time-out of each wait.

    Raises OSError, TimeoutError, and HandshakeFailed if the other end hangs up or is not of this run.
    """
    connection = socket.create_connection(address, within_s)
    try:
        keep_alive(connection)
        # The token alone authenticates here: a store runs before its node has a member id, and its records are signed.
        caller = Caller(replace(key, node=None), Introduction("", STORE, "", is_sealed=True, purpose=Purpose.STORE))
        connection.sendall(caller.hello)
        proof, keys = caller.take(_read_answer(connection))
        connection.sendall(proof)
    except BaseException:
        connection.close()
        raise
    return wrap(connection, keys)


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
