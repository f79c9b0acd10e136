"""What a joiner's fetch costs: a donor's state over loopback, in the clear and sealed, in turns in one run.

Donor and joiner are two processes, as in a run, and every connection begins with the handshake. What is measured begins
before the donor is asked for its round and ends with the last verified chunk; the donor has hashed its copy before.

  python bench/recovery.py [--mb 512] [--repeats 7]
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time

import torch
from evidence import count, require

from zeroband.elastic.guardian.port import shake_hands
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.recovery.client import StateFetch
from zeroband.elastic.recovery.donors import Donor
from zeroband.elastic.recovery.serving import StateServer
from zeroband.elastic.transport.dial import Dialler
from zeroband.state.round_state import RoundState

HOST = "127.0.0.1"
KEY = RunKey(b"b" * 32)


def donate(numel: int, *, is_sealed: bool) -> None:
    """Serve until the standard input ends; the port is written to the standard output."""
    sections = {"params": torch.randn(numel, generator=torch.Generator().manual_seed(1))}
    copy = RoundState(1, {}, "digest", sections)
    server = StateServer(lambda: copy, lambda round: None, current_round=lambda: 1)

    def answer(listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            connection.setblocking(False)
            what = asyncio.run(shake_hands(connection, KEY, callee="donor", is_sealed=is_sealed))
            server.take(connection, what.keys)

    with socket.create_server((HOST, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        threading.Thread(target=answer, args=(listener,), daemon=True).start()
        sys.stdin.read()


class Way:
    """A donor in a process of its own, and what the fetches from it took."""

    def __init__(self, name: str, numel: int) -> None:
        self.name = name
        self._numel = numel
        self._is_sealed = name == "sealed"
        arguments = [sys.executable, __file__, "--donate", name, "--mb", str(4 * numel / 1e6)]
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self._donor = Donor("donor", HOST, int(self.process.stdout.readline()))
        self.took_s: list[float] = []
        self.cpu_s: list[float] = []

    def fetch(self) -> None:
        target = {"params": torch.zeros(self._numel)}
        cpu_s, began_at_s = _cpu_s(), time.perf_counter()
        StateFetch(Dialler(KEY, "joiner", self._is_sealed), target).fetch([self._donor])
        self.took_s.append(time.perf_counter() - began_at_s)
        self.cpu_s.append(_cpu_s() - cpu_s)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=512, help="megabytes of state")
    parser.add_argument("--repeats", type=count, default=7)
    parser.add_argument("--donate", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    numel = int(arguments.mb * 1e6 / 4)
    require(numel > 0, f"--mb {arguments.mb:g} is no state")
    if arguments.donate:
        return donate(numel, is_sealed=arguments.donate == "sealed")
    ways = [Way(name, numel) for name in ("in the clear", "sealed")]
    for way in ways:
        way.fetch()  # the donor hashes its copy
    for _ in range(arguments.repeats):
        for way in ways:
            way.fetch()
    clear_s = statistics.median(ways[0].took_s[1:])
    print("| a donor's state | MB/s, median | MB/s, best | joiner's processor s | of in the clear |")
    print("|---|---|---|---|---|")
    for way in ways:
        median_s, best_s = statistics.median(way.took_s[1:]), min(way.took_s[1:])
        rates = f"{arguments.mb / median_s:.0f} | {arguments.mb / best_s:.0f}"
        print(f"| {way.name} | {rates} | {statistics.median(way.cpu_s[1:]):.2f} | {clear_s / median_s:.2f} |")
        way.process.kill()


if __name__ == "__main__":
    main()
