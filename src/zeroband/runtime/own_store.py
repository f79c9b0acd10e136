"""The store that a node holds, in a run whose members hold the stores themselves.

It is there from before the node looks for the run until the node ends, and keeps nothing on disk: one that ends by
itself comes back empty. Others reach it through the node's one port. Local rank 0 owns it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from types import TracebackType

from zeroband.config.schema import RunConfig
from zeroband.config.store_url import NODE_PORT, place_of
from zeroband.elastic.guardian.port_holder import DOOR, HolderOrder, PortHolder
from zeroband.elastic.membership.departure import Departure
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.membership.records import BOOTSTRAP_ROUND, View
from zeroband.elastic.membership.succession import StoreProbe, active_store
from zeroband.elastic.rounds.elastic_device_mesh import on_first_rank
from zeroband.elastic.store.local_server import ServerFolder, bounds_of_run, find_redis_server, outdated
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.errors import ConfigError, Leaving, RunOver, StoreLost
from zeroband.node.identity import node_id_of
from zeroband.node.mesh import LocalMesh
from zeroband.observe.log import get_logger
from zeroband.runtime.node_parts import HeldPort
from zeroband.runtime.transport_setup import address_towards, is_loopback, listen_address_of

_LAST_WORDS_S = 2.0
"""In which the others see the round with which a node left."""
_LOOK_S = 0.1
_AGAIN_S = 1.0
"""Between two attempts to bring back one that ended."""

_log = get_logger(__name__)


def open_own_store(
    config: RunConfig, local: LocalMesh, departure: Departure, stack: ExitStack
) -> tuple[RunConfig, HeldPort | None]:
    """Start this node's store where the run asks for one; `stack` ends it. All local ranks.

    Returns the configuration, in which it is one of the stores that the node knows, and the node's port, which is open
    already; None: the node holds no store, and its guardian opens the port. Raises ConfigError, StoreLost.
    """
    address = config.store.address
    if address is None or not config.store.are_of_nodes or config.node.dial_out_only:
        return config, None

    def start() -> tuple[str, str, int]:
        host = config.node.advertise_host or address_towards(address)
        own = OwnStore(config, host, departure)
        stack.push(own.close)
        return own.place, own.port.door, own.port.number

    place, door, number = on_first_rank(local, start)
    with_own = config.model_copy(update={"store": config.store.with_peer(place)})
    return with_own, HeldPort(door, number)


class OwnStore:
    """A server for the nodes of a run, who show that they have its token, and the node's port.

    `host`: under which they reach this node. Raises ConfigError where it cannot listen, or would let in anybody.
    """

    def __init__(self, config: RunConfig, host: str, departure: Departure) -> None:
        self._config, self._departure = config, departure
        token = config.run.token.get_secret_value() if config.run.token else None
        self._key = RunKey.of(token, config.run.id)
        bind_host = listen_address_of(config, host, self._key).bind_host or host
        if token is None and not is_loopback(bind_host):
            raise ConfigError(
                f"this node's store at {host} would let in everybody who reaches it: set run.token on all nodes, in "
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
        self.port = HeldPort(str(self._folder.path / DOOR), config.node.advertise_port or self._holder.port)
        """The node's port, as its guardian needs it."""
        self.place = place_of(host, self.port.number)
        """Where others reach the store."""
        self._is_over = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="own-store", daemon=True)
        self._keeper.start()

    @property
    def pid(self) -> int:
        """Process id of what holds port and server, for tests that end it."""
        return self._holder.pid

    @property
    def folder(self) -> ServerFolder:
        """Where the server's socket is."""
        return self._folder

    def _keep(self) -> None:
        """Have a port and a server until `close`."""
        while not self._is_over.wait(_LOOK_S):
            if self._holder.is_running():
                continue
            _log.warning("the process that holds this node's port and store ended; starting it again")
            self._holder.close()
            try:
                self._holder = PortHolder(self._order)
            except ConfigError as error:
                _log.warning("the store cannot be started again yet", extra={"fields": {"error": str(error)}})
                self._is_over.wait(_AGAIN_S)

    def close(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """End it; where the run uses it, when the others have seen how this node ended, or have ended with it."""
        try:
            if kind is None or issubclass(kind, (RunOver, Leaving)):
                self.outlast_others(self._config.run.id, _is_complete)
        finally:
            self._is_over.set()
            self._keeper.join()
            self._holder.close()
            self._folder.close()

    def outlast_others(self, run_id: str, is_over: Callable[[View], bool]) -> None:
        """Wait until no node is in a run that uses this store; where it is not over, until the others have seen it."""
        lease_s = self._config.fault.time_outs.lease_s
        ends_ms, moved_at_s, began_at_s, has_said = dict[str, int](), time.monotonic(), time.monotonic(), False
        url = f"unix://{self._folder.socket}"
        with (
            suppress(StoreLost, ConfigError),
            closing(RedisStore(url, run_id, key=self._key, lease_s=lease_s, retry_s=lease_s)) as store,
        ):
            while _is_in_use(store.look_at_candidate("", None)):
                view, now_s = store.view(BOOTSTRAP_ROUND), time.monotonic()
                if (newest := store.lease_ends_ms()) != ends_ms:
                    ends_ms, moved_at_s = newest, now_s
                if not view.alive or now_s > moved_at_s + lease_s:  # no member is there, or all were killed
                    return
                others_go_on = not is_over(view) or self._departure.is_urgent
                if others_go_on and now_s > began_at_s + _LAST_WORDS_S:
                    return
                if not others_go_on and not has_said:
                    _log.info("holds the store of the run until the others have ended")
                    has_said = True
                time.sleep(_LOOK_S)


def _is_in_use(store: StoreProbe) -> bool:
    generation, elsewhere = store.generation, store.elsewhere
    has_moved = generation is not None and elsewhere is not None and elsewhere.generation > generation
    return active_store([store]) is not None and not has_moved


def _is_complete(view: View) -> bool:
    if view.committed is None:
        return False
    return Progress.of_verdict(view.committed).is_complete
