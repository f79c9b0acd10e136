"""The process that holds a node's port and its store for the node's whole life, across memberships.

It forwards calls to the store to a server that listens only on a Unix socket in a private folder. All other calls go to
the guardian of the current membership, and are closed while there is none. Bound to the trainer by a pipe: the process
and the server end with it.
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

from zeroband.elastic.guardian.child import START_DEADLINE_S, Child, is_readable, read_order
from zeroband.elastic.guardian.port import Port, cannot_listen
from zeroband.elastic.guardian.store_calls import StoreCalls
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.store.local_server import Bounds, RedisServer
from zeroband.elastic.transport.descriptors import raise_limit
from zeroband.elastic.transport.handshake import DATA_CALL, STORE_CALL
from zeroband.errors import ConfigError
from zeroband.observe.log import get_logger

HANDOVER_SOCKET = "port.sock"
"""Name of the Unix socket in the server's folder where the guardian receives its calls."""

_PREDECESSOR_S = 5.0
_POLL_S, _RESTART_PAUSE_S = 0.1, 1.0
_HAND_OVER_S = 5.0
_NEARLY_FULL = 0.8
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_log = get_logger(__name__)


@dataclass(frozen=True)
class HolderOrder:
    """The process's settings, sent on its standard input."""

    node_id: str
    run_key: str
    """Key of the handshake in hexadecimal."""
    bind_host: str
    bind_port: int
    """0: any free port."""
    folder: str
    """Private folder for the sockets of the server and of the guardian."""
    rules: str
    memory_bytes: int
    """As in `Bounds`."""


class PortHolder(Child):
    """The trainer's end: owns the process and its server. Raises ConfigError if it cannot listen or start a server."""

    def __init__(self, order: HolderOrder) -> None:
        super().__init__(__name__)
        self.send_order(order)
        line = self.output.readline() if is_readable(self.output, START_DEADLINE_S) else b""
        if not line.strip().isdigit():
            self.close()
            raise ConfigError(line.decode().strip() or "the process that holds this node's port ended; see its log")
        self.port = int(line)
        """The port that it listens on."""


class _Holder:
    """The process. All methods belong to one event loop."""

    def __init__(self, order: HolderOrder) -> None:
        self._order = order
        self._bounds = Bounds(order.rules, order.memory_bytes)
        self._server = RedisServer(bounds=self._bounds, folder=Path(order.folder))
        calls = StoreCalls(RunKey(bytes.fromhex(order.run_key)), self._server.socket)
        self._port = Port({STORE_CALL: calls.answer, DATA_CALL: self._hand_over})
        self._guardian: socket.socket | None = None
        self._is_nearly_full = False

    async def run(self, trainer: IO[bytes], output: IO[bytes]) -> None:
        """Serve until the pipe from the trainer closes. Raises ConfigError if it cannot start."""
        self._server.start()
        try:
            port = await self._open()
            tasks = [asyncio.create_task(self._accept_guardians()), asyncio.create_task(self._keep_server())]
            output.write(f"{port}\n".encode())
            output.flush()
            await asyncio.to_thread(trainer.read)
            for task in tasks:
                task.cancel()
            self._port.close()
        finally:
            self._server.stop()

    async def _open(self) -> int:
        """Listen; retry while a predecessor still holds the port. Raises ConfigError."""
        host, port, end_s = self._order.bind_host, self._order.bind_port, time.monotonic() + _PREDECESSOR_S
        while True:
            try:
                return self._port.open(host, port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > end_s:
                    raise cannot_listen(host, port, error) from None
            await asyncio.sleep(_POLL_S)

    # -- the store ------------------------------------------------------------------------------------------------

    async def _keep_server(self) -> None:
        """Restart the server, empty, if it ends; log when its memory fills up."""
        while True:
            await asyncio.sleep(_POLL_S)
            if self._server.is_running:
                self._watch_memory()
                continue
            _log.warning("this node's store has ended; restarting it, empty")
            self._server.stop()
            try:
                self._server.start()
            except (ConfigError, OSError) as error:
                _log.warning("this node's store cannot be restarted yet", extra={"fields": {"error": str(error)}})
                await asyncio.sleep(_RESTART_PAUSE_S)

    def _watch_memory(self) -> None:
        with contextlib.suppress(OSError, IndexError):  # it has just ended
            used_bytes = int(Path(f"/proc/{self._server.pid}/statm").read_text().split()[1]) * _PAGE_BYTES
            was_nearly_full, most_bytes = self._is_nearly_full, self._bounds.memory_bytes
            self._is_nearly_full = used_bytes > _NEARLY_FULL * most_bytes
            if self._is_nearly_full and not was_nearly_full:
                used = {"used_mib": used_bytes >> 20, "most_mib": most_bytes >> 20}
                _log.warning("this node's store is nearly full; a full one refuses writes", extra={"fields": used})

    # -- all other calls -------------------------------------------------------------------------------------------

    async def _accept_guardians(self) -> None:
        """Accept guardians; the latest one gets the calls, since each membership has its own."""
        loop, path = asyncio.get_running_loop(), Path(self._order.folder) / HANDOVER_SOCKET
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

    async def _hand_over(self, connection: socket.socket) -> None:
        """Hand the guardian a connection from which nothing was read; closed if it is not received in time."""
        async with asyncio.timeout(_HAND_OVER_S):
            while self._guardian is not None:
                try:
                    socket.send_fds(self._guardian, [b"\0"], [connection.fileno()])
                except BlockingIOError:
                    await asyncio.sleep(_POLL_S)
                else:
                    return


def main() -> None:
    """Entry point of the process: prints its port or an error, and serves."""
    record, trainer = read_order()
    raise_limit()
    try:
        asyncio.run(_Holder(HolderOrder(**record)).run(trainer, sys.stdout.buffer))
    except ConfigError as error:
        sys.stdout.write(f"{error}\n")
        sys.stdout.flush()
