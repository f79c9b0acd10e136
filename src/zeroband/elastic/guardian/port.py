"""The node's one port: takes every connection, finds out what it wants, and hands it to what answers such calls.

Runs in an event loop of the guardian, so that strangers at the port cost the trainer nothing. A caller that does not
say what it wants, or cannot prove that it may, is shut out after seconds and a few hundred bytes.
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
"""Number of bytes that tell what a connection is for."""

_MOST_STRANGERS = 64
_MOST_CALLERS = 512
"""Callers that have shown that they are of this run, and are in their handshake: 63 nodes dial 504 streams at once."""
_MOST_HEARD = 1 << 16
_TIMEOUT_S = 5.0
_PEEK_S = 0.02
_PAUSE_S = 0.2
"""Pause where no connection can be taken."""

Answer = Callable[[socket.socket], Awaitable[None]]
"""Takes over a connection whose first bytes were looked at and not taken."""


_on_shown: ContextVar[Callable[[bool], None]] = ContextVar("on_shown", default=lambda is_proven: None)
"""What the task that answers a connection calls when its other end has shown that it is of this run, with False, and
with True when it has proven it."""

_Crowd = dict[asyncio.Task[None], str]
"""The connections that are being received, the oldest first, each with the address that it comes from."""


class SeenCalls:
    """First messages of callers, each of which counts once: replaying a recorded one must not let a stranger in."""

    def __init__(self) -> None:
        self._proofs: OrderedDict[bytes, None] = OrderedDict()

    def is_new(self, hello: bytes) -> bool:
        """Whether a first message comes for the first time; from now on it does not.

        To be asked of messages of the run only, so that strangers cannot fill the memory.
        """
        proof = hello[-MAC_BYTES:]
        if proof in self._proofs:
            return False
        self._proofs[proof] = None
        if len(self._proofs) > _MOST_HEARD:
            self._proofs.popitem(last=False)
        return True


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    """Why a node's port cannot be opened, in the user's words."""
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
    """Listens once `open` ran, or takes what another process hands over, once `take_from` ran.

    All methods belong to one event loop.

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
        """Connections whose other end has not shown yet that it is of this run."""
        return len(self._strangers)

    @property
    def callers(self) -> int:
        """Connections whose other end has shown that, and is in its handshake."""
        return len(self._callers)

    @property
    def tasks(self) -> int:
        """All that runs for the port: one task for each connection that is not closed, and the one that listens."""
        return len(self._busy)

    def open(self, host: str, port: int) -> int:
        """Listen; 0 takes a free port. Gives the port. "::" stands for IPv4 too. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        self._listener = socket.create_server((host, port), family=family, backlog=256, dualstack_ipv6=is_dual)
        self._listener.setblocking(False)
        task = asyncio.get_running_loop().create_task(self._accept(self._listener))
        self._keep(task)
        return int(self._listener.getsockname()[1])

    def take_from(self, holder: Path) -> None:
        """Take the calls that another process hands over at its Unix socket; also where that is started again."""
        self._keep(asyncio.get_running_loop().create_task(self._take_over(holder)))

    async def _take_over(self, holder: Path) -> None:
        while True:
            with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
                end.setblocking(False)
                await asyncio.get_running_loop().sock_connect(end, str(holder))
                while self._take_handed(end):
                    await readable(end)
            await asyncio.sleep(_PAUSE_S)

    def _take_handed(self, end: socket.socket) -> bool:
        """Take all that was handed over by now. False: the other process has ended."""
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
        """Stop listening and hang up on the callers that were not handed over."""
        for task in [*self._busy]:
            task.cancel()
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)  # a call that is seen now would be taken no more
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
            except OSError as error:  # or it was gone before it was taken
                self._shortage_log.warn("a connection of another node cannot be taken", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            self._admit(connection, host, self._strangers, _MOST_STRANGERS)
            await asyncio.sleep(0)  # who has said already what it wants is heard before the next one comes in

    def take(self, connection: socket.socket, relay: str) -> None:
        """Receive a call that a member passed on as if it had come in here."""
        self._admit(connection, relay, self._callers, _MOST_CALLERS)

    def _admit(self, connection: socket.socket, host: str, crowd: _Crowd, most: int) -> None:
        connection.setblocking(False)
        task = asyncio.get_running_loop().create_task(self._receive(connection))
        task.add_done_callback(partial(self._hang_up, connection))  # also if it is cancelled before it began
        _admit(task, host, crowd, most)
        self._keep(task)

    def _hang_up(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._strangers.pop(task, None)
        self._callers.pop(task, None)
        connection.close()

    def _know(self, task: asyncio.Task[None], is_proven: bool) -> None:
        """Strangers no longer push this caller out; once it has proven who it is, no caller does."""
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
    """Take a connection into the crowd. Too many: the oldest goes of those from the address that has the most."""
    while len(crowd) >= most:
        most_of, _ = Counter(crowd.values()).most_common(1)[0]
        oldest = next(other for other, from_host in crowd.items() if from_host == most_of)
        crowd.pop(oldest)
        oldest.cancel()
    crowd[task] = host


async def _peek(connection: socket.socket) -> bytes:
    """The first bytes, which stay where they are. Raises EOFError when there will not be as many."""
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
        if len(call) == seen:  # readable all the time, so epoll does not help
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
    """Answer the call of another node. Raises HandshakeFailed, OSError, EOFError, TimeoutError.

    `bans`: whether the key that a name carries is kept out of the run.
    """
    async with asyncio.timeout(_TIMEOUT_S):
        hello = await read_exactly(connection, HELLO_BYTES)
        called = Callee(key, hello)
        if heard is not None and not heard.is_new(hello):
            raise HandshakeFailed("a call was repeated by somebody who did not make it")
        _on_shown.get()(False)  # a recorded first message comes to here once: such a caller is not proven yet
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
