"""A way to a server on loopback that may be long, speak TLS, and damage what goes over it."""

from __future__ import annotations

import contextlib
import enum
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_JOIN_DEADLINE_S = 20.0


class Wound(enum.StrEnum):
    """What happens to one byte."""

    DROP = "drop"
    INSERT = "insert"
    CHANGE = "change"
    CUT = "cut"
    """The connection ends before it."""


@dataclass
class Damage:
    """What is to happen, once, to the byte at this place of what one end says in one go."""

    wound: Wound
    at: int
    of: str = "server"
    """The end whose words are damaged: server or client."""
    done: bool = False
    byte: bytes = b"7"
    """What is put in, or takes the place of another byte."""

    def apply(self, speaker: str, said: int, data: bytes) -> tuple[bytes, bool]:
        """What is passed on of `data`, before which `said` bytes went; and whether the connection ends after it."""
        at = self.at - said
        if self.done or speaker != self.of or not 0 <= at < len(data):
            return data, False
        self.done = True
        before, after = data[:at], data[at:]
        match self.wound:
            case Wound.DROP:
                return before + after[1:], False
            case Wound.INSERT:
                return before + self.byte + after, False
            case Wound.CHANGE:
                return before + self.byte + after[1:], False
            case Wound.CUT:
                return before, True


@dataclass
class _Turn:
    """Who speaks, and what was said since the other end spoke."""

    speaker: str = "server"
    said: bytes = b""


class Relay:
    """Takes connections on `port` and passes on what is said over them; counts how often a client had to ask.

    `delay_s`: of each part, each way. `tls`: what clients have to speak; the server is spoken to in the clear.
    """

    def __init__(self, target_port: int, *, delay_s: float = 0.0, tls: ssl.SSLContext | None = None) -> None:
        self.requests = 0
        """Turns from listening to speaking: what a client sends in one go counts once."""
        self.damage: Damage | None = None
        """Whoever sets it may do so at any time; the next bytes are concerned."""
        self.delay_s = delay_s
        self.heard = {"client": b"", "server": b""}
        """What each end said in its last turn, before any damage."""
        self._target_port, self._tls = target_port, tls
        self._sockets: list[socket.socket] = [socket.create_server(("127.0.0.1", 0))]
        self.port = self._sockets[0].getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def cut(self) -> None:
        """End all connections that are open."""
        for one in self._sockets[1:]:
            _shut(one)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._sockets[0].accept()
                self._sockets.append(client)
                self._begin(self._relay, client)

    def _begin(self, target: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments))
        self._threads[-1].start()

    def _relay(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if self._tls is not None:
                client = self._tls.wrap_socket(client, server_side=True, do_handshake_on_connect=False)
                self._sockets.append(client)
                if not _shakes_hands(client):
                    return
            server = socket.create_connection(("127.0.0.1", self._target_port))
            self._sockets.append(server)
            turn = _Turn()
            self._begin(self._pump, server, client, turn, "server")
            self._pump(client, server, turn, "client")

    def _pump(self, source: socket.socket, sink: socket.socket, turn: _Turn, name: str) -> None:
        is_cut = False
        with contextlib.suppress(OSError):
            while not is_cut and (data := source.recv(1 << 16)):
                if turn.speaker != name:
                    turn.speaker, turn.said = name, b""
                    self.requests += name == "client"
                said, turn.said = len(turn.said), turn.said + data
                self.heard[name] = turn.said
                time.sleep(self.delay_s)  # the way, not a wait for luck
                if self.damage is not None:
                    data, is_cut = self.damage.apply(name, said, data)
                sink.sendall(data)
        _shut(sink)
        if is_cut:
            _shut(source)

    def close(self) -> None:
        """End everything; what connects from now on is refused."""
        for one in tuple(self._sockets):
            _shut(one)
        for thread in tuple(self._threads):
            thread.join(_JOIN_DEADLINE_S)
        for one in self._sockets:
            one.close()


def _shakes_hands(server_side: ssl.SSLSocket) -> bool:
    """Whether TLS begins; where not, the client can still read why before the end."""
    try:
        server_side.do_handshake()
    except ssl.SSLError:
        socket.socket.shutdown(server_side, socket.SHUT_WR)
        return False
    return True


def _shut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
