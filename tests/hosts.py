"""Machines of their own on this one: each with its network, disk, HOME, shared memory and host name.

A host is a namespace of a `Network`, with namespaces for mounts and for the host name in it. All hosts see their own
disk under one path. Linux as root.
"""

from __future__ import annotations

import functools
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from zeroband.tools.cluster.network import Network

_SET_UP = """
set -e
mount --bind "$1" "$2"
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
echo "$3" > /proc/sys/kernel/hostname
echo ready
exec sleep infinity
"""


class Host:
    """A machine. Use as a context. `folder`: its disk as this process sees it; `disk`: as its own processes do."""

    def __init__(self, network: Network, node: str, *, hostname: str, folder: Path, disk: Path) -> None:
        self.address = network.address(node)
        self.folder, self.disk = folder, disk
        folder.mkdir(exist_ok=True)
        disk.mkdir(exist_ok=True)
        set_up = ["bash", "-c", _SET_UP, "bash", str(folder), str(disk), hostname]
        self._command = [*network.prefix(node), "unshare", "--mount", "--uts", "--propagation", "private", *set_up]

    def __enter__(self) -> Host:
        self._holder = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "ready\n"
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        self._holder.kill()
        self._holder.communicate()

    @property
    def prefix(self) -> list[str]:
        """What to put before a command to run it on this host, in the root folder."""
        return ["nsenter", "--target", str(self._holder.pid), "--mount", "--uts", "--net"]


@functools.cache
def obstacle() -> str:
    """Why there can be no hosts here, from an attempt to make one; empty where there can."""
    if reason := Network.obstacle():
        return reason
    with tempfile.TemporaryDirectory() as folder:
        try:
            with hosts(Path(folder), ["one"]):
                return ""
        except (AssertionError, OSError) as error:
            return f"no namespaces for mounts and names: {error}"


@contextmanager
def hosts(folder: Path, names: Sequence[str]) -> Iterator[list[Host]]:
    """Hosts of one network with these host names, which may be equal; their disks lie in a folder."""
    with Network() as network, ExitStack() as stack:
        places = [(f"h{number}", name, folder / f"disk-{number}") for number, name in enumerate(names)]
        yield [
            stack.enter_context(Host(network, node, hostname=name, folder=own, disk=folder / "disk"))
            for node, name, own in places
        ]
