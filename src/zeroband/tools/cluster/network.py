"""A network of simulated nodes: network namespaces joined by a bridge, with links that can be broken.

Owns its namespaces and does not touch the machine's network. One thread. Linux as root, with `ip` (iproute2).

Each namespace has a fixed neighbour table, and a direction is broken by a wrong entry in it: the bridge drops the
packet without an error on either side, like a broken router on the path. Dropping in the sender's queue would not do:
TCP notices that and does not back off.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path
from types import TracebackType

from zeroband.elastic.store.local_server import RedisServer
from zeroband.errors import ConfigError
from zeroband.observe.process_stat import started_at_ticks
from zeroband.tools.cluster.interrupts import uninterrupted

STORE = "store"
"""Name of the Redis namespace; all faults apply to it as to a node."""

_HUB = "hub"
"""Namespace of the bridge."""
_ANYONE = "*"
_MAX_NODES = 254
_SUBNET = "198.18.0"
"""Subnet of every network, as they are isolated; reserved for benchmarks (RFC 2544), so no name server is in it."""
_CARRIER_S = 10.0
_NOWHERE = "02:00:00:00:ff:ff"
_NAMESPACES = Path("/var/run/netns")
_IN_NAMESPACE = ("netns", "exec")
"""What follows `ip` in a prefix, before the name."""
_NAMES = re.compile(r"zeroband-(?P<pid>\d+)-(?P<started>\d+)-[0-9a-f]+-")
_IP_DEADLINE_S = 20.0
_QUEUE_BYTES = 128 << 10
"""With less, streams that share a slow link starve each other."""


class Network:
    """Namespaces with addresses that reach each other, except for injected faults.

        with Network() as network, LocalCluster(..., network=network) as cluster:
            ...
            network.cut_off("node1")
            ...
            network.heal("node1")

    `add`, `prefix` and `address` create a node if needed; STORE always exists. Faults accumulate, may be repeated, and
    are undone by `heal` and `heal_all`; packets in flight may still arrive. The context's end removes the network; if
    its process was killed, the next network does. Raises ConfigError if the system does not support it.
    """

    def __init__(self) -> None:
        started = started_at_ticks(os.getpid())  # pids are reused
        self._name = f"zeroband-{os.getpid()}-{started}-{secrets.token_hex(3)}"
        self._numbers: dict[str, int] = {}
        self._sites: list[str] = []
        self._lost: set[tuple[str, str]] = set()
        """Sender and receiver of packets to drop; either may be _ANYONE."""
        self._applied: dict[tuple[str, str], bool] = {}
        """Whether packets are dropped, by sender and receiver, as configured in the neighbour tables."""
        self._down: set[str] = set()

    @staticmethod
    def obstacle() -> str:
        """Return why no network can be created here, by trying; empty if it can."""
        if sys.platform != "linux":
            return f"network namespaces need Linux, not {sys.platform}"
        if os.geteuid() != 0:
            return "network namespaces need root"
        try:
            with Network():
                return ""
        except ConfigError as error:
            return str(error)

    def __enter__(self) -> Network:
        sweep()
        try:
            _ip("netns", "add", self._namespace(_HUB))
            self._configure(_HUB, ["link add bridge type bridge", "link set bridge up"])
            self.add(STORE)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove all namespaces. A process still in one keeps it, without links, until it ends."""
        with uninterrupted():
            _remove(name for name in _namespaces() if name.startswith(f"{self._name}-"))

    def add(self, node: str) -> None:
        """Create a node's namespace with loopback and a link to all others, unless it exists."""
        if node in self._numbers:
            return
        number = len(self._numbers) + 1
        if number > _MAX_NODES:
            raise ConfigError(f"no room for {node}: a network holds at most {_MAX_NODES} nodes, including the store")
        namespace = self._namespace(node)
        _ip("netns", "add", namespace)
        link = f"link add port{number} type veth peer name e0 netns {namespace} address {_hardware_address(number)}"
        self._configure(_HUB, [link, f"link set port{number} master bridge up"])
        self._configure(node, ["link set lo up", f"addr add {_address(number)}/24 dev e0", "link set e0 up"])
        self._numbers[node] = number
        self._await_carrier(node)
        self._apply()

    def prefix(self, node: str) -> list[str]:
        """Return the command prefix that runs a command in a node's namespace, with the same process id."""
        self.add(node)
        return [_ip_program(), *_IN_NAMESPACE, self._namespace(node)]

    @contextmanager
    def joined(self, node: str) -> Generator[None]:
        """Move this thread, and what it starts, into a node's namespace."""
        self.add(node)
        with Path("/proc/thread-self/ns/net").open("rb") as home:
            enter_namespace(self._namespace(node))
            try:
                yield
            finally:
                _enter(home.fileno())

    def address(self, node: str) -> str:
        """Return the address of a node."""
        self.add(node)
        return _address(self._numbers[node])

    def redis_server(self, *, persistent: bool = False, password: str | None = None, name: str = STORE) -> RedisServer:
        """Return a server in the store's or another namespace, not started yet."""
        host, prefix = self.address(name), self.prefix(name)
        return RedisServer(persistent=persistent, host=host, password=password, prefix=prefix)

    def cut_off(self, node: str) -> None:
        """Drop all packets from and to a node, without errors: its link stays up."""
        self._lose((node, _ANYONE), (_ANYONE, node))

    def drop_outgoing(self, node: str) -> None:
        """Drop all packets from a node; it still receives."""
        self._lose((node, _ANYONE))

    def drop_incoming(self, node: str) -> None:
        """Drop all packets to a node; it still sends."""
        self._lose((_ANYONE, node))

    def cut_between(self, one: str, other: str) -> None:
        """Drop all packets between two nodes; both reach all others."""
        self._lose((one, other), (other, one))

    def link_down(self, node: str) -> None:
        """Take a node's interface down. Unlike with other faults, the node's calls fail with an error."""
        self._check(node)
        self._configure(node, ["link set e0 down"])
        self._down.add(node)
        applied = self._applied.items()
        self._applied = {pair: is_lost for pair, is_lost in applied if pair[0] != node}  # the kernel flushes it

    def link_up(self, node: str) -> None:
        """Take a node's interface up and wait for its carrier; the node's other faults stay."""
        self._check(node)
        self._configure(node, ["link set e0 up"])
        self._await_carrier(node)
        self._down.discard(node)
        self._apply()

    def limit(self, node: str, mbit: float) -> None:
        """Limit a node's link in each direction, with the queue of a home router, at least 0.1 s."""
        self.add(node)
        for place, device in ((node, "e0"), (_HUB, f"port{self._numbers[node]}")):
            self._shape(place, device, mbit)

    def settle(self, node: str, site: str, mbit: float) -> None:
        """Put a node at a site, whose nodes reach one another freely, and all others over one link of this rate."""
        self.add(node)
        if site not in self._sites:
            self._sites.append(site)
            number = len(self._sites)
            ends = [f"link set up{number} master bridge up", f"link set down{number} master site{number} up"]
            links = [f"link add site{number} type bridge", f"link add up{number} type veth peer name down{number}"]
            self._configure(_HUB, [*links, f"link set site{number} up", *ends])
            for device in (f"up{number}", f"down{number}"):
                self._shape(_HUB, device, mbit)
        self._configure(_HUB, [f"link set port{self._numbers[node]} master site{self._sites.index(site) + 1}"])

    def sent_by_site(self, site: str) -> int:
        """Bytes that left a site so far, headers included."""
        where = f"/sys/class/net/down{self._sites.index(site) + 1}/statistics/tx_bytes"
        return int(_ip("netns", "exec", self._namespace(_HUB), "cat", where))

    def _shape(self, place: str, device: str, mbit: float) -> None:
        queue_bytes = max(_QUEUE_BYTES, round(mbit * 1e5 / 8))
        shape = ("tbf", "rate", f"{mbit:g}mbit", "burst", "16kb", "limit", str(queue_bytes))
        _ip("netns", "exec", self._namespace(place), "tc", "qdisc", "replace", "dev", device, "root", *shape)

    def heal(self, node: str) -> None:
        """Undo all faults that name a node. One that cuts another node off from everybody stays."""
        self._lost = {pair for pair in self._lost if node not in pair}
        self.link_up(node)

    def heal_all(self) -> None:
        """Undo all faults."""
        self._lost.clear()
        for node in sorted(self._down):
            self.link_up(node)
        self._apply()

    def _namespace(self, node: str) -> str:
        return f"{self._name}-{node}"

    def _check(self, node: str) -> None:
        assert node in self._numbers, f"{node} is not in this network; there are {sorted(self._numbers)}"

    def _lose(self, *pairs: tuple[str, str]) -> None:
        for node in {node for pair in pairs for node in pair} - {_ANYONE}:
            self._check(node)
        self._lost.update(pairs)
        self._apply()

    def _apply(self) -> None:
        """Update the neighbour tables of all namespaces."""
        changes: dict[str, list[str]] = {}
        for sender, receiver in permutations(self._numbers, 2):
            is_lost = not self._lost.isdisjoint({(sender, receiver), (sender, _ANYONE), (_ANYONE, receiver)})
            if sender not in self._down and self._applied.get((sender, receiver)) != is_lost:
                number = self._numbers[receiver]
                goes_to = _NOWHERE if is_lost else _hardware_address(number)
                entry = f"neigh replace {_address(number)} lladdr {goes_to} dev e0 nud permanent"
                changes.setdefault(sender, []).append(entry)
                self._applied[sender, receiver] = is_lost
        for sender, entries in changes.items():
            self._configure(sender, entries)

    def _await_carrier(self, node: str) -> None:
        """Wait until the kernel reports both ends of a node's link as up."""
        ends, end_s = ((node, "e0"), (_HUB, f"port{self._numbers[node]}")), time.monotonic() + _CARRIER_S
        while not all(" state UP " in _ip("-n", self._namespace(n), "-o", "link", "show", dev) for n, dev in ends):
            if time.monotonic() > end_s:
                raise ConfigError(f"the link of {node} is still down {_CARRIER_S:g} s after it was set up")
            time.sleep(0.005)

    def _configure(self, node: str, commands: Sequence[str]) -> None:
        _ip("-n", self._namespace(node), "-batch", "-", commands=commands)


