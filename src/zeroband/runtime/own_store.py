"""This node's store, in a run whose nodes hold the stores themselves. Local rank 0 owns it.

It starts before the node looks for the run, and ends with the node. It keeps nothing on disk: after a crash it comes
back empty. Others reach it through the node's port.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from types import TracebackType

from zeroband.config.schema import RunConfig
from zeroband.config.store_url import NODE_PORT, place_of
from zeroband.elastic.guardian.port_holder import HANDOVER_SOCKET, HolderOrder, PortHolder
from zeroband.elastic.membership.departure import Departure
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.membership.records import BOOTSTRAP_ROUND, View
from zeroband.elastic.membership.succession import StoreProbe, active_store
from zeroband.elastic.rounds.elastic_device_mesh import on_first_rank
from zeroband.elastic.store.local_server import ServerFolder, bounds_of_run, find_redis_server, outdated
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.errors import ConfigError, Leaving, RunOver, StoreLost
from zeroband.node.mesh import LocalMesh
from zeroband.node.names import node_id_of
from zeroband.observe.log import get_logger
from zeroband.runtime.node_parts import OpenPort
from zeroband.runtime.transport_setup import address_towards, is_loopback, listen_address_of

_LAST_WORDS_S = 2.0
"""Time in which the others see the round with which a node left."""
_LOOK_S = 0.1
_AGAIN_S = 1.0
"""Pause between two attempts to restart it."""

_log = get_logger(__name__)


def open_own_store(
    config: RunConfig, local: LocalMesh, departure: Departure, stack: ExitStack
) -> tuple[RunConfig, OpenPort | None]:
    """Start this node's store if the run asks for one; `stack` ends it. All local ranks.

    Returns the configuration, extended by this store, and the node's port, which is already open; None without a store:
    the guardian then opens the port. Raises ConfigError, StoreLost.
    """
    address = config.store.address
    if address is None or not config.store.are_of_nodes or config.node.dial_out_only:
        return config, None

    def start() -> tuple[str, str, int]:
        host = config.node.advertise_host or address_towards(address)
        own = OwnStore(config, host, departure)
        stack.push(own.close)
        return own.place, own.port.handover_socket, own.port.number

    place, handover_socket, number = on_first_rank(local, start)
    with_own = config.model_copy(update={"store": config.store.with_peer(place)})
    return with_own, OpenPort(handover_socket, number)


class OwnStore:
    """A store server for the run's nodes, which must prove that they have its token, and the node's port.

    `host`: address at which the nodes reach this one. Raises ConfigError if it cannot listen, or would admit anyone.
    """

    def __init__(self, config: RunConfig, host: str, departure: Departure) -> None:
        self._config, self._departure = config, departure
        token = config.run.token.get_secret_value() if config.run.token else None
        self._key = RunKey.of(token, config.run.id)
        bind_host = listen_address_of(config, host, self._key).bind_host or host
        if token is None and not is_loopback(bind_host):
            raise ConfigError(
                f"this node's store at {host} admits anyone who reaches it: set run.token on all nodes, in "
                "ZERO_BAND_RUN__TOKEN or run.token_file"
            )
        if old := outdated(find_redis_server()):
            _log.warning(f"this node's store: {old}")
        self._folder = ServerFolder()
        bounds = bounds_of_run(config.run.id, config.elastic.start_nodes)
        self._order = HolderOrder(
            node_id=node_id_of(config),
            run_key=self._key.secret.hex(),
            bind_host=bind_host,
            bind_port=config.node.port or NODE_PORT,
            folder=str(self._folder.path),
            rules=bounds.rules,
            memory_bytes=bounds.memory_bytes,
        )
        try:
            self._holder = PortHolder(self._order)
        except BaseException:
            self._folder.close()
            raise
        self.port = OpenPort(str(self._folder.path / HANDOVER_SOCKET), config.node.advertise_port or self._holder.port)
        """The node's port, for its guardian."""
        self.place = place_of(host, self.port.number)
        """Address of the store for other nodes."""
        self._is_over = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="own-store", daemon=True)
        self._keeper.start()

    @property
    def pid(self) -> int:
        """Process that holds the port and the server."""
        return self._holder.pid

    @property
    def folder(self) -> ServerFolder:
        """Folder of the server's socket."""
        return self._folder

    def _keep(self) -> None:
        """Restart the process of the port and the server until `close`."""
        while not self._is_over.wait(_LOOK_S):
            if self._holder.is_running():
                continue
            _log.warning("the process that holds this node's port and store ended; restarting it")
            self._holder.close()
            try:
                self._holder = PortHolder(self._order)
            except ConfigError as error:
                _log.warning("cannot restart the store yet", extra={"fields": {"error": str(error)}})
                self._is_over.wait(_AGAIN_S)

    def close(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """End the server. After a clean end, serve the other nodes first until they do not need it."""
        try:
            if kind is None or issubclass(kind, (RunOver, Leaving)):
                self.serve_until_unused(self._config.run.id, _is_complete)
        finally:
            self._is_over.set()
            self._keeper.join()
            self._holder.close()
            self._folder.close()

    def serve_until_unused(self, run_id: str, is_over: Callable[[View], bool]) -> None:
        """Wait while a run in this store has living members; at most a moment if they can continue without it."""
        lease_s = self._config.fault.time_outs.lease_s
        ends_ms, moved_at_s, began_at_s, has_said = dict[str, int](), time.monotonic(), time.monotonic(), False
        url = f"unix://{self._folder.socket}"
        with (
            suppress(StoreLost, ConfigError),
            closing(RedisStore(url, run_id, key=self._key, lease_s=lease_s, retry_s=lease_s)) as store,
        ):
            while _is_in_use(store.probe("", None)):
                view, now_s = store.view(BOOTSTRAP_ROUND), time.monotonic()
                if (newest := store.lease_ends_ms()) != ends_ms:
                    ends_ms, moved_at_s = newest, now_s
                if not view.alive or now_s > moved_at_s + lease_s:  # no member is left, or all were killed
                    return
                others_continue = not is_over(view) or self._departure.is_urgent
                if others_continue and now_s > began_at_s + _LAST_WORDS_S:
                    return
                if not others_continue and not has_said:
                    _log.info("keeps the store of the run until the others have ended")
                    has_said = True
                time.sleep(_LOOK_S)


def _is_in_use(store: StoreProbe) -> bool:
    generation, forward_pointer = store.generation, store.forward_pointer
    has_moved = generation is not None and forward_pointer is not None and forward_pointer.generation > generation
    return active_store([store]) is not None and not has_moved


def _is_complete(view: View) -> bool:
    if view.committed is None:
        return False
    return Progress.of_verdict(view.committed).is_complete
