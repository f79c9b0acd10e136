"""The process that holds a node's port and its store, from before the node looks for its run until the node ends.

Commands for the store are answered here: what comes sealed through the port goes to a server that listens on a Unix
socket in a private folder and on nothing else. All other calls go to the guardian of the node's membership, and are
hung up on while there is none. Bound to the trainer by a pipe: the process and the server end when that does.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from zeroband.elastic.guardian.child import START_DEADLINE_S, Child, speaks, take_order
from zeroband.elastic.guardian.port import Port, cannot_listen
from zeroband.elastic.guardian.store_calls import StoreCalls
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.store.local_server import Bounds, RedisServer
from zeroband.elastic.transport.descriptors import raise_limit
from zeroband.elastic.transport.handshake import DATA_CALL, STORE_CALL
from zeroband.errors import ConfigError
from zeroband.observe.log import get_logger

DOOR = "port.sock"
"""Name of the Unix socket, in the server's folder, where a guardian takes the calls that are for it."""

_PREDECESSOR_S = 5.0
_LOOK_S, _AGAIN_S = 0.1, 1.0
_HAND_OVER_S = 5.0
_NEARLY_FULL = 0.8
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_log = get_logger(__name__)


@dataclass(frozen=True)
class HolderOrder:
    """Everything that the process needs, handed over on its standard input."""

    node_id: str
    run_key: str
    """Hexadecimal; of the handshake with other nodes."""
    bind_host: str
    bind_port: int
    """0: any that is free."""
    folder: str
    """Private folder for the sockets of the server and of the guardian."""
    rules: str
    memory_bytes: int
    """As `Bounds` has them."""


class PortHolder:
    """The trainer's end: owns the process. Raises ConfigError where it cannot listen or has no server to run."""

    def __init__(self, order: HolderOrder) -> None:
        self._child = Child(__name__)
        self._child.give(order)
        said = self._child.output.readline() if speaks(self._child.output, START_DEADLINE_S) else b""
        if not said.strip().isdigit():
            self.close()
            raise ConfigError(said.decode().strip() or "the process that holds this node's port ended; see its log")
        self.port = int(said)
        """The one that it listens on."""

    @property
    def pid(self) -> int:
        return self._child.pid

    def is_running(self) -> bool:
        return self._child.is_running()

    def close(self) -> None:
        """End the process and its server; at most a few seconds."""
        self._child.close()


class _Holder:
    """The process's whole life. All methods belong to one event loop."""

    def __init__(self, order: HolderOrder) -> None:
        self._order = order
        self._bounds = Bounds(order.rules, order.memory_bytes)
        self._server = RedisServer(bounds=self._bounds, folder=Path(order.folder))
        calls = StoreCalls(RunKey(bytes.fromhex(order.run_key)), self._server.socket)
        self._port = Port({STORE_CALL: calls.answer, DATA_CALL: self._pass_on})
        self._guardian: socket.socket | None = None
        self._is_nearly_full = False

    async def run(self, trainer: IO[bytes], say: IO[bytes]) -> None:
        """Serve until the trainer's end of the pipe closes. Raises ConfigError where it cannot begin."""
        self._server.start()
        try:
            port = await self._open()
            tasks = [asyncio.create_task(self._take_guardians()), asyncio.create_task(self._keep_server())]
            say.write(f"{port}\n".encode())
            say.flush()
            await asyncio.to_thread(trainer.read)
            for task in tasks:
                task.cancel()
            self._port.close()
        finally:
            self._server.stop()

    async def _open(self) -> int:
        """Listen. A process before this one may hold the port for a moment. Raises ConfigError."""
        host, port, end_s = self._order.bind_host, self._order.bind_port, time.monotonic() + _PREDECESSOR_S
        while True:
            try:
                return self._port.open(host, port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > end_s:
                    raise cannot_listen(host, port, error) from None
            await asyncio.sleep(_LOOK_S)

    # -- the store ------------------------------------------------------------------------------------------------

    async def _keep_server(self) -> None:
        """Start the server again where it ends; it comes back empty. Say where it fills up."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._server.is_running:
                self._watch_memory()
                continue
            _log.warning("this node's store ended by itself; starting it again, empty")
            self._server.stop()
            try:
                self._server.start()
            except (ConfigError, OSError) as error:
                _log.warning("the store cannot be started again yet", extra={"fields": {"error": str(error)}})
                await asyncio.sleep(_AGAIN_S)

    def _watch_memory(self) -> None:
        with contextlib.suppress(OSError, IndexError):  # it has just ended
            used_bytes = int(Path(f"/proc/{self._server.pid}/statm").read_text().split()[1]) * _PAGE_BYTES
            was_nearly_full, most_bytes = self._is_nearly_full, self._bounds.memory_bytes
            self._is_nearly_full = used_bytes > _NEARLY_FULL * most_bytes
            if self._is_nearly_full and not was_nearly_full:
                used = {"used_mib": used_bytes >> 20, "most_mib": most_bytes >> 20}
                _log.warning("this node's store is nearly full, and refuses writes when it is", extra={"fields": used})

    # -- all other calls -------------------------------------------------------------------------------------------

    async def _take_guardians(self) -> None:
        """Hand calls to the guardian that came last: a node that comes back has another one."""
        loop, path = asyncio.get_running_loop(), Path(self._order.folder) / DOOR
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(path))
            listener.listen()
            listener.setblocking(False)
            while True:
                guardian, _ = await loop.sock_accept(listener)
                guardian.setblocking(False)
                before, self._guardian = self._guardian, guardian
                if before is not None:
                    before.close()

    async def _pass_on(self, connection: socket.socket) -> None:
        """Give the guardian a connection of which nothing was read; hung up on here where it does not take it."""
        async with asyncio.timeout(_HAND_OVER_S):
            while self._guardian is not None:
                try:
                    socket.send_fds(self._guardian, [b"\0"], [connection.fileno()])
                except BlockingIOError:
                    await asyncio.sleep(_LOOK_S)
                else:
                    return


def main() -> None:
    """The process: takes its order from standard input, says its port or what is wrong, and serves."""
    record, trainer = take_order()
    raise_limit()
    try:
        asyncio.run(_Holder(HolderOrder(**record)).run(trainer, sys.stdout.buffer))
    except ConfigError as error:
        sys.stdout.write(f"{error}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
