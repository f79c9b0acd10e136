"""Addresses and limits of a node's port and data path, from its configuration and this machine."""

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
from zeroband.node.processors import usable_processors
from zeroband.runtime.node_parts import OpenPort


def listen_address_of(config: RunConfig, host: str, key: RunKey, port: OpenPort | None = None) -> ListenAddress:
    """Return where this node listens, and the address that it announces. `port`: already open; None: not yet."""
    node = config.node
    return ListenAddress(
        host=host,
        port=node.advertise_port if port is None else port.number,
        handover_socket="" if port is None else port.handover_socket,
        bind_host=node.bind_host or _address_to_listen_on(host),
        bind_port=node.port,
        run_key=key.secret.hex(),
        node_key="" if key.node is None else key.node.secret.hex(),
        is_sealed=config.comm.encryption,
        is_open=not node.dial_out_only,
        is_relayed=config.comm.backend == "native",
    )


def require_descriptors(config: RunConfig) -> None:
    """Raise the descriptor limit of this process and its guardian. Raises ConfigError if it is too low."""
    raise_limit()
    problem = shortage(config.elastic.start_nodes, config.comm.streams)
    if problem is not None:
        raise ConfigError(f"elastic.start_nodes={config.elastic.start_nodes}: {problem}")


def require_native(*, is_sealed: bool) -> None:
    """Raise ConfigError if this machine cannot run the native data path."""
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
    """Return the number of threads of the native data path."""
    return config.comm.threads or min(4, max(1, usable_processors() // 8))


def _address_to_listen_on(host: str) -> str:
    """Return the address if this machine has it, else all addresses.

    A name that only this machine resolves to loopback (Debian's /etc/hosts has `127.0.1.1 HOST`) does not count.
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
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def address_towards(store_url: str) -> str:
    """Return this machine's address on the route to the store; loopback for a local store. Raises StoreLost."""
    problem = ""
    hosts = [host for store in parse_store_urls(store_url) for host in store.hosts]
    for host, port in hosts:
        try:
            family, _, _, _, remote = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
                probe.connect(remote)
                return str(probe.getsockname()[0])
        except OSError as error:
            problem = f"no route to {host}: {error.strerror}; check store.url"
    if hosts:
        raise StoreLost(problem)
    return "127.0.0.1"
