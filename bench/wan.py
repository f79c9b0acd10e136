"""Namespaces joined by slow long links, for benchmarks. Linux as root, with `ip`, a C compiler and iperf3."""

from __future__ import annotations

import secrets
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType


class Wan:
    """`nodes` namespaces, each with an access link of `rate_mbit` in each direction and `rtt_ms` to any other.

    Use as a context: `address(i)` is node i's, `prefix(i)` runs a command there.
    """

    def __init__(self, nodes: int, *, rate_mbit: float, rtt_ms: float, loss_percent: float = 0.0) -> None:
        self.nodes = nodes
        self._link = (rate_mbit, rtt_ms, loss_percent)
        self._tag = secrets.token_hex(3)
        self._stack = ExitStack()

    def address(self, node: int) -> str:
        return f"10.77.0.{node + 1}"

    def prefix(self, node: int) -> list[str]:
        return ["ip", "netns", "exec", self._name(node)]

    def _name(self, node: int) -> str:
        return f"wan-{self._tag}-{node}"

    def __enter__(self) -> Wan:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            subprocess.run(["cc", "-O2", Path(__file__).with_name("wan.c"), "-o", folder / "wan"], check=True)
            for node in range(self.nodes):
                _ip("netns", "add", self._name(node))
                stack.callback(_ip, "netns", "delete", self._name(node))
            self._carry(folder / "wan", stack)
            for node in range(self.nodes):
                inside = ["-n", self._name(node)]
                _ip(*inside, "address", "add", f"{self.address(node)}/24", "dev", "wan0")
                _ip(*inside, "link", "set", "lo", "up")
                _ip(*inside, "link", "set", "wan0", "mtu", "1500", "txqueuelen", "10000", "up")
                # whatever this machine has: Linux's default
                _ip(*inside, "route", "change", "10.77.0.0/24", "dev", "wan0", "congctl", "cubic")
            self._stack = stack.pop_all()
        return self

    def _carry(self, program: Path, stack: ExitStack) -> None:
        rate_mbit, rtt_ms, loss_percent = self._link
        queue_kb = rate_mbit * 1e6 / 8 * max(50.0, 2 * rtt_ms) / 1e3 / 1024  # of a home router: a noticeable delay
        names = [self._name(node) for node in range(self.nodes)]
        arguments = [str(value) for value in (rate_mbit, rtt_ms, loss_percent, queue_kb)]
        carrier = subprocess.Popen([program, *arguments, *names], stdout=subprocess.PIPE, text=True)
        stack.callback(carrier.wait)
        stack.callback(carrier.kill)
        assert carrier.stdout is not None and carrier.stdout.readline() == "up\n", "no emulated links"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def iperf_mbit(wan: Wan, streams: Sequence[int], seconds: int) -> float:
    """The best rate of iperf3 from node 0 to node 1 with any of these numbers of streams, the start of TCP included."""
    best = 0.0
    for count in streams:
        server = subprocess.Popen([*wan.prefix(1), "iperf3", "-s", "-1"], stdout=subprocess.DEVNULL)
        subprocess.run(["sleep", "0.3"], check=True)
        client = ["iperf3", "-c", wan.address(1), "-P", str(count), "-t", str(seconds), "-J"]
        answer = subprocess.run([*wan.prefix(0), *client], capture_output=True, text=True, check=False)
        server.wait(timeout=30)
        best = max(best, _received_mbit(answer.stdout))
    return best


def _received_mbit(answer: str) -> float:
    import json

    return float(json.loads(answer)["end"]["sum_received"]["bits_per_second"]) / 1e6
