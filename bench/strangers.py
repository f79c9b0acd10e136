"""What strangers at a node's port cost a reduction that runs, and how fast one is aborted. Linux as root.

noise    two nodes average over links of 100 Mbit/s while a third one calls the first one's port, which a guardian's
         monitor holds: random bytes, halves of calls, calls with a wrong token, connections that stay silent
abort    from the call in another thread until neither buffer is touched any more, over loopback in one process

    python bench/strangers.py [noise] [abort]
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from all_reduce import measure
from evidence import require_known
from wan import Wan

from zeroband.elastic.guardian.probes import Identity, LinkMonitor
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.transport.engine import Engine, Operation, State
from zeroband.elastic.transport.handshake import NO_KEYS, Caller, Introduction
from zeroband.elastic.transport.shape import shape_of
from zeroband.kernels.codec import CODECS

WAY = "native/int8/4/sealed/all/cubic"
MBIT, RTT_MS = 100, 10
NUMEL = 8 << 20
PORT = 29400
CALLS_PER_S = 200


def hold_door(host: str) -> None:
    """A guardian's port with nobody behind it, until this process is ended; says what memory it took, every second."""
    LinkMonitor(host, port=PORT, identity=Identity("node", RunKey(b"k" * 32)), detect_s=3.0, on_gone=print)
    while True:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        print(pages * os.sysconf("SC_PAGE_SIZE") >> 10, flush=True)
        time.sleep(1)


def call_all_the_time(host: str) -> None:
    """Some hundred strangers each second; those that say nothing are kept open."""
    chance, silent = random.Random(0), list[socket.socket]()
    hello = Caller(RunKey(b"x" * 32), Introduction("stranger", "node", "", True)).hello
    while True:
        connection = socket.create_connection((host, PORT), timeout=5)
        said = chance.choice([b"", chance.randbytes(chance.randrange(600)), hello, hello[: chance.randrange(512)]])
        with suppress(OSError):
            connection.sendall(said)
        silent.append(connection)
        if len(silent) > CALLS_PER_S:
            silent.pop(0).close()
        time.sleep(1 / CALLS_PER_S)


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def noise() -> None:
    me = [sys.executable, __file__]
    print(f"\n| {MBIT} Mbit/s, {RTT_MS} ms | median s | best s | quiet / this, medians |\n|---|---|---|---|")
    with (
        Wan(3, rate_mbit=MBIT, rtt_ms=RTT_MS) as wan,
        running(*wan.prefix(0), *me, "--door", wan.address(0)) as door,
    ):
        assert door.stdout is not None
        before_kb = int(door.stdout.readline())

        def average() -> tuple[float, float]:
            taken = measure(2, NUMEL, [WAY], repeats=6, host=wan.address, prefix=wan.prefix)[WAY]
            return taken.median_s, taken.best_s

        quiet = average()
        with running(*wan.prefix(2), *me, "--noise", wan.address(0)) as stranger:
            noisy = average()
            assert stranger.poll() is None, "the noise ended"
        door.kill()
        after_kb = int(door.stdout.read().split()[-1])
    for name, (median_s, best_s) in {"quiet": quiet, f"{CALLS_PER_S} strangers/s": noisy}.items():
        print(f"| {name} | {median_s:.2f} | {best_s:.2f} | {quiet[0] / median_s:.3f} |")
    print(f"\nMemory of the process that holds the port: {before_kb >> 10} MB before, {after_kb >> 10} MB after\n")


def abort() -> None:
    engines = [Engine(threads=1), Engine(threads=1)]
    near, far = socket.socketpair()
    engines[0].add_stream(1, near, NO_KEYS)
    engines[1].add_stream(0, far, NO_KEYS)
    values, result = torch.randn(2, NUMEL), torch.zeros(2, NUMEL)
    shape, took_ms = shape_of(NUMEL, CODECS["int8"], [0.5, 0.5]), list[float]()
    for number in range(1, 201):
        reductions = [
            engine.start(Operation(1, number << 16, 1, number), shape, i, (0, 1), values[i], result[i])
            for i, engine in enumerate(engines)
        ]
        time.sleep(0.002)

        def end(reduction=reductions[0]) -> None:
            began_at_s = time.perf_counter()
            reduction.close()
            took_ms.append(1e3 * (time.perf_counter() - began_at_s))

        is_running = reductions[0].wait(0) == State.RUNNING
        thread = threading.Thread(target=end)
        thread.start()
        thread.join()
        assert is_running, "it was over before it was aborted"
        for reduction in reductions:
            reduction.close()
    for engine in engines:
        engine.close()
    took_ms.sort()
    print(f"\nabort in a running transfer, 200 times: median {statistics.median(took_ms):.3f} ms, ", end="")
    print(f"99 of 100 below {took_ms[197]:.3f} ms, most {took_ms[-1]:.3f} ms\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="noise, abort, or both")
    parser.add_argument("--door", help=argparse.SUPPRESS)
    parser.add_argument("--noise", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    known = {"noise": noise, "abort": abort}
    require_known(parser, arguments.what, known)
    if arguments.door:
        hold_door(arguments.door)
    if arguments.noise:
        call_all_the_time(arguments.noise)
    for what in arguments.what or known:
        known[what]()


if __name__ == "__main__":
    main()
