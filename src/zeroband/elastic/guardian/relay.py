"""Passing calls on to members that cannot be dialled: caller and called both dial this node, which copies bytes.

Both ends have proven that they are of the run, and the one that is called keeps a line to this node: its probes. What
passes here is the handshake of the two ends and what they sealed. Runs in the loop of the guardian's port.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Awaitable, Callable

from zeroband.elastic.transport.dial import keep_alive
from zeroband.elastic.transport.handshake import new_session
from zeroband.elastic.transport.hole_punching import observed_address

MOST_PASSED_ON = 256
"""Connections that pass here at one time."""

MOST_BETWEEN_TWO = 64
"""As many of them join the same two members."""

_PIECE_BYTES = 1 << 16
"""Most that is held of what one end sent and the other has not taken."""
_ANSWERED_S = 5.0
_LINGER_S = 30.0
"""After one end said that this was all, the other one has so long for its own last words."""

Ring = Callable[[bytes], Awaitable[None]]
"""Tells a member the number of a call, over its line."""


class Relay:
    """The calls that this node passes on. All methods belong to one event loop."""

    def __init__(self) -> None:
        self._rings: dict[str, Ring] = {}
        self._waiting: dict[str, tuple[str, asyncio.Future[_Answered]]] = {}
        self._pairs: Counter[frozenset[str]] = Counter()
        self.passed_bytes = 0
        """Count of the bytes that went through here, in both directions."""

    @property
    def passed_on(self) -> int:
        """Connections that pass here now."""
        return self._pairs.total()

    def open_line(self, member: str, ring: Ring) -> None:
        """Take calls for a member from now on; a later line takes the place of an earlier one."""
        self._rings[member] = ring

    def close_line(self, member: str, ring: Ring) -> None:
        """Take none any more, unless there is a later line."""
        if self._rings.get(member) is ring:
            del self._rings[member]

    async def pass_on(self, connection: socket.socket, caller: str, member: str) -> None:
        """Join a caller with a member, for as long as both want; returns at once where that cannot be.

        Raises OSError, TimeoutError.
        """
        ring, pair = self._rings.get(member), frozenset((caller, member))
        if ring is None or self._pairs.total() >= MOST_PASSED_ON or self._pairs[pair] >= MOST_BETWEEN_TWO:
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
        """A member takes a call; returns when that is over, or at once where there is none for it."""
        called, answered = self._waiting.get(number, ("", None))
        if answered is None or called != member or answered.done():  # a leaked number lets no other member in
            return
        answer = _Answered(connection)
        answered.set_result(answer)
        await answer.is_over.wait()

    async def _join(self, one: socket.socket, other: socket.socket) -> None:
        """Tell each end where the other one is; then copy bytes both ways until both have said that this was all.

        Also over when one of them is gone.
        """
        loop = asyncio.get_running_loop()
        for end, far in ((one, other), (other, one)):
            keep_alive(end)
            await loop.sock_sendall(end, observed_address(far))
        pouring = {asyncio.create_task(self._pour(one, other)), asyncio.create_task(self._pour(other, one))}
        try:
            done, left = await asyncio.wait(pouring, return_when=asyncio.FIRST_COMPLETED)
            if left and all(task.exception() is None for task in done):
                await asyncio.wait(left, timeout=_LINGER_S)
        finally:
            for task in pouring:
                task.cancel()
            await asyncio.gather(*pouring, return_exceptions=True)

    async def _pour(self, source: socket.socket, sink: socket.socket) -> None:
        """Take no more from one end than the other one takes. Raises OSError."""
        loop, room = asyncio.get_running_loop(), memoryview(bytearray(_PIECE_BYTES))
        while came := await loop.sock_recv_into(source, room):
            await loop.sock_sendall(sink, room[:came])
            self.passed_bytes += came
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


class _Answered:
    """The connection of a member that takes a call, and whether it is needed no longer."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.is_over = asyncio.Event()