def namespace_of(prefix: Sequence[str]) -> str | None:
    """Return the namespace that a command prefix enters; None if it does anything else."""
    return prefix[-1] if tuple(prefix[1:-1]) == _IN_NAMESPACE else None


def enter_namespace(name: str) -> None:
    """Move this thread, and what it starts, into a network namespace. Raises ConfigError."""
    with (_NAMESPACES / name).open("rb") as there:
        _enter(there.fileno())


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, 0):
        raise ConfigError(f"cannot enter a network namespace: {os.strerror(ctypes.get_errno())}")


def sweep() -> None:
    """Remove the networks of killed processes."""
    left_over: list[str] = []
    for name in _namespaces():
        owner = _NAMES.match(name)
        if owner and started_at_ticks(int(owner["pid"])) != int(owner["started"]):
            left_over.append(name)
    _remove(left_over)


def _namespaces() -> list[str]:
    return [path.name for path in _NAMESPACES.glob("zeroband-*")]


def _remove(names: Iterable[str]) -> None:
    """Remove namespaces, which another process may remove at the same time."""
    for name in names:
        try:
            _ip("netns", "delete", name)
        except ConfigError:
            if (_NAMESPACES / name).exists():
                raise


def _address(number: int) -> str:
    return f"{_SUBNET}.{number}"


def _hardware_address(number: int) -> str:
    return f"02:00:00:00:00:{number:02x}"  # locally administered


def _ip_program() -> str:
    program = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if program is None:
        raise ConfigError("no `ip` on the PATH; install iproute2")
    return program


def _ip(*arguments: str, commands: Sequence[str] = ()) -> str:
    """Run `ip` and return its output. Raises ConfigError with its error."""
    done = subprocess.run(
        [_ip_program(), *arguments],
        input="\n".join(commands),
        capture_output=True,
        text=True,
        timeout=_IP_DEADLINE_S,
    )
    if done.returncode:
        raise ConfigError(f"ip {' '.join(arguments)} failed: {done.stderr.strip() or done.returncode}")
    return done.stdout
