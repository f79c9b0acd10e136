"""Passing connections from the guardian, which owns the port, to the trainer, which serves them.

Over a pair of Unix sockets; each message has one connection's descriptor and the result of its handshake.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from zeroband.elastic.transport.descriptors import ShortageLog
from zeroband.elastic.transport.handshake import NO_KEYS, StreamKeys

_MESSAGE_BYTES = 4096

POSES = "poses"
"""Kind of a connection whose caller lacks the key of the member that it claims to be. It is passed on to be recorded
and closed; `session` is its remote address. No caller can request this kind."""


@dataclass(frozen=True)
class HandedOver:
    """Result of a connection's handshake. `kind`: a `Purpose`; unknown ones are closed."""

    kind: str
    caller: str = ""
    session: str = ""
    keys: StreamKeys = NO_KEYS

    def to_bytes(self) -> bytes:
        seal, open_ = ("" if key is None else key.hex() for key in (self.keys.seal, self.keys.open))
        return json.dumps([self.kind, self.caller, self.session, seal, open_]).encode()

    @staticmethod
    def of(message: bytes) -> HandedOver:
        kind, caller, session, seal, open_ = json.loads(message)
        return HandedOver(kind, caller, session, StreamKeys(bytes.fromhex(seal) or None, bytes.fromhex(open_) or None))


def channel() -> tuple[socket.socket, socket.socket]:
    """Return the guardian's and the trainer's end."""
    guardian, trainer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    guardian.setblocking(False)
    return guardian, trainer


def hand_over(end: socket.socket, connection: socket.socket, what: HandedOver) -> bool:
    """Pass a connection on; False: the trainer is busy or gone. The caller's copy of the descriptor stays open."""
    try:
        socket.send_fds(end, [what.to_bytes()], [connection.fileno()])
    except (BlockingIOError, BrokenPipeError, ConnectionResetError):
        return False
    return True


class Inbox:
    """The trainer's end: a thread that receives connections from this node's guardians.

    `takers`: by kind; called in the inbox's thread with a connected socket, which they then own.
    """

    def __init__(self, takers: Mapping[str, Callable[[socket.socket, HandedOver], object]]) -> None:
        self._takers = dict(takers)
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._shortage_log = ShortageLog()
        self._lock = threading.Lock()
        self._new: list[socket.socket] = []
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="inbox", daemon=True)
        self._thread.start()

    def route(self, kind: str, taker: Callable[[socket.socket, HandedOver], object]) -> None:
        """Register a taker for another kind. Any thread."""
        self._takers[kind] = taker

    def attach(self, end: socket.socket) -> None:
        """Receive from another channel until its other end is closed. Any thread."""
        with self._lock:
            self._new.append(end)
        self._wake_write.send(b"\0")

    def close(self) -> None:
        self._is_over = True
        with contextlib.suppress(OSError):  # the thread may have ended already
            self._wake_write.send(b"\0")
        self._thread.join(timeout=5)
        self._wake_write.close()

    def _run(self) -> None:
        while not self._is_over:
            for key, _ in self._selector.select():
                if key.fileobj is self._wake_read:
                    self._wake_read.recv(64)
                elif isinstance(key.fileobj, socket.socket):
                    self._take(key.fileobj)
            with self._lock:
                new, self._new = self._new, []
            for end in new:
                self._selector.register(end, selectors.EVENT_READ)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    def _take(self, end: socket.socket) -> None:
        try:
            message, descriptors, _, _ = socket.recv_fds(end, _MESSAGE_BYTES, 1)
        except OSError:
            message, descriptors = b"", []
        if not message:
            self._selector.unregister(end)
            end.close()
            return
        what = HandedOver.of(message)
        if not descriptors:  # the kernel drops descriptors beyond this process's limit
            self._shortage_log.warn(f"a connection of {what.caller} cannot be taken")
        for descriptor in descriptors:
            connection = socket.socket(fileno=descriptor)
            taker = self._takers.get(what.kind)
            if taker is None:
                connection.close()
                continue
            try:
                taker(connection, what)
            except OSError:  # already disconnected
                connection.close()
