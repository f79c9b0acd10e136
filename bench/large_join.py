"""How long a large state takes to join over a slow link, and what that costs a donor. Real code, sparse files.

Donor and joiner are two processes. The donor's state lies in sparse files; in each round real outer steps move some
values of it, and its journal gets the mean of all, encoded. What each member does in a round anyway is left out: it
encodes and digests the values that move. The joiner fetches over a link of `--mbit` (a token bucket that all of its
connections share), goes on with each new round, replays the journal, and is in when its state has the donor's digest,
and zeros elsewhere, and no newer round is there. Before that, what is expected is calculated. Each computes in one
thread: several of torch's wait for one another where cores are shared. Memory is RssAnon of /proc, looked at 10 times a
second.

  python bench/large_join.py [--params 1e9] [--mbit 100] [--round-s 180] [--folder DIR] [--copies]

`--copies`: the donor makes copies, as it does of small states. The joiner takes 8 bytes of memory a parameter.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from evidence import require
from torch import Tensor

from zeroband.config.outer import DilocoConfig
from zeroband.elastic.guardian.port import shake_hands
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.recovery.client import StateFetch, fetch_entry
from zeroband.elastic.recovery.donors import Donor, Inquiry
from zeroband.elastic.recovery.serving import StateServer
from zeroband.elastic.rounds.journal import Journal, JournalBounds
from zeroband.elastic.transport.dial import Dialler
from zeroband.kernels.codec import CODECS
from zeroband.outer.many_steps import without
from zeroband.outer.outer_optimizer import build_outer_optimizer
from zeroband.state.digest import digest_of
from zeroband.state.round_state import LiveState, RoundState, RoundUpdate

HOST = "127.0.0.1"
KEY = RunKey(b"b" * 32)
CODEC = CODECS["int8"]
SECTIONS = ("params", "momentum")
BYTES_A_VALUE = 4 * len(SECTIONS)
PLACES, PLACE = 16, 1 << 20
"""So many runs of so many values move in each round; they are encoded as the journal encodes pieces of a mean."""

PIECE_BYTES = 1 << 16

BUCKET_S = 0.5
"""The link makes good so much of the time in which nothing came, as when a loaded machine lets nobody run."""


def mapped(folder: Path, name: str, numel: int) -> Tensor:
    """(numel,) float32 of zeros that take no room until they are written to."""
    path = folder / f"{name}.f32"
    with path.open("wb") as file:
        file.truncate(4 * numel)
    return torch.from_file(str(path), shared=True, size=numel)


def places_of(numel: int) -> range:
    """Where the runs begin that move."""
    return range(0, numel - PLACE, max(numel // PLACES // PLACE, 1) * PLACE)


def digest_of_places(sections: Mapping[str, Tensor]) -> str:
    """One value for what moves."""
    return digest_of(*(s[at : at + PLACE] for s in sections.values() for at in places_of(s.numel())))


class Training:
    """A donor: a state that changes in every round, its journal, and what serving costs."""

    def __init__(self, folder: Path, numel: int) -> None:
        self.round = 0
        self.lock = threading.Lock()
        self.sections = {name: mapped(folder, name, numel) for name in SECTIONS}
        self.digest = ""
        self.lock_s = 0.0
        self._optimizer = build_outer_optimizer(DilocoConfig(type="diloco", inner_steps=1), CODEC)
        self.journal = Journal(folder, JournalBounds(4 * 3600.0, 40 * numel))

    def take_round(self) -> None:
        """Move the state by one round, as a member does."""
        round, numel = self.round + 1, self.sections["params"].numel()
        generator = torch.Generator().manual_seed(round)
        encoded = {at: CODEC.encode(torch.randn(PLACE, generator=generator)) for at in places_of(numel)}
        update, piece = self.journal.room(CODEC.encoded_size(numel)), CODEC.encoded_size(PLACE)
        for at, data in encoded.items():
            update[at // PLACE * piece :][:piece] = data
        asked_at_s = time.monotonic()
        with self.lock:
            self.lock_s += time.monotonic() - asked_at_s
            for at, data in encoded.items():
                params, momentum = (self.sections[name][at : at + PLACE] for name in SECTIONS)
                self._optimizer.apply(params, momentum, CODEC.decode(data, PLACE), outer_step=round)
            self.digest = digest_of_places(self.sections)
            self.round = round
        self.journal.add(RoundUpdate(round, update, {}, self.digest))

    def live_state(self) -> LiveState:
        return LiveState(self.round, {}, self.digest, self.sections, lock=self.lock, round_now=lambda: self.round)

    def copy_state(self) -> RoundState:
        with self.lock:
            copies = {name: section.clone() for name, section in self.sections.items()}
            return RoundState(self.round, {}, self.digest, copies)


def memory_bytes() -> int:
    """Memory of this process that is its own: what is mapped from files can be had back at any time."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


