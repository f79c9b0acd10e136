"""A state server with a port of its own; in a run, the guardian has the port, shakes hands, and hands over."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import threading
from typing import Any

from zeroband.elastic.guardian.port import shake_hands
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.recovery.donors import Donor
from zeroband.elastic.recovery.serving import StateServer
from zeroband.elastic.transport.dial import Dialler
from zeroband.elastic.transport.handshake import StreamKeys
from zeroband.errors import HandshakeFailed

KEY = RunKey(b"k" * 32)
DIALLER = Dialler(KEY, "joiner", is_sealed=True)
WRONG_TOKEN = Dialler(RunKey(b"w" * 32), "joiner", is_sealed=True)


def shaken(connection: socket.socket, member_id: str, *, is_sealed: bool = True) -> StreamKeys:
    """Answer a call as this member's guardian does. Raises HandshakeFailed, OSError, EOFError, TimeoutError."""
    connection.setblocking(False)
    what = asyncio.run(shake_hands(connection, KEY, callee=member_id, is_sealed=is_sealed))
    assert (what.kind, what.caller) == ("state", "joiner")
    connection.setblocking(True)
    return what.keys


def ask(donor: Donor, path: str, dialler: Dialler = DIALLER) -> tuple[int, bytes]:
    """One request to a donor: status and body."""
    connection: Any = http.client.HTTPConnection(donor.host, donor.port)
    connection.sock = dialler.dial(donor.member_id, donor.routes, 5.0)
    connection.sock.settimeout(5.0)
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


class OpenServer(StateServer):
    """Listens on a free port of loopback until `close()`, as this member."""

    def __init__(self, member_id: str, *arguments: Any, is_sealed: bool = True, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._is_sealed = is_sealed
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.donor = Donor(member_id, "127.0.0.1", int(self._listener.getsockname()[1]))
        self._acceptor = threading.Thread(target=self._accept)
        self._acceptor.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                try:
                    self.take(connection, shaken(connection, self.donor.member_id, is_sealed=self._is_sealed))
                except (OSError, EOFError, TimeoutError, HandshakeFailed):
                    connection.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()
        super().close()
