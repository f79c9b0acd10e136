"""The stores of a soak: persistent servers of this process, or those held by its nodes."""

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
    """Stores held by the nodes of a cluster, as child processes; a node restarts a lost one."""

    url = NODES
    folders: Sequence[Path] = ()

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = nodes
        self.cluster: LocalCluster | None = None
        """Must be set before use."""
        self._program = find_redis_server().resolve()

    @property
    def local_url(self) -> str:
        """URL for this process, which has joined the nodes' network."""
        return address_of_nodes([self._cluster.store_place(node) for node in self._nodes])

    @property
    def _cluster(self) -> LocalCluster:
        assert self.cluster is not None, "the cluster is set"
        return self.cluster

    def holder(self, address: str) -> str:
        """Return the node that holds the store at this address; empty if none does."""
        places = {address_of_node(self._cluster.store_place(node)): node for node in self._nodes}
        return places.get(address, "")

    def at(self, address: str) -> StoreOfNode:
        """Return the store at this address as it runs now."""
        node = self.holder(address)
        return StoreOfNode(self._pids_of(node) if node else ())

    @property
    def pids(self) -> Sequence[int]:
        """Process ids of those that run."""
        return [pid for node in self._cluster.nodes for pid in self._pids_of(node)]

    def _pids_of(self, node: str) -> Sequence[int]:
        # as children of the node's processes: Redis writes its title over its environment, and so over the node's mark
        lists = [
            listed for pid in self._cluster.nodes[node].pids for listed in Path(f"/proc/{pid}/task").glob("*/children")
        ]
        children = [pid for listed in lists for pid in _children(listed)]
        return [pid for pid in children if _program_of(pid) == self._program]

    def __enter__(self) -> StoresOfNodes:
        return self

    def __exit__(self, *_ending: object) -> None:
        """Do nothing: the stores end with their nodes."""


class StoreOfNode:
    """The server of a store held by a node."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids

    def pause(self) -> None:
        signal_all(self._pids, signal.SIGSTOP)

    def resume(self) -> None:
        signal_all(self._pids, signal.SIGCONT)

    def stop(self) -> None:
        signal_all(self._pids, signal.SIGKILL)

    def start(self, *, empty: bool) -> None:
        """Do nothing: its node restarts it."""


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
    """One or several stores, which run while the context lasts.

    `network`: gives each its own namespace; None: on this machine.
    """

    def __init__(self, number: int, network: Network | None) -> None:
        self._servers = tuple(_server(place, network) for place in range(number))
        self._stack = ExitStack()
        self.url = " ".join(server.url for server in self._servers)
        """URL for nodes."""
        self.local_url = " ".join(server.local_url for server in self._servers)
        """URL for this process, which is not in their network."""

    def at(self, address: str) -> RedisServer:
        """Return the store at this local address."""
        return next(server for server in self._servers if server.local_url == address)

    @property
    def pids(self) -> Sequence[int]:
        """Process ids of those that run."""
        return [server.pid for server in self._servers if server.is_running]

    @property
    def folders(self) -> Sequence[Path]:
        """Their data folders."""
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
