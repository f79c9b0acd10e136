"""A middlebox in front of a node's port: forwards every connection, until it is told to swallow what it carries.

From then on the connections of the data path that it has go on in appearance only: it reads what comes and so has TCP
acknowledge it, forwards nothing, and tells neither end when the other one hangs up. Everything else and every new
connection passes.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import TracebackType

HOST = "127.0.0.1"
_PIECE_BYTES = 1 << 16
_OF_THE_DATA_PATH = b'"purpose":"data"'
"""In the introduction, which travels in the clear at the beginning of a connection."""


class Middlebox:
    """Listens on `port` and forwards to `node_port`. Use as a context; its thread ends with it."""

    def __init__(self) -> None:
        self.port = 0
        self.node_port = 0
        self._carried: set[_Carried] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="middlebox", daemon=True)
        self._is_listening = threading.Event()

    def __enter__(self) -> Middlebox:
        self._thread.start()
        assert self._is_listening.wait(10)
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)

    def swallow(self) -> int:
        """Swallow what its streams of the data path carry from now on, both ways; how many there are."""

        async def swallow() -> int:
            streams = {carried for carried in self._carried if carried.is_data}
            for carried in streams:
                carried.is_swallowed = True
            return len(streams)

        return asyncio.run_coroutine_threadsafe(swallow(), self._loop).result(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._carry, HOST, 0))
        self.port = server.sockets[0].getsockname()[1]
        self._is_listening.set()
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        carried = _Carried()
        try:
            there, back = await asyncio.open_connection(HOST, self.node_port)
        except OSError:
            writer.transport.abort()  # as the node refuses, so does this
            return
        self._carried.add(carried)
        try:
            await asyncio.gather(carried.pour(reader, back), carried.pour(there, writer))
        finally:
            self._carried.discard(carried)
            for end in (writer, back):
                end.transport.abort()


class _Carried:
    """One connection and how it goes on."""

    def __init__(self) -> None:
        self.is_data = False
        self.is_swallowed = False
        self._beginning = b""

    async def pour(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await source.read(_PIECE_BYTES):
                if len(self._beginning) < 512:
                    self._beginning += piece
                    self.is_data = _OF_THE_DATA_PATH in self._beginning
                if not self.is_swallowed:
                    sink.write(piece)
                    await sink.drain()
        if self.is_swallowed:
            await asyncio.Event().wait()  # the other end learns nothing of it
        sink.transport.abort()
