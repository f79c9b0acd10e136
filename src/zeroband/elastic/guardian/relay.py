"""Relays calls to members that cannot be dialled: caller and callee both dial this node, which copies bytes.

Both ends have proven that they belong to the run, and the callee keeps a line open to this node: the connection of its
probes. The relay sees their handshake and encrypted data only. Runs in the event loop of the guardian's port.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Awaitable, Callable

from zeroband.elastic.transport.dial import keep_alive, observed_address
from zeroband.elastic.transport.handshake import new_session

MAX_RELAYED = 256
"""Limit of relayed connections."""

MAX_PER_PAIR = 64
"""Limit of those between the same two members."""

_BUFFER_BYTES = 1 << 16
"""Buffer for each direction of a connection."""
_ANSWERED_S = 5.0
_LINGER_S = 30.0
"""Time for the other direction after one end has closed its own."""

Ring = Callable[[bytes], Awaitable[None]]
"""Sends the number of a call to a member over its line."""


class Relay:
    """Calls that this node relays. All methods belong to one event loop."""

    def __init__(self) -> None:
        self._rings: dict[str, Ring] = {}
        self._waiting: dict[str, tuple[str, asyncio.Future[_Answered]]] = {}
        self._pairs: Counter[frozenset[str]] = Counter()

    @property
    def connections(self) -> int:
        """Number of connections that are relayed now."""
        return self._pairs.total()

    def open_line(self, member: str, ring: Ring) -> None:
        """Relay calls to a member from now on; a later line replaces an earlier one."""
        self._rings[member] = ring

    def close_line(self, member: str, ring: Ring) -> None:
        """Stop relaying calls to a member, unless there is a later line."""
        if self._rings.get(member) is ring:
            del self._rings[member]

    async def connect(self, connection: socket.socket, caller: str, member: str) -> None:
        """Relay a call to a member until both ends close it; returns at once if that is impossible.

        Raises OSError, TimeoutError.
        """
        ring, pair = self._rings.get(member), frozenset((caller, member))
        if ring is None or self._pairs.total() >= MAX_RELAYED or self._pairs[pair] >= MAX_PER_PAIR:
            return
        self._pairs[pair] += 1
        try:
            answered = await self._await_answer(member, ring)
            try:
                await self._join(connection, answered.connection)
            finally:
                answered.is_over.set()
        finally:
            self._pairs[pair] -= 1

    async def _await_answer(self, member: str, ring: Ring) -> _Answered:
        number, answered = new_session(), asyncio.get_running_loop().create_future()
        self._waiting[number] = member, answered
        try:
            async with asyncio.timeout(_ANSWERED_S):
                await ring(bytes.fromhex(number))
                return await answered
        finally:
            del self._waiting[number]

    async def take_answer(self, connection: socket.socket, member: str, number: str) -> None:
        """Take a member's answer to a call; returns when the call is over, or at once if there is none for it."""
        called, answered = self._waiting.get(number, ("", None))
        if answered is None or called != member or answered.done():  # a number admits only the member that was called
            return
        answer = _Answered(connection)
        answered.set_result(answer)
        await answer.is_over.wait()

    async def _join(self, one: socket.socket, other: socket.socket) -> None:
        """Send each end the other's address for hole punching, then copy bytes both routes until both ends close."""
        loop = asyncio.get_running_loop()
        for end, far in ((one, other), (other, one)):
            keep_alive(end)
            await loop.sock_sendall(end, observed_address(far))
        copying = {asyncio.create_task(self._copy(one, other)), asyncio.create_task(self._copy(other, one))}
        try:
            done, left = await asyncio.wait(copying, return_when=asyncio.FIRST_COMPLETED)
            if left and all(task.exception() is None for task in done):
                await asyncio.wait(left, timeout=_LINGER_S)
        finally:
            for task in copying:
                task.cancel()
            await asyncio.gather(*copying, return_exceptions=True)

    async def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        """Copy one direction, no faster than the sink takes it. Raises OSError."""
        loop, buffer = asyncio.get_running_loop(), memoryview(bytearray(_BUFFER_BYTES))
        while size := await loop.sock_recv_into(source, buffer):
            await loop.sock_sendall(sink, buffer[:size])
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


class _Answered:
    """The connection of a member that answered a call, and an event for its end."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.is_over = asyncio.Event()
