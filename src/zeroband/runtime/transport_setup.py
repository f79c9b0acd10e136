"""Builds a node's data path and its way to the other nodes, from its configuration."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Mapping, Sequence

from zeroband.config.schema import RunConfig
from zeroband.config.store_url import parse_store_urls
from zeroband.elastic.guardian.link_report import PARTNERS_FILE, NamesWriter
from zeroband.elastic.guardian.process import ListenAddress
from zeroband.elastic.membership.reach import Ways, ways_to
from zeroband.elastic.membership.records import FOUNDING_ROUND
from zeroband.elastic.membership.run_key import RunKey
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.elastic.transport.base import DataPlane
from zeroband.elastic.transport.descriptors import raise_limit, shortage
from zeroband.elastic.transport.engine import Engine
from zeroband.elastic.transport.gloo_plane import LaneGroups, LaneOwnership
from zeroband.elastic.transport.handover import POSES, HandedOver, Inbox
from zeroband.elastic.transport.handshake import Purpose, StreamKeys
from zeroband.elastic.transport.links import Links
from zeroband.elastic.transport.native_plane import NativePlane, Reach
from zeroband.elastic.transport.sealed import Dialler
from zeroband.elastic.transport.stalls import TransferBounds
from zeroband.errors import ConfigError, StoreLost
from zeroband.kernels import native
from zeroband.kernels.codec import CODECS, Codec
from zeroband.node.processors import usable_processors
from zeroband.node.shared_flags import SharedFlags
from zeroband.runtime.node_parts import HeldPort, NodeParts


class TransportSetup:
    """A node's port and data path. On local rank 0 it takes what other nodes send here.

    `on_poser`: told of a call in the name of a member whose key the caller does not have, and from where it came.
    Raises ConfigError, StoreLost.
    """

    def __init__(
        self,
        node: NodeParts,
        store: RedisStore,
        flags: SharedFlags,
        key: RunKey,
        on_poser: Callable[[str, str], object],
    ) -> None:
        config = node.config
        assert config.store.address is not None
        self._node, self._config = node, config
        self._store, self._flags, self._key = store, flags, key
        self._host = config.node.advertise_host or address_towards(config.store.address)
        self.inbox: Inbox | None = None
        self._links: Links | None = None
        if config.comm.backend == "native":
            require_native(is_sealed=config.comm.encryption)
        if node.local.rank != 0:
            return
        require_descriptors(config)

        def note_poser(connection: socket.socket, what: HandedOver) -> None:
            connection.close()
            on_poser(what.caller, what.session)

        takers: dict[str, Callable[[socket.socket, HandedOver], object]] = {POSES: note_poser}
        if config.comm.backend == "native":
            beat_s = TransferBounds.of(config.fault.time_outs).beat_s
            engine = Engine(config.comm.threads or _threads(), beat_s=beat_s)
            self._links = Links(engine, self._key, config.comm.encryption)
            takers[Purpose.DATA] = self._links.accept
        self.inbox = Inbox(takers)

    @property
    def listen(self) -> ListenAddress:
        """Where local rank 0 listens."""
        return listen_address_of(self._config, self._host, self._key, self._node.port)

    def serve_state(self, take: Callable[[socket.socket, StreamKeys], object]) -> None:
        """Have connections of nodes that ask for this one's state answered from now on. On local rank 0."""
        assert self.inbox is not None, "local rank 0 has it"
        self.inbox.route(Purpose.STATE, lambda connection, what: take(connection, what.keys))

    def dialler(self, node_id: str) -> Dialler:
        """For asking other nodes for their state in the name of this one."""
        name = node_id if self._key.node is None else self._key.node.name(node_id)
        return Dialler(self._key, name, self._config.comm.encryption)

    def open(self) -> DataPlane:
        """The data path that the configuration asks for."""
        comm, time_outs = self._config.comm, self._config.fault.time_outs
        if comm.backend == "native":
            tell_partners = NamesWriter(self._flags.path.parent, PARTNERS_FILE).tell
            reach = None if self._links is None else Reach(self._links, self._ways, tell_partners)
            return NativePlane(
                self._config.run.id,
                self._flags,
                codec_of(self._config),
                reach,
                self._node.faults,
                streams=comm.streams,
                paced=comm.rate_control,
                bounds=TransferBounds.of(time_outs),
            )
        return LaneGroups(
            self._store,
            self._flags,
            LaneOwnership(comm.lanes, self._node.local.rank, self._node.local.world_size),
            self._node.faults,
            host=self._host,
            chunk_bytes=int(comm.chunk_mb * 1e6),
            transfer_s=time_outs.transfer_s,
            bounds=TransferBounds.of(time_outs),
        )

    def _ways(self, own: str, members: Sequence[str]) -> Mapping[str, Ways]:
        peers = self._store.view(FOUNDING_ROUND).peers
        return {member: ways_to(own, member, peers) for member in members if member in peers}

    def close(self) -> None:
        if self.inbox is not None:
            self.inbox.close()


def listen_address_of(config: RunConfig, host: str, key: RunKey, port: HeldPort | None = None) -> ListenAddress:
    """Where this node listens, and as what the others know it. `port`: is open already; None: the guardian opens it."""
    node = config.node
    return ListenAddress(
        host=host,
        port=node.advertise_port if port is None else port.number,
        door="" if port is None else port.door,
        bind_host=node.bind_host or _address_to_listen_on(host),
        bind_port=node.port,
        run_key=key.secret.hex(),
        node_key="" if key.node is None else key.node.secret.hex(),
        is_sealed=config.comm.encryption,
        is_open=node.dialable,
        is_relayed=config.comm.backend == "native",
    )


def require_descriptors(config: RunConfig) -> None:
    """Raise the limit of this process and its guardian. Raises ConfigError where it does not do for `start_nodes`."""
    raise_limit()
    problem = shortage(config.elastic.start_nodes, config.comm.streams)
    if problem is not None:
        raise ConfigError(f"elastic.start_nodes={config.elastic.start_nodes}: {problem}")


def codec_of(config: RunConfig) -> Codec:
    """How this run encodes what it averages."""
    return CODECS[config.codec_name]


def require_native(*, is_sealed: bool) -> None:
    """Raises ConfigError where this machine cannot run the native data path."""
    problem = native.problem()
    if problem is not None:
        raise ConfigError(f"comm.backend = 'native': {problem}; or set comm.backend = 'gloo' on all nodes")
    reason = native.load().zb_sealing_problem()
    if is_sealed and reason is not None:
        raise ConfigError(
            f"comm.encryption = true: {reason.decode()}; install OpenSSL, or set comm.encryption = false on all nodes "
            "if you trust every network between them"
        )


def _threads() -> int:
    return min(4, max(1, usable_processors() // 8))


def _address_to_listen_on(host: str) -> str:
    """The address itself where this machine has it, else all addresses.

    A name that means loopback here alone (Debian's /etc/hosts has `127.0.1.1 HOST`) is another address to the others.
    """
    for family, _, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        if is_loopback(str(address[0])) and not is_loopback(host):
            continue
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return str(address[0])
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's for itself alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def address_towards(store_url: str) -> str:
    """The address of this machine on the route to the store; loopback for a store on this machine. Raises StoreLost."""
    problem = ""
    hosts = [host for store in parse_store_urls(store_url) for host in store.hosts]
    for host, port in hosts:
        try:
            family, _, _, _, remote = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
                probe.connect(remote)
                return str(probe.getsockname()[0])
        except OSError as error:
            problem = f"no way to {host}: {error.strerror}; check store.url"
    if hosts:
        raise StoreLost(problem)
    return "127.0.0.1"
