"""The stores of a soak: a server for each, which keeps on disk what it has confirmed; or those that its nodes hold."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from zeroband.config.store_url import NODES, address_of_node, address_of_nodes
from zeroband.elastic.store.local_server import RedisServer, find_redis_server
from zeroband.node.processes import signal_all
from zeroband.tools.cluster.local import LocalCluster
from zeroband.tools.cluster.network import STORE, Network


class StoresOfNodes:
    """The stores that the nodes of a cluster hold, as children of their processes. A node starts a lost one again."""

    url = NODES
    folders: Sequence[Path] = ()

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = nodes
        self.cluster: LocalCluster | None = None
        """Whose nodes hold them; set before anything else is asked."""
        self._program = find_redis_server().resolve()

    @property
    def local_url(self) -> str:
        """For this process, which is in the network of the nodes."""
        return address_of_nodes([self._cluster.store_place(node) for node in self._nodes])

    @property
    def _cluster(self) -> LocalCluster:
        assert self.cluster is not None, "the cluster is set"
        return self.cluster

    def holder(self, address: str) -> str:
        """Return the node that holds the store of this address; empty where none does."""
        places = {address_of_node(self._cluster.store_place(node)): node for node in self._nodes}
        return places.get(address, "")

    def at(self, address: str) -> StoreOfNode:
        """Return the store with this address as it runs now."""
        node = self.holder(address)
        return StoreOfNode(self._pids_of(node) if node else ())

    @property
    def pids(self) -> Sequence[int]:
        """Process ids of those that run."""
        return [pid for node in self._cluster.nodes for pid in self._pids_of(node)]

    def _pids_of(self, node: str) -> Sequence[int]:
        lists = [
            listed for pid in self._cluster.nodes[node].pids for listed in Path(f"/proc/{pid}/task").glob("*/children")
        ]
        children = [pid for listed in lists for pid in _children(listed)]
        return [pid for pid in children if _program_of(pid) == self._program]

    def __enter__(self) -> StoresOfNodes:
        return self

    def __exit__(self, *_ending: object) -> None:
        """Leave them: they end with their nodes."""


class StoreOfNode:
    """The server of a store that a node holds, as faults strike it."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids

    def pause(self) -> None:
        signal_all(self._pids, signal.SIGSTOP)

    def resume(self) -> None:
        signal_all(self._pids, signal.SIGCONT)

    def stop(self) -> None:
        signal_all(self._pids, signal.SIGKILL)

    def start(self, *, empty: bool) -> None:
        """Its node has started it again, without its memory."""


def _children(listed: Path) -> list[int]:
    try:
        return [int(pid) for pid in listed.read_text().split()]
    except OSError:  # gone meanwhile
        return []


def _program_of(pid: int) -> Path | None:
    try:
        return Path(f"/proc/{pid}/exe").readlink()
    except OSError:  # gone meanwhile
        return None


class Stores:
    """One store, or several of which the run uses one at a time. They run while the context lasts.

    `network`: each has its own namespace in it; None leaves them on this machine.
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
