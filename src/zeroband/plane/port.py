"""The node's one port: takes every connection, finds out what it wants, and hands it to whoever answers such calls.

Runs in an event loop of the guardian, so that strangers at the door cost the trainer nothing. Whoever does not say what
it wants, or cannot prove that it may, is shut out after seconds and a few hundred bytes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from zeroband.errors import HandshakeFailed
from zeroband.plane.handover import HandedOver
from zeroband.plane.handshake import HELLO_BYTES, PROOF_BYTES, Callee, RunKey

CALL_BYTES = 4
"""So many bytes tell what a connection is for."""

_MOST_STRANGERS = 64
_PATIENCE_S = 5.0
_PEEK_S = 0.02

Answer = Callable[[socket.socket], Awaitable[None]]
"""Takes over a connection whose first bytes were looked at and not taken."""


class Port:
    """Listens once `open` ran. All methods belong to one event loop.

    `answers`: by the first CALL_BYTES of a connection.
    """

    def __init__(self, answers: Mapping[bytes, Answer]) -> None:
        self._answers = answers
        self._strangers: dict[asyncio.Task[None], socket.socket] = {}
        self._busy: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None

    def open(self, host: str, port: int) -> int:
        """Listen; 0 takes a free port. Gives the port. "::" stands for IPv4 too. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        self._listener = socket.create_server((host, port), family=family, backlog=256, dualstack_ipv6=is_dual)
        self._listener.setblocking(False)
        task = asyncio.get_running_loop().create_task(self._accept(self._listener))
        self._keep(task)
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Stop listening and hang up on whoever was not handed over."""
        for task in [*self._busy]:
            task.cancel()
        if self._listener is not None:
            self._listener.close()

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._busy.add(task)
        task.add_done_callback(self._busy.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:  # too many open files, or it was gone before it was taken
                await asyncio.sleep(_PEEK_S)
                continue
            connection.setblocking(False)
            while len(self._strangers) >= _MOST_STRANGERS:
                oldest = next(iter(self._strangers))
                self._strangers.pop(oldest)
                oldest.cancel()
            task = loop.create_task(self._receive(connection))
            task.add_done_callback(partial(self._hang_up, connection))  # also if it is cancelled before it began
            self._strangers[task] = connection
            self._keep(task)

    def _hang_up(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._strangers.pop(task, None)
        connection.close()

    async def _receive(self, connection: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            async with asyncio.timeout(_PATIENCE_S):
                call = await _peek(connection)
            answer = self._answers.get(call)
            if answer is None or task not in self._strangers:
                return
            if call == PROBE_CALL:  # those last
                self._strangers.pop(task)
            await answer(connection)
        except (OSError, TimeoutError, EOFError, HandshakeFailed):
            pass  # nobody that this node has to tell


PROBE_CALL = b"zbp1"
"""A connection on which another guardian asks whether this one is there."""


async def _peek(connection: socket.socket) -> bytes:
    """The first bytes, which stay where they are. Raises EOFError when there will not be as many."""
    loop = asyncio.get_running_loop()
    seen = 0
    while True:
        try:
            call = connection.recv(CALL_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            readable = loop.create_future()
            loop.add_reader(connection, _set, readable)
            try:
                await readable
            finally:
                loop.remove_reader(connection)
            continue
        if len(call) == CALL_BYTES:
            return call
        if not call:
            raise EOFError
        if len(call) == seen:  # readable all the time, so epoll does not help
            await asyncio.sleep(_PEEK_S)
        seen = len(call)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def read_exactly(connection: socket.socket, size: int) -> bytes:
    """Raises EOFError when the connection ends before."""
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < size:
        part = await loop.sock_recv(connection, size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


async def shake_hands(connection: socket.socket, key: RunKey, *, callee: str, is_sealed: bool) -> HandedOver:
    """Answer the call of another node. Raises HandshakeFailed, OSError, EOFError, TimeoutError."""
    async with asyncio.timeout(_PATIENCE_S):
        called = Callee(key, await read_exactly(connection, HELLO_BYTES))
        asked = called.introduction
        if asked.callee != callee:
            raise HandshakeFailed(f"a call to {asked.callee}, which this node is not any more")
        if asked.is_sealed != is_sealed:
            raise HandshakeFailed("one end wants the connection sealed and the other does not")
        await asyncio.get_running_loop().sock_sendall(connection, called.answer)
        keys = called.take(await read_exactly(connection, PROOF_BYTES))
    return HandedOver(asked.purpose.value, asked.caller, asked.session, keys)
