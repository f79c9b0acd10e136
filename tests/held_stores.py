"""Stores as nodes hold them, without the nodes: a server on a Unix socket, and a sealed port in a thread."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from types import TracebackType

from tests.stores import RUN_ID

from zeroband.elastic.guardian.port import Port
from zeroband.elastic.guardian.store_calls import StoreCalls
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.store.local_server import RedisServer, bounds_of_run
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.elastic.transport.handshake import STORE_CALL


class HeldStore:
    """A store of a run that lets in whoever has the run's key, at a port of loopback, while the context lasts."""

    def __init__(self, key: RunKey, run_id: str) -> None:
        self.server = RedisServer(bounds=bounds_of_run(run_id, members=0))
        self.key = key
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._gate = Port({STORE_CALL: StoreCalls(key, self.server.socket).answer})
        self._thread = threading.Thread(target=self._loop.run_forever)

    @property
    def place(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self.port}"

    def stop(self) -> None:
        """Have the server end as in a crash; callers are hung up on."""
        self.server.stop()

    def start(self) -> None:
        """Have it come back empty, at the same port."""
        self.server.start()

    def __enter__(self) -> HeldStore:
        self.server.start()
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        return self

    async def _open(self) -> int:
        return self._gate.open("127.0.0.1", 0)

    async def _end(self) -> None:
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._gate.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._end())
        self._loop.close()
        self.server.close()


def open_at(stack: ExitStack, *servers: HeldStore, lease_s: float = 2.0) -> RedisStore:
    """A node's store that knows of these, closed with the stack."""
    url = f"nodes://{','.join(dict.fromkeys(server.place for server in servers))}"
    store = RedisStore(url, RUN_ID, key=servers[0].key, lease_s=lease_s, retry_s=5.0)
    stack.callback(store.close)
    return store