def donate(numel: int, round_s: float, folder: Path, *, copies: bool) -> None:
    """Train and serve until the standard input ends; then write what that cost."""
    training = Training(folder, numel)
    training.take_round()
    state = training.copy_state if copies else training.live_state
    server = StateServer(state, training.journal.await_entry, current_round=lambda: training.round)
    memory, is_over = Peak(), threading.Event()

    def answer(listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            connection.setblocking(False)
            what = asyncio.run(shake_hands(connection, KEY, callee="donor", is_sealed=True))
            server.take(connection, what.keys)

    def train() -> None:
        while not is_over.wait(round_s):
            training.take_round()

    with socket.create_server((HOST, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        threading.Thread(target=answer, args=(listener,), daemon=True).start()
        trainer = threading.Thread(target=train)
        trainer.start()
        threading.Thread(target=lambda: (sys.stdin.read(), is_over.set()), daemon=True).start()
        trainer.join()
    print(
        json.dumps({"more_bytes": memory.bytes - memory.before, "lock_s": training.lock_s, "round": training.round}),
        flush=True,
    )
    os._exit(0)


class Link:
    """Passes connections on to a donor, and what it answers at a rate that all of them share."""

    def __init__(self, port: int, bytes_per_s: float) -> None:
        self._port = port
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at_s = time.monotonic()
        self.passed_bytes = 0
        self._listener = socket.create_server((HOST, 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection((HOST, self._port))
            for one, other, is_limited in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._pass, args=(one, other, is_limited), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket, is_limited: bool) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(PIECE_BYTES):
                if is_limited:
                    self._await_turn(len(data))
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _await_turn(self, nbytes: int) -> None:
        with self._lock:
            self.passed_bytes += nbytes
            self._free_at_s = max(self._free_at_s, time.monotonic() - BUCKET_S) + nbytes / self._bytes_per_s
            left_s = self._free_at_s - time.monotonic()
        time.sleep(max(0.0, left_s))


def expected(numel: float, bytes_per_s: float, round_s: float) -> tuple[float, int]:
    """Seconds until a joiner is in, and rounds that it replays: those of the fetch, then those of that time, and on."""
    entry_s = CODEC.encoded_size(1 << 20) / (1 << 20) * numel / bytes_per_s
    at_s, replayed = BYTES_A_VALUE * numel / bytes_per_s, 0
    require(entry_s < round_s, f"a round's entry takes {entry_s:.0f} s, a round {round_s:.0f} s: it never gets in")
    while replayed < int(at_s / round_s):
        at_s, replayed = at_s + entry_s, replayed + 1
    return at_s, replayed


def replay(entry: RoundUpdate, have: Sequence[tuple[int, int]], sections: Mapping[str, Tensor]) -> None:
    """Take a round's outer step, but for the values [start, stop) that have it, without room for all of its mean."""
    optimizer = build_outer_optimizer(DilocoConfig(type="diloco", inner_steps=1), CODEC)
    numel, piece_bytes = sections["params"].numel(), CODEC.encoded_size(PLACE)
    for at, data in zip(range(0, numel, PLACE), entry.update.split(piece_bytes), strict=True):
        stop = min(at + PLACE, numel)
        mean = CODEC.decode(data, stop - at)
        for part, of_mean in without(have, [(slice(at, stop), slice(0, stop - at))]):
            params, momentum = (sections[name][part] for name in SECTIONS)
            optimizer.apply(params, momentum, mean[of_mean], outer_step=entry.round)


class Peak:
    """The most memory of its own that this process has from here on."""

    def __init__(self) -> None:
        self.before = self.bytes = memory_bytes()
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            self.bytes = max(self.bytes, memory_bytes())
            time.sleep(0.1)


def join(donor: Donor, numel: int, folder: Path) -> tuple[float, list[int], int]:
    """Join; the seconds until the state was there, the rounds that its parts were of, and the last one replayed."""
    dialler = Dialler(KEY, "joiner", is_sealed=True)
    sections = {name: torch.zeros(numel) for name in SECTIONS}
    journal = Journal(folder, JournalBounds(4 * 3600.0, 40 * numel))
    began_at_s = time.monotonic()
    state = StateFetch(dialler, sections, mixes=True).fetch([donor])
    fetched_s, round = time.monotonic() - began_at_s, state.round
    inquiry = Inquiry("state", dialler, None)
    digest = state.state_digest
    while round < max([inquiry.lead_of([donor], None)[1].round, *(newest for *_, newest in state.later)]):
        round += 1
        entry = fetch_entry([donor], dialler, round, journal.room)
        replay(entry, [(start, stop) for start, stop, newest in state.later if newest >= round], sections)
        digest = entry.state_digest
    require(digest_of_places(sections) == digest, f"the state after round {round} is not the donor's")
    for section in sections.values():
        for at in places_of(numel):
            section[at : at + PLACE] = 0
        require(
            not any(part.any() for part in section.split(PLACE)),
            f"the state after round {round} has values that the donor's has not",
        )
    return fetched_s, sorted({state.round, *(newest for *_, newest in state.later)}), round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=1e9)
    parser.add_argument("--mbit", type=float, default=100)
    parser.add_argument("--round-s", type=float, default=180)
    parser.add_argument("--folder", type=Path, help="on a disk; None: in the system's folder of temporary files")
    parser.add_argument("--copies", action="store_true")
    parser.add_argument("--donate", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    numel, bytes_per_s = int(arguments.params), arguments.mbit * 1e6 / 8
    torch.set_num_threads(1)
    if numel < PLACES * PLACE:
        parser.error(f"--params {arguments.params:g} are too few")
    if arguments.donate:
        return donate(numel, arguments.round_s, arguments.donate, copies=arguments.copies)
    for times in (1, 10):
        take_s, replayed = expected(times * numel, bytes_per_s, times * arguments.round_s)
        print(
            f"expected for {times * numel / 1e9:g}B, rounds of {times * arguments.round_s:g} s: in after {take_s:.0f} s"
        )
        print(f"  ({replayed} rounds replayed, {replayed * times * numel / 1e9:.0f} GB of journal)", flush=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        options = ["--params", str(numel), "--round-s", str(arguments.round_s), *(["--copies"] * arguments.copies)]
        donor = subprocess.Popen(
            [sys.executable, __file__, "--donate", folder, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert donor.stdin is not None and donor.stdout is not None
        link, began_at_s = Link(int(donor.stdout.readline()), bytes_per_s), time.monotonic()
        memory, joiner_cpu_s = Peak(), time.process_time()
        fetched_s, parts_of, newest = join(Donor("donor", HOST, link.port), numel, Path(folder))
        took_s, joiner_cpu_s = time.monotonic() - began_at_s, time.process_time() - joiner_cpu_s
        cpu_s = _cpu_s(donor.pid)
        donor.stdin.close()
        cost = json.loads(donor.stdout.readline())
        donor.wait()
    print(f"in after {took_s:.0f} s: state there after {fetched_s:.0f} s, its parts of rounds {parts_of}, ", end="")
    print(f"replayed up to {newest}; {link.passed_bytes / 1e9:.2f} GB over the link")
    of_state, joined_bytes = cost["more_bytes"] / (BYTES_A_VALUE * numel), memory.bytes - memory.before
    print(f"joiner: {joined_bytes / 1e6:.0f} MB of memory, {joined_bytes / (BYTES_A_VALUE * numel):.1%} of the state; ")
    print(f"  {joiner_cpu_s:.0f} s of processor, those of the link included")
    print(f"donor: {cost['more_bytes'] / 1e6:.0f} MB of memory more at its peak, {of_state:.1%} of the state; ", end="")
    print(
        f"{cpu_s:.0f} s of processor, its own rounds included; waited {cost['lock_s']:.3f} s for the state to be free"
    )


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
