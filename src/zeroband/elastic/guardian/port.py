"""The node's port: accepts all connections and dispatches them by their first bytes.

Runs in an event loop of the guardian, so that strangers do not slow the trainer. A caller that does not state its
purpose or fails the handshake is disconnected after seconds and a few hundred bytes.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path

from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.transport.descriptors import ShortageLog
from zeroband.elastic.transport.dial import read_exactly, readable
from zeroband.elastic.transport.handover import HandedOver
from zeroband.elastic.transport.handshake import HELLO_BYTES, MAC_BYTES, PROOF_BYTES, Callee
from zeroband.errors import ConfigError, HandshakeFailed

CALL_BYTES = 4
"""Number of bytes that state the purpose of a connection."""

_MOST_STRANGERS = 64
_MOST_CALLERS = 512
"""Limit of callers with the run's key in their handshake: 63 nodes dial 504 streams at once."""
_MOST_HEARD = 1 << 16
_TIMEOUT_S = 5.0
_PEEK_S = 0.02
_PAUSE_S = 0.2
"""Pause after a failed accept."""

Answer = Callable[[socket.socket], Awaitable[None]]
"""Answers a connection whose first bytes were peeked at but not read."""


_on_shown: ContextVar[Callable[[bool], None]] = ContextVar("on_shown", default=lambda is_proven: None)
"""Called by the task that answers a connection: with False when the caller has shown the run's key, with True when the
handshake is complete."""

_Crowd = dict[asyncio.Task[None], str]
"""Tasks of incoming connections, oldest first, with the callers' addresses."""


class SeenCalls:
    """First messages of handshakes, each valid once, so that a stranger cannot replay a recorded one."""

    def __init__(self) -> None:
        self._proofs: OrderedDict[bytes, None] = OrderedDict()

    def is_new(self, hello: bytes) -> bool:
        """Whether a first message is new, and remember it. Only for authenticated ones, which bounds the memory."""
        proof = hello[-MAC_BYTES:]
        if proof in self._proofs:
            return False
        self._proofs[proof] = None
        if len(self._proofs) > _MOST_HEARD:
            self._proofs.popitem(last=False)
        return True


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    """Return the error for a port that cannot be opened."""
    match error.errno:
        case errno.EADDRINUSE:
            what, way_out = (
                "is taken: another process of this machine listens",
                "end that one, or set another node.port",
            )
        case errno.EACCES:
            what, way_out = "needs rights that this user lacks", "set node.port to 1024 or more"
        case _:
            what, way_out = f"cannot be listened on ({error.strerror or error})", "check node.bind_host"
    return ConfigError(f"node.port={port} {what} (address {host}); {way_out}")


