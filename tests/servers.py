"""The servers that the tests of the store run on: every different one that is on the PATH or in a wheel."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from zeroband.elastic.store.local_server import redis_servers
from zeroband.node.processes import start_child

DEADLINE_S = 20.0

NO_SCRIPTS = ("--rename-command", "EVALSHA", "", "--rename-command", "EVAL", "")
"""Settings of a server that answers, and runs no script."""


@dataclass(frozen=True)
class ServerProgram:
    """A Redis or Valkey that can be started."""

    name: str
    """Redis or Valkey, and its version."""
    program: Path

    @property
    def line(self) -> str:
        """Name and major version."""
        return self.name.partition(".")[0]

    def __str__(self) -> str:
        return self.name.replace(" ", "-").lower()


def _name_of(program: Path) -> str | None:
    """None where it does not start here: a library that it needs is missing."""
    asked = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=DEADLINE_S)
    found = re.search(r"(Redis|Valkey) server v=([0-9.]+)", asked.stdout)
    return f"{found[1]} {found[2]}" if found else None


def _found() -> tuple[ServerProgram, ...]:
    servers: dict[str, ServerProgram] = {}
    for program in redis_servers():
        if (name := _name_of(program)) is not None:
            servers.setdefault(name, ServerProgram(name, program))
    return tuple(servers.values())


SERVERS = _found()
"""One of each version."""


@dataclass
class Servers:
    """Servers of one program on ports of loopback, Sentinels too, until `close()`."""

    program: Path
    folder: Path
    _started: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, *settings: str, file: str = "") -> int:
        """Run one more, with these arguments and lines of its configuration; its port."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        folder = self.folder / str(port)
        folder.mkdir(parents=True)
        (folder / "redis.conf").write_text(f"port {port}\nbind 127.0.0.1\ndir {folder}\nsave ''\n{file}\n")
        command = [str(self.program), str(folder / "redis.conf"), *settings]
        env = {"PATH": os.environ["PATH"]}
        self._started[port] = start_child(command, env=env, output=folder / "log", death_signal=signal.SIGKILL)
        until(lambda: _answers(port), f"server on {port}; see {folder / 'log'}")
        return port

    def kill(self, port: int) -> None:
        """End one as a crash does."""
        process = self._started.pop(port)
        process.kill()
        process.wait()

    def close(self) -> None:
        """End all of them."""
        for port in tuple(self._started):
            self.kill(port)


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that must come."""
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, f"no {what}"
        time.sleep(0.01)


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0) as server:
        server.sendall(b"PING\r\n")
        return server.recv(16).startswith((b"+PONG", b"-NOAUTH"))
    return False
