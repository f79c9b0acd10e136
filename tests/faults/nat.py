"""Nodes behind NATs, in namespaces: public ones beside the store, and homes, each behind a router that masquerades.

Nothing is forwarded to a home. A router drops what nobody inside asked for, as real ones do, and none knows the way to
the others' homes. `symmetric`: each connection leaves through a random port.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import cast

from zeroband.elastic.store.local_server import RedisServer
from zeroband.tools.cluster.network import Network

PUBLIC = "198.18.7"
_DEADLINE_S = 20.0

_RULES = """
table ip nat {{
  chain out {{ type nat hook postrouting priority 100; oifname "wan" masquerade {random}; }}
}}
table ip filter {{
  chain way {{
    type filter hook forward priority 0; policy drop;
    iifname "lan" accept
    ct state established,related accept
  }}
  chain self {{
    type filter hook input priority 0; policy drop;
    iifname "lo" accept
    ct state established,related accept
  }}
}}
"""


def obstacle() -> str:
    """Why there can be no NAT here; empty where there can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    if shutil.which("nft") is None or shutil.which("ip") is None:
        return "needs nft (nftables) and ip (iproute2)"
    try:
        with NatNetwork(public=(), homes=("home",)):
            return ""
    except subprocess.CalledProcessError as error:
        return f"{error.cmd} failed: {error.stderr.strip()}"


class NatNetwork:
    """A hub with the store and public nodes, and a router for each home. Use as a context."""

    def __init__(self, *, public: Sequence[str], homes: Sequence[str], symmetric: bool = False) -> None:
        self._name = f"zbnat-{os.getpid()}-{secrets.token_hex(2)}"
        self._public = ("store", *public)
        self._homes = tuple(homes)
        self._random = "fully-random" if symmetric else ""
        self._stack = ExitStack()

    def __enter__(self) -> NatNetwork:
        try:
            self._namespace("hub")
            self._in("hub", "ip link add bridge type bridge", "ip link set bridge up")
            for number, node in enumerate(self._public, 1):
                self._plug(node, "e0", number)
            for number, node in enumerate(self._homes, 101):
                self._build_home(node, number)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        self._stack.close()

    def _build_home(self, node: str, number: int) -> None:
        router = f"{node}-router"
        self._plug(router, "wan", number)
        self._namespace(node)
        lan = f"ip link add lan type veth peer name e0 netns {self._path(node)}"
        self._in(router, lan, "ip addr add 10.9.0.1/24 dev lan", "ip link set lan up")
        self._in(node, "ip link set lo up", "ip addr add 10.9.0.2/24 dev e0", "ip link set e0 up")
        self._in(node, "ip route add default via 10.9.0.1")
        self._in(router, "sysctl -qw net.ipv4.ip_forward=1")
        _run(["ip", "netns", "exec", self._path(router), "nft", "-f", "-"], _RULES.format(random=self._random))

    def _plug(self, node: str, device: str, number: int) -> None:
        self._namespace(node)
        self._in("hub", f"ip link add p{number} type veth peer name {device} netns {self._path(node)}")
        self._in("hub", f"ip link set p{number} master bridge up")
        self._in(
            node, "ip link set lo up", f"ip addr add {PUBLIC}.{number}/24 dev {device}", f"ip link set {device} up"
        )

    def _path(self, node: str) -> str:
        return f"{self._name}-{node}"

    def _namespace(self, node: str) -> None:
        _run(["ip", "netns", "add", self._path(node)])
        self._stack.callback(_run, ["ip", "netns", "delete", self._path(node)])

    def _in(self, node: str, *commands: str) -> None:
        for command in commands:
            _run(["ip", "netns", "exec", self._path(node), *command.split()])

    # -- as of a Network ------------------------------------------------------------------------------------------

    def prefix(self, node: str) -> list[str]:
        """What to put before a command to run it in a node's namespace."""
        return [shutil.which("ip") or "ip", "netns", "exec", self._path(node)]

    def address(self, node: str) -> str:
        """What a node takes for its own address: all homes have the same one."""
        return "10.9.0.2" if node in self._homes else f"{PUBLIC}.{self._public.index(node) + 1}"

    def router_address(self, home: str) -> str:
        """Where others see a home."""
        return f"{PUBLIC}.{101 + self._homes.index(home)}"

    def talks_to(self, node: str) -> set[str]:
        """Hosts at the other ends of a node's connections."""
        rows = _run([*self.prefix(node), "ss", "--no-header", "--tcp", "--numeric", "state", "established"])
        return {row.split()[3].rpartition(":")[0].strip("[]").removeprefix("::ffff:") for row in rows.splitlines()}

    def redis_server(self) -> RedisServer:
        return RedisServer(host=self.address("store"), prefix=self.prefix("store"))

    @property
    def network(self) -> Network:
        """This, for a LocalCluster."""
        return cast(Network, self)


def _run(command: Sequence[str], text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_DEADLINE_S, check=True)
    return done.stdout