class Port:
    """Listens after `open`, or receives connections from another process after `take_from`. Belongs to one event loop.

    `answers`: by the first CALL_BYTES of a connection.
    """

    def __init__(self, answers: Mapping[bytes, Answer]) -> None:
        self._answers = answers
        self._strangers: _Crowd = {}
        self._callers: _Crowd = {}
        self._busy: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._shortage_log = ShortageLog()

    @property
    def strangers(self) -> int:
        """Number of connections that have not shown the run's key."""
        return len(self._strangers)

    @property
    def callers(self) -> int:
        """Number of connections that have, and are in their handshake."""
        return len(self._callers)

    @property
    def tasks(self) -> int:
        """Number of tasks: one per open connection, and the one that accepts."""
        return len(self._busy)

    def open(self, host: str, port: int) -> int:
        """Listen and return the port; 0: any free one. "::" includes IPv4. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        self._listener = socket.create_server((host, port), family=family, backlog=256, dualstack_ipv6=is_dual)
        self._listener.setblocking(False)
        task = asyncio.get_running_loop().create_task(self._accept(self._listener))
        self._keep(task)
        return int(self._listener.getsockname()[1])

    def take_from(self, holder: Path) -> None:
        """Receive the connections that another process hands over at its Unix socket; reconnect if it restarts."""
        self._keep(asyncio.get_running_loop().create_task(self._receive_handovers(holder)))

    async def _receive_handovers(self, holder: Path) -> None:
        while True:
            with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
                end.setblocking(False)
                await asyncio.get_running_loop().sock_connect(end, str(holder))
                while self._admit_handed(end):
                    await readable(end)
            await asyncio.sleep(_PAUSE_S)

    def _admit_handed(self, end: socket.socket) -> bool:
        """Admit all connections handed over so far. False: the other process has ended."""
        while True:
            try:
                message, descriptors, _, _ = socket.recv_fds(end, 1, 1)
            except BlockingIOError:
                return True
            if not message:
                return False
            for connection in (socket.socket(fileno=descriptor) for descriptor in descriptors):
                try:
                    host = connection.getpeername()[0]
                except OSError:  # the caller is gone
                    connection.close()
                else:
                    self._admit(connection, host, self._strangers, _MOST_STRANGERS)

    def close(self) -> None:
        """Stop listening and close the connections that were not handed over."""
        for task in [*self._busy]:
            task.cancel()
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)  # a pending accept would use a closed socket
            self._listener.close()
            self._listener = None

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._busy.add(task)
        task.add_done_callback(self._busy.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, (host, *_) = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors, or the caller is gone already
                self._shortage_log.warn("a connection of another node cannot be taken", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            self._admit(connection, host, self._strangers, _MOST_STRANGERS)
            await asyncio.sleep(0)  # a caller that has stated its purpose is served before the next is accepted

    def take(self, connection: socket.socket, relay: str) -> None:
        """Admit a relayed call like one that arrived at the port."""
        self._admit(connection, relay, self._callers, _MOST_CALLERS)

    def _admit(self, connection: socket.socket, host: str, crowd: _Crowd, most: int) -> None:
        connection.setblocking(False)
        task = asyncio.get_running_loop().create_task(self._receive(connection))
        task.add_done_callback(partial(self._hang_up, connection))  # also if it is cancelled before it starts
        _admit(task, host, crowd, most)
        self._keep(task)

    def _hang_up(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._strangers.pop(task, None)
        self._callers.pop(task, None)
        connection.close()

    def _know(self, task: asyncio.Task[None], is_proven: bool) -> None:
        """Move a connection from strangers to callers, then out of both, so that a crowd cannot evict it."""
        host = self._strangers.pop(task, None)
        if is_proven:
            self._callers.pop(task, None)
        elif host is not None:
            _admit(task, host, self._callers, _MOST_CALLERS)

    async def _receive(self, connection: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                call = await _peek(connection)
            answer = self._answers.get(call)
            if answer is None or (task not in self._strangers and task not in self._callers):
                return
            _on_shown.set(partial(self._know, task))
            await answer(connection)
        except (OSError, TimeoutError, EOFError, HandshakeFailed):
            pass  # no member waits for an answer


def _admit(task: asyncio.Task[None], host: str, crowd: _Crowd, most: int) -> None:
    """Admit a connection; above the limit evict the oldest one of the address with the most connections."""
    while len(crowd) >= most:
        most_of, _ = Counter(crowd.values()).most_common(1)[0]
        oldest = next(other for other, from_host in crowd.items() if from_host == most_of)
        crowd.pop(oldest)
        oldest.cancel()
    crowd[task] = host


async def _peek(connection: socket.socket) -> bytes:
    """Return the first bytes without reading them. Raises EOFError."""
    seen = 0
    while True:
        try:
            call = connection.recv(CALL_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            await readable(connection)
            continue
        if len(call) == CALL_BYTES:
            return call
        if not call:
            raise EOFError
        if len(call) == seen:  # the socket stays readable, so epoll returns at once
            await asyncio.sleep(_PEEK_S)
        seen = len(call)


async def shake_hands(
    connection: socket.socket,
    key: RunKey,
    *,
    callee: str,
    is_sealed: bool,
    heard: SeenCalls | None = None,
    bans: Callable[[str], bool] = lambda name: False,
) -> HandedOver:
    """Answer another node's handshake. Raises HandshakeFailed, OSError, EOFError, TimeoutError.

    `bans`: whether the key in a name is banned.
    """
    async with asyncio.timeout(_TIMEOUT_S):
        hello = await read_exactly(connection, HELLO_BYTES)
        called = Callee(key, hello)
        if heard is not None and not heard.is_new(hello):
            raise HandshakeFailed("a call was repeated by somebody who did not make it")
        _on_shown.get()(False)  # not proven yet: a recorded first message gets this far, once
        asked = called.introduction
        if bans(asked.caller):
            raise HandshakeFailed(f"a call of {asked.caller}, whose key is banned from the run")
        if asked.callee != callee:
            raise HandshakeFailed(f"a call to {asked.callee}, which this node is not any more")
        if asked.is_sealed != is_sealed:
            raise HandshakeFailed("one end wants the connection sealed and the other does not")
        await asyncio.get_running_loop().sock_sendall(connection, called.answer)
        keys = called.take(await read_exactly(connection, PROOF_BYTES))
        _on_shown.get()(True)
    return HandedOver(asked.purpose.value, asked.caller, asked.session, keys)
