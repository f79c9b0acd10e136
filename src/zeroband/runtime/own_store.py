"""The store that a node holds beside its trainer, in a run whose members hold the stores themselves.

It is there from before the node looks for the run until the node ends, and keeps nothing on disk: one that ends by
itself comes back empty. Local rank 0 owns it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from types import TracebackType

from zeroband.config.schema import RunConfig
from zeroband.config.store_url import place_of
from zeroband.elastic.membership.departure import Departure
from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.membership.records import FOUNDING_ROUND, View
from zeroband.elastic.membership.run_key import RunKey
from zeroband.elastic.membership.succession import Candidate, in_use
from zeroband.elastic.rounds.elastic_device_mesh import on_first_rank
from zeroband.elastic.store.local_server import RedisServer
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.errors import ConfigError, Leaving, RunOver, StoreLost
from zeroband.node.mesh import LocalMesh
from zeroband.observe.log import get_logger
from zeroband.runtime.transport_setup import address_towards, is_loopback, listen_address_of

_ALL_ADDRESSES = ("::", "0.0.0.0")
_LAST_WORDS_S = 2.0
"""In which the others see the round with which a node left."""
_LOOK_S = 0.1
_AGAIN_S = 1.0
"""Between two attempts to bring back one that ended."""

_log = get_logger(__name__)


def open_own_store(config: RunConfig, local: LocalMesh, departure: Departure, stack: ExitStack) -> RunConfig:
    """Start this node's store where the run asks for one; `stack` ends it. All local ranks.

    Returns the configuration in which it is one of those that this node knows. Raises ConfigError, StoreLost.
    """
    address = config.store.address
    if address is None or not config.store.are_of_nodes or not config.node.dialable:
        return config

    def start() -> str:
        host = config.node.advertise_host or address_towards(address)
        stack.push(OwnStore(config, host, departure).close)
        return place_of(host, config.store.port)

    own = on_first_rank(local, start)
    return config.model_copy(update={"store": config.store.with_peer(own)})


class OwnStore:
    """A server for the nodes of a run, who know its password by the run's token.

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
        self._bind_hosts = "* -::*" if bind_host in _ALL_ADDRESSES else bind_host
        self._is_over = threading.Event()
        started = Future[None]()
        self._keeper = threading.Thread(target=self._keep, args=[started], name="own-store", daemon=True)
        self._keeper.start()
        try:
            started.result()
        except ConfigError as error:
            raise ConfigError(f"store.port={config.store.port}: this node cannot hold a store there: {error}") from None

    @property
    def pid(self) -> int:
        """Process id, for tests that end it."""
        return self._server.pid

    def _start_server(self) -> RedisServer:
        port, password = self._config.store.port, self._key.store_password
        return RedisServer(host=self._bind_hosts, port=port, password=password).start()

    def _keep(self, started: Future[None]) -> None:
        """Have a server until `close`; it would end with the thread that started it."""
        try:
            self._server = self._start_server()
        except ConfigError as error:
            return started.set_exception(error)
        started.set_result(None)
        while not self._is_over.wait(_LOOK_S):
            if self._server.is_running:
                continue
            _log.warning("this node's store ended by itself; starting it again, empty")
            self._server.close()
            try:
                self._server = self._start_server()
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
            self._server.close()

    def outlast_others(self, run_id: str, is_over: Callable[[View], bool]) -> None:
        """Wait until nobody is in a run that uses this store; where that is not over, until the others have seen it."""
        with suppress(StoreLost, ConfigError):
            self._outlast_others(run_id, is_over)

    def _outlast_others(self, run_id: str, is_over: Callable[[View], bool]) -> None:
        lease_s = self._config.fault.time_outs.lease_s
        ends_ms, moved_at_s, began_at_s, has_said = dict[str, int](), time.monotonic(), time.monotonic(), False
        with closing(
            RedisStore(self._server.local_url, run_id, key=self._key, lease_s=lease_s, patience_s=lease_s)
        ) as store:
            while _is_in_use(store.look_at_candidate("", None)):
                view, now_s = store.view(FOUNDING_ROUND), time.monotonic()
                if (newest := store.lease_ends_ms()) != ends_ms:
                    ends_ms, moved_at_s = newest, now_s
                if not view.alive or now_s > moved_at_s + lease_s:  # nobody is there, or all were killed
                    return
                others_go_on = not is_over(view) or self._departure.is_hurried
                if others_go_on and now_s > began_at_s + _LAST_WORDS_S:
                    return
                if not others_go_on and not has_said:
                    _log.info("holds the store of the run until the others have ended")
                    has_said = True
                time.sleep(_LOOK_S)


def _is_in_use(store: Candidate) -> bool:
    generation, elsewhere = store.generation, store.elsewhere
    has_moved = generation is not None and elsewhere is not None and elsewhere.generation > generation
    return in_use([store]) is not None and not has_moved


def _is_complete(view: View) -> bool:
    if view.committed is None:
        return False
    return Progress.of_verdict(view.committed).is_complete
