"""The stores of a soak: a server for each, which keeps on disk what it has confirmed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from zeroband.elastic.store.local_server import RedisServer
from zeroband.tools.cluster.network import STORE, Network


class Stores:
    """One store, or several of which the run uses one at a time. They run while the context lasts.

    `network`: each has a namespace of its own in it; None leaves them on this machine.
    """

    def __init__(self, number: int, network: Network | None) -> None:
        self._servers = tuple(_server(place, network) for place in range(number))
        self._stack = ExitStack()
        self.url = " ".join(server.url for server in self._servers)
        """For nodes."""
        self.local_url = " ".join(server.local_url for server in self._servers)
        """For this process, which is not in their network."""

    def at(self, address: str) -> RedisServer:
        """The store with this address of this machine."""
        return next(server for server in self._servers if server.local_url == address)

    @property
    def pids(self) -> Sequence[int]:
        """Process ids of those that run."""
        return [server.pid for server in self._servers if server.is_running]

    @property
    def folders(self) -> Sequence[Path]:
        """Where they keep what they hold."""
        return [Path(server.local_url.removeprefix("unix://")).parent for server in self._servers]

    def __enter__(self) -> Stores:
        with ExitStack() as stack:
            for server in self._servers:
                stack.enter_context(server)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _server(place: int, network: Network | None) -> RedisServer:
    if network is None:
        return RedisServer(persistent=True)
    return network.redis_server(persistent=True, name=f"{STORE}{place + 1}" if place else STORE)
