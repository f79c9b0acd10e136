"""What a joiner that catches up costs the members: rounds with one beside rounds without, in one run.

Two real nodes in namespaces, whose state is too large to be copied; their inner steps sleep, so that two cores carry
them. A third one fetches the state and the journal, with what a joiner fetches them with, as fast as its link goes and
without an end, in every other pair of rounds. It has the cores when the members leave them: a joiner has a machine of
its own. Linux as root.

    python bench/join_cost.py [--rounds 32] [--mbit 100] [--phase-s 10]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count as numbers
from itertools import pairwise
from pathlib import Path

import torch
from evidence import count, require

from zeroband.elastic.membership.keys import NodeKey, RunKey
from zeroband.elastic.recovery.client import StateFetch, fetch_entry
from zeroband.elastic.recovery.donors import Donor, Inquiry
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.elastic.transport.dial import Dialler
from zeroband.errors import RecoveryFailed
from zeroband.tools.cluster import LocalCluster, Network

MEMBERS, INNER_STEPS = 2, 4
FIRST, IN_A_ROW = 3, 2
"""Rounds before the first are not counted; so many rounds in a row have a joiner, and as many have none."""
LIMIT_S = 1800.0

TASK = (
    *("--model.d-model=512", "--model.n-layers=12", "--model.n-heads=8", "--data.seq-length=8"),
    *("--data.source.type=synthetic", "--data.source.documents=200", "--optim.warmup-steps=2"),
    *("--train.total-steps=1000000", "--train.batch-size=1", "--train.micro-bs=1", "--train.threads=1"),
    *("--train.dtype=float32", "--outer.type=diloco", f"--outer.inner-steps={INNER_STEPS}"),
    *("--log-level=WARNING", "--elastic.start-timeout-s=300", "--fault.detect-s=20"),
)


class Paused(Exception):
    """The joiner is to fetch nothing for a while."""


class Joiner:
    """Fetches state and journal again and again while it is told to, by lines of the standard input."""

    def __init__(self, store: RedisStore, run_id: str) -> None:
        self._store = store
        own = NodeKey.new()
        self._dialler = Dialler(RunKey.of(None, run_id, node=own), own.name("joiner"), is_sealed=True)
        self._is_on = threading.Event()
        self.fetched_bytes = 0

    def run(self) -> None:
        threading.Thread(target=self._fetch_for_ever, daemon=True).start()
        for line in sys.stdin:
            self._is_on.set() if line.strip() == "on" else self._is_on.clear()
            print(self.fetched_bytes, flush=True)

    def _fetch_for_ever(self) -> None:
        sections = dict[str, torch.Tensor]()
        while self._is_on.wait():
            with contextlib.suppress(Paused, RecoveryFailed):
                donors = self._donors()
                sections = sections or {name: torch.zeros(n // 4) for name, n in self._lengths(donors[0]).items()}
                fetched = StateFetch(self._dialler, sections, mixes=True).fetch(donors, self._count)
                for round in numbers(fetched.round + 1):
                    fetch_entry(donors, self._dialler, round, _room, on_chunk=self._count)

    def _donors(self) -> list[Donor]:
        view = self._store.view(0)
        assert view.committed is not None
        return [Donor(member, view.peers[member].host, view.peers[member].port) for member in view.committed.members]

    def _lengths(self, donor: Donor) -> Mapping[str, int]:
        """Bytes of each section."""
        return Inquiry("state", self._dialler, None).lead_of([donor], None)[1].lengths

    def _count(self, chunk_bytes: int, total_bytes: int) -> None:
        self.fetched_bytes += chunk_bytes
        if not self._is_on.is_set():
            raise Paused


def _room(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


@dataclass(frozen=True)
class Round:
    """A committed round."""

    number: int
    seen_at_s: float
    cpu_s: float
    """Of the members' processes so far."""
    has_joiner: bool


PARTS = ("wait_s", "transfer_s", "apply_s")


def parts_of(node_dir: Path) -> dict[int, dict[str, float]]:
    """By round, what a node's metrics say of where its time went."""
    lines = (node_dir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines if '"outer/transfer_s"' in line]
    return {int(record["outer/round"]): {part: record[f"outer/{part}"] for part in PARTS} for record in records}


