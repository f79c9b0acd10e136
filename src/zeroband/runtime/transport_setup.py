"""What a node's port and data path take from its configuration and this machine: addresses, codec, limits."""

from __future__ import annotations

import ipaddress
import socket

from zeroband.config.schema import RunConfig
from zeroband.config.store_url import parse_store_urls
from zeroband.elastic.guardian.process import ListenAddress
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.transport.descriptors import raise_limit, shortage
from zeroband.errors import ConfigError, StoreLost
from zeroband.kernels import native
from zeroband.kernels.codec import CODECS, Codec
from zeroband.node.processors import usable_processors
from zeroband.runtime.node_parts import HeldPort


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
        is_open=not node.dial_out_only,
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


def transfer_threads(config: RunConfig) -> int:
    """How many threads of the native data path this node has."""
    return config.comm.threads or min(4, max(1, usable_processors() // 8))


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
