"""The machines of one node: their launchers start the ranks together and end them together.

The first machine's launcher listens, and the others connect to it. They exchange lines of JSON. Each says once a second
that it lives, so a machine that loses its power or its cable is noticed although no connection closes. The network
between the machines of a node is trusted, as by torchrun.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from zeroband.errors import ConfigError

BEAT_S = 1.0
LOST_S = 10.0
"""Silence after which a machine is lost."""
_PAUSE_S = 0.1
_SAID_AGAIN_S = 30.0
_CONNECT_S = 5.0
_MOST_BYTES = 1 << 12
"""Length of a line; a longer one is from a stranger."""

LEAVE, DONE = "leave", "done"
"""Words between launchers: the node was asked to leave, and the sender's ranks have ended."""
Word = str | int
"""One of these, or the exit code with which the sender's ranks end at once, and so the node."""


class MachineLost(Exception):
    """A machine of the node is gone, so the node is."""


@dataclass(frozen=True)
class Place:
    """A machine's place among the machines of its node."""

    number: int
    machines: int
    host: str
    """Address of the first machine, at which its launcher and its ranks' store listen."""
    port: int

    @property
    def is_first(self) -> bool:
        return self.number == 0


ONE_MACHINE = Place(0, 1, "127.0.0.1", 0)
"""The place of a machine that is a whole node."""


@dataclass(frozen=True)
class _Hello:
    """What a launcher says first. All must agree on all but the number."""

    number: int
    machines: int
    ranks: int


@dataclass
class _Line:
    """A connection to another launcher."""

    connection: socket.socket
    number: int
    """Number of the other machine; negative until it has said so."""
    heard_at_s: float = field(default_factory=time.monotonic)
    is_done: bool = False
    _received: bytes = b""

    def __post_init__(self) -> None:
        self.connection.setblocking(False)

    def send(self, value: Any) -> None:
        """Send a value; a connection that takes none is found lost by its silence."""
        try:
            self.connection.send(json.dumps(value).encode() + b"\n")
        except BlockingIOError:
            pass
        except OSError:
            self.heard_at_s = -LOST_S

    def receive(self) -> Iterator[Any]:
        """Yield the values that have come. Raises MachineLost if the connection is closed or silent."""
        lost = ""
        try:
            if data := self.connection.recv(_MOST_BYTES):
                self._received, self.heard_at_s = self._received + data, time.monotonic()
            else:
                lost = "its launcher ended"
        except BlockingIOError:
            if time.monotonic() - self.heard_at_s > LOST_S:
                lost = f"it was silent for {LOST_S:.0f} s"
        except OSError as error:
            lost = str(error.strerror)
        *lines, self._received = self._received.split(b"\n")
        try:
            yield from map(json.loads, lines)
        except ValueError:
            lost = "it sent no JSON"
        if len(self._received) > _MOST_BYTES:
            lost = "it sent no line"
        if lost and not self.is_done:
            raise MachineLost(f"machine {self.number} of this node is lost: {lost}")