def cpu_s(folder: Path) -> float:
    """Processor seconds of all processes that work for nodes below this folder."""
    ticks = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in (process / "environ").read_bytes():
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def rounds_of(store: RedisStore, cluster: LocalCluster) -> Iterator[int]:
    """Each committed round, once it is seen."""
    newest, view, until_s = -1, store.view(0), time.monotonic() + LIMIT_S
    while True:
        committed = view.committed
        if committed is not None and committed.round > newest:
            newest = committed.round
            require(newest < FIRST or len(committed.members) == MEMBERS, f"round {newest} lacks a member")
            yield newest
        require(time.monotonic() < until_s and len(cluster.running) == MEMBERS, cluster.describe())
        view = store.await_change(0, view, within_s=1.0)


def measure(rounds: int, mbit: float, phase_s: float) -> tuple[list[Round], int, Mapping[int, Mapping[str, float]]]:
    """The rounds of a run, what the joiner fetched in them, and the parts of a member's rounds."""
    found = list[Round]()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zeroband-bench-")))
        network = stack.enter_context(Network())
        total = (*TASK, f"--fault.inject=inner@+0=TAKES{phase_s / INNER_STEPS}")
        cluster = stack.enter_context(
            LocalCluster(folder, total, nodes=MEMBERS, env={"OMP_NUM_THREADS": "1"}, network=network)
        )
        network.add("joiner")
        for number in range(MEMBERS):
            network.limit(f"node{number}", mbit)
            cluster.start(f"node{number}")
        assert cluster.redis is not None and cluster.store_url is not None
        store = RedisStore(cluster.redis.local_url, cluster.run_id, retry_s=30.0)
        stack.callback(store.close)
        command = [
            *network.prefix("joiner"),
            sys.executable,
            __file__,
            "--fetch",
            cluster.store_url,
            cluster.run_id,
        ]
        joiner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        stack.callback(joiner.kill)
        assert joiner.stdin is not None and joiner.stdout is not None
        fetched_bytes, has_joiner = 0, False
        for number in rounds_of(store, cluster):
            found.append(Round(number, time.monotonic(), cpu_s(folder), has_joiner))
            has_joiner = number >= FIRST and (number - FIRST) // IN_A_ROW % 2 == 0
            joiner.stdin.write("on\n" if has_joiner else "off\n")
            fetched_bytes = int(joiner.stdout.readline())
            if number >= FIRST + rounds:
                break
        parts = parts_of(cluster.run_dir / "node0")
    return found, fetched_bytes, parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=count, default=32)
    parser.add_argument("--mbit", type=float, default=100.0, help="each member's link")
    parser.add_argument("--phase-s", type=float, default=10.0, help="inner steps of a round take so long at least")
    parser.add_argument("--fetch", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.fetch:
        os.nice(19)
        return Joiner(RedisStore(asked.fetch[0], asked.fetch[1], retry_s=30.0), asked.fetch[1]).run()
    found, fetched_bytes, parts = measure(asked.rounds, asked.mbit, asked.phase_s)
    pairs = [
        (before, after)
        for before, after in pairwise(found)
        if before.number >= FIRST and after.number == before.number + 1
    ]
    require({after.has_joiner for _, after in pairs} == {True, False}, "there are no rounds to compare")
    require(fetched_bytes > 0, "the joiner fetched nothing")
    head = "| | rounds | round, median s | mean s | of it waiting | transfer | applying | members' processor |\n|"
    print(head + "---|" * 8)
    means = list[float]()
    for has_joiner in (False, True):
        took_s = [after.seen_at_s - before.seen_at_s for before, after in pairs if after.has_joiner == has_joiner]
        used_s = [after.cpu_s - before.cpu_s for before, after in pairs if after.has_joiner == has_joiner]
        means.append(statistics.mean(took_s))
        said = [parts[after.number] for _, after in pairs if after.has_joiner == has_joiner and after.number in parts]
        shares = " | ".join(f"{statistics.mean(one[part] for one in said):.2f}" for part in PARTS)
        row = f"{statistics.median(took_s):.2f} | {means[-1]:.2f} | {shares} | {statistics.mean(used_s):.2f} |"
        print(f"| {'a joiner fetches' if has_joiner else 'nobody joins'} | {len(took_s)} | {row}")
    print(f"ratio of means {means[1] / means[0]:.3f}; the joiner fetched {fetched_bytes / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