class MachineLink:
    """A launcher's connections to the launchers of the node's other machines. One thread; nothing blocks.

    `ranks`: of each machine. Raises ConfigError if the first machine cannot listen.
    """

    def __init__(self, place: Place, ranks: int, say: Callable[[str], object]) -> None:
        self.place = place
        self._hello = _Hello(place.number, place.machines, ranks)
        self._say = say
        self._lines: list[_Line] = []
        self._beats_at_s = 0.0
        self._server: socket.socket | None = None
        if place.is_first:
            try:
                self._server = socket.create_server((place.host, place.port))
            except OSError as error:
                raise ConfigError(
                    f"--master-addr {place.host}: cannot listen on port {place.port} ({error.strerror}); name an "
                    "address of this machine that the others reach, or another --master-port"
                ) from error
            self._server.setblocking(False)

    def meet(self, store_port: int, is_over: Callable[[], bool]) -> int:
        """Wait until all launchers have come; returns the port of the ranks' store, on the first machine.

        `store_port`: the first machine's choice. `is_over`: whether to wait no longer; then returns 0. Raises
        ConfigError if the launchers were started with other numbers.
        """
        say_at_s = time.monotonic() + _SAID_AGAIN_S / 3
        while not is_over():
            port = self._gather(store_port) if self.place.is_first else self._call()
            if port:
                return port
            if time.monotonic() > say_at_s:
                self._say(f"waiting for the other machines of this node: {self._missing()}")
                say_at_s += _SAID_AGAIN_S
            time.sleep(_PAUSE_S)
        return 0

    def _missing(self) -> str:
        if not self.place.is_first:
            return f"the first, at {self.place.host}:{self.place.port}"
        assert self._server is not None, "the first machine listens"
        come = {line.number for line in self._lines}
        missing = ", ".join(str(number) for number in range(1, self.place.machines) if number not in come)
        return f"{missing}; listening on {':'.join(map(str, self._server.getsockname()[:2]))}"

    def _gather(self, store_port: int) -> int:
        """Accept the others; once all have come, tell them the port and return it."""
        assert self._server is not None, "the first machine listens"
        with contextlib.suppress(BlockingIOError):
            self._lines.append(_Line(self._server.accept()[0], -1))
        for line in list(self._lines):
            try:
                for said in line.receive():
                    self._admit(line, said)
            except MachineLost:
                self._drop(line)
        self._beat()
        if len({line.number for line in self._lines if line.number > 0}) < self.place.machines - 1:
            return 0
        for stranger in [line for line in self._lines if line.number < 0]:
            self._drop(stranger)
        self._server.close()  # a launcher that comes now waits for the node's next start
        self.tell({"port": store_port})
        return store_port

    def _admit(self, line: _Line, said: Any) -> None:
        if said is None:
            return
        try:
            hello = _Hello(**said)
            is_free = 0 < hello.number < self.place.machines and hello.number not in {one.number for one in self._lines}
        except TypeError:
            raise MachineLost("a stranger") from None
        if replace(hello, number=0) != self._hello or not is_free:
            line.send({"refused": asdict(self._hello)})
            raise MachineLost("other numbers")
        line.number = hello.number

    def _call(self) -> int:
        """Connect to the first machine, and return the port that it names; 0 before that."""
        if not self._lines:
            try:
                connection = socket.create_connection((self.place.host, self.place.port), timeout=_CONNECT_S)
            except OSError:
                return 0
            self._lines = [_Line(connection, 0)]
            self._lines[0].send(asdict(self._hello))
        self._beat()
        try:
            for said in self._lines[0].receive():
                if said is not None and "refused" in said:
                    raise ConfigError(
                        f"the launcher at {self.place.host}:{self.place.port} was started with {said['refused']}, "
                        f"and this one with {asdict(self._hello)}: machines and ranks must be equal, and each has its "
                        "own --node-rank"
                    )
                if said is not None:
                    return int(said["port"])
        except MachineLost:
            self._drop(self._lines[0])
        return 0

    def _drop(self, line: _Line) -> None:
        line.connection.close()
        self._lines.remove(line)

    def _received_by(self, line: _Line) -> Iterator[Word]:
        for said in line.receive():
            line.is_done |= said == DONE
            if said is not None:
                yield said

    def poll(self) -> Sequence[Word]:
        """Return the other launchers' words since the last call. Raises MachineLost."""
        self._beat()
        words = list[Word]()
        for line in self._lines:
            for word in () if line.is_done else self._received_by(line):
                words.append(word)
                if self.place.is_first and word != DONE:
                    self.tell(word, but=line)
        return words

    def tell(self, value: Any, *, but: _Line | None = None) -> None:
        """Send the other launchers a value, such as a `Word`; `but`: except this one."""
        for line in self._lines:
            if line is not but:
                line.send(value)

    def _beat(self) -> None:
        if time.monotonic() >= self._beats_at_s:
            self._beats_at_s = time.monotonic() + BEAT_S
            self.tell(None)

    def close(self) -> None:
        """Close all connections; the others notice, unless this launcher has said that it is done."""
        for line in self._lines:
            line.connection.close()
        if self._server is not None:
            self._server.close()
