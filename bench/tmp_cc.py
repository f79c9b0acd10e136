"""The native all-reduce beside gloo's, in one run: what a codec costs, on one machine, over slow long links.

codecs      encode and decode-and-add of each codec on one core, beside memcpy of the same float32 values
loopback    256 MB of float32 over loopback, 2 and 4 processes: where the processor is the limit
links       namespaces with links of a rate and a round trip (root): where the link is the limit, beside iperf3 too
accuracy    relative error of the mean against float64, for 2 to 16 nodes

  python bench/all_reduce.py [codecs] [loopback] [links] [accuracy]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from wan import Wan, iperf_mbit

from zeroband.kernels import native
from zeroband.kernels.codec import CODECS
from zeroband.plane.engine import Engine, Operation, State
from zeroband.plane.handshake import OPEN, RunKey, StreamKeys
from zeroband.plane.links import Links
from zeroband.plane.shape import shape_of

DEADLINE_S = 300.0
LEAST_S = 3.0
"""Of a transfer with int8 over links that are used in full."""


@dataclass(frozen=True)
class Way:
    """One way to average: `native/CODEC/STREAMS/sealed|open/all|ring` or `gloo/LANES`."""

    name: str

    @property
    def parts(self) -> list[str]:
        return self.name.split("/")


@dataclass(frozen=True)
class Job:
    """What every process of a measurement does."""

    folder: str
    rank: int
    world: int
    host: str
    numel: int
    repeats: int
    ways: tuple[str, ...]


# -- one process ------------------------------------------------------------------------------------------------------


class Worker:
    """Averages in every way, in turns, and writes down when it began and ended."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.store = dist.FileStore(f"{job.folder}/store", job.world)
        self.store.set_timeout(timedelta(seconds=DEADLINE_S))
        generator = torch.Generator().manual_seed(job.rank)
        self.values = torch.randn(job.numel, generator=generator) * 1e-3
        self.result = torch.zeros(job.numel)
        self.round = 0
        self.runs = {name: self._prepare(Way(name)) for name in job.ways}

    def barrier(self) -> None:
        self.round += 1
        self.store.add(f"round{self.round}", 1)
        while self.store.add(f"round{self.round}", 0) < self.job.world:
            time.sleep(0.001)

    def _prepare(self, way: Way) -> Callable[[], None]:
        return self._prepare_gloo(way) if way.parts[0] == "gloo" else self._prepare_native(way)

    def _prepare_gloo(self, way: Way) -> Callable[[], None]:
        job, lanes = self.job, int(way.parts[1])
        gloo: Any = dist.ProcessGroupGloo
        groups: list[Any] = []
        for lane in range(lanes):
            options = gloo._Options()
            options._timeout = timedelta(seconds=DEADLINE_S)
            options._devices = [gloo.create_device(hostname=job.host)]
            groups.append(gloo(dist.PrefixStore(f"{way.name}{lane}", self.store), job.rank, job.world, options))

        def run() -> None:
            self.result.copy_(self.values)
            works = [g.allreduce([part]) for g, part in zip(groups, self.result.chunk(lanes), strict=True)]
            for work in works:
                work.wait()

        return run

    def _prepare_native(self, way: Way) -> Callable[[], None]:
        job = self.job
        _, codec, streams, sealing, form = way.parts
        engine = Engine(threads=1)
        links = Links(engine, RunKey(b""), sealing == "sealed", os.environ.get("ZB_CC", "bbr"))
        self._connect(way, engine, links, int(streams), sealing == "sealed")
        shape = replace(shape_of(job.numel, CODECS[codec], [1] * job.world), is_ring=form == "ring")
        numbers = itertools.count(1)

        def run() -> None:
            operation = Operation(1, next(numbers) << 16, 1, 1)
            reduction = engine.start(operation, shape, job.rank, range(job.world), self.values, self.result)
            state = reduction.wait(DEADLINE_S)
            reduction.close()
            assert state == State.DONE, state

        return run

    def _connect(self, way: Way, engine: Engine, links: Links, streams: int, is_sealed: bool) -> None:
        job = self.job
        with socket.create_server((job.host, 0), backlog=256) as listener:
            self.store.set(f"{way.name}port{job.rank}", str(listener.getsockname()[1]))
            for peer in range(job.rank):
                port = int(self.store.get(f"{way.name}port{peer}"))
                for stream in range(streams):
                    connection = socket.create_connection((self._host(peer), port))
                    connection.sendall(bytes([job.rank, stream]))
                    self._add(engine, links, peer, connection, stream, is_sealed)
            for _ in range(streams * (job.world - 1 - job.rank)):
                connection, _ = listener.accept()
                peer, stream = connection.recv(2, socket.MSG_WAITALL)
                self._add(engine, links, peer, connection, stream, is_sealed)

    def _host(self, peer: int) -> str:
        first, _, _ = self.job.host.rpartition(".")
        return self.job.host if self.job.host.startswith("127.") else f"{first}.{peer + 1}"

    def _add(
        self, engine: Engine, links: Links, peer: int, connection: socket.socket, stream: int, is_sealed: bool
    ) -> None:
        links.prepare(connection)
        ends = [bytes([a, b, stream]).ljust(32, b"k") for a, b in ((self.job.rank, peer), (peer, self.job.rank))]
        engine.add_stream(peer, connection, StreamKeys(*ends) if is_sealed else OPEN)

    def measure(self) -> dict[str, list[tuple[float, float, float]]]:
        """Of every way and repetition: begin, end and processor seconds."""
        times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in self.job.ways}
        for name in [*self.job.ways] + [*self.job.ways] * self.job.repeats:
            self.barrier()
            cpu, began_at_s = _cpu_s(), time.monotonic()
            self.runs[name]()
            times[name].append((began_at_s, time.monotonic(), _cpu_s() - cpu))
        self.barrier()
        return {name: values[1:] for name, values in times.items()}  # the first warms up


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def work(job: Job) -> None:
    worker = Worker(job)
    times = worker.measure()
    Path(job.folder, f"{job.rank}.json").write_text(json.dumps(times))
    worker.barrier()
    os._exit(0)  # gloo's threads take their time


# -- all of them ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Taken:
    """Of the repetitions of one way."""

    median_s: float
    best_s: float
    cpu_s: float
    """Of all processes, median."""


def measure(
    world: int,
    numel: int,
    ways: Sequence[str],
    *,
    repeats: int,
    host: Callable[[int], str] = lambda rank: "127.0.0.1",
    prefix: Callable[[int], list[str]] = lambda rank: [],
) -> dict[str, Taken]:
    """Run the ways in turns in `world` processes."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [
                    *prefix(rank),
                    *(sys.executable, __file__, "--job"),
                    json.dumps(asdict(Job(folder, rank, world, host(rank), numel, repeats, tuple(ways)))),
                ],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(world)
        ]
        for process in processes:
            assert process.wait() == 0
        times = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]
    taken: dict[str, Taken] = {}
    for way in ways:
        rounds = list(zip(*(one[way] for one in times), strict=True))
        spans = [max(end for _, end, _ in r) - min(begin for begin, _, _ in r) for r in rounds]
        cpu = [sum(seconds for _, _, seconds in r) for r in rounds]
        taken[way] = Taken(statistics.median(spans), min(spans), statistics.median(cpu))
    return taken


def _heading(*columns: str) -> str:
    return "\n| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|"


def loopback() -> None:
    numel = 64 << 20
    print("\n256 MB of float32 over loopback, one thread for each process\n")
    print(
        "| nodes | way | median s | best s | processor s | gloo / way, medians | bests |\n|---|---|---|---|---|---|---|"
    )
    for world in (2, 4):
        kinds = ("int8/1/open", "int8/1/sealed", "int4/1/open", "fp32/1/open")
        ways = ["gloo/1", *(f"native/{kind}/all" for kind in kinds)]
        taken = measure(world, numel, ways, repeats=7)
        for way, one in taken.items():
            ratio, best = taken["gloo/1"].median_s / one.median_s, taken["gloo/1"].best_s / one.best_s
            seconds = f"{one.median_s:.3f} | {one.best_s:.3f} | {one.cpu_s:.2f}"
            print(f"| {world} | {way} | {seconds} | {ratio:.2f} | {best:.2f} |", flush=True)


def links(rates: Sequence[float], rtts: Sequence[float], worlds: Sequence[int], loss: float) -> None:
    heads = ("Mbit/s", "RTT ms", "loss %", "nodes", "iperf3", "way", "median s", "Mbit/s out", "of iperf3", "gloo/way")
    print(_heading(*heads, "CPU s"))
    for rate, rtt, world in itertools.product(rates, rtts, worlds):
        numel = int(rate * 1e6 / 8 * LEAST_S / 2 * world / (world - 1)) // 256 * 256
        with Wan(world, rate_mbit=rate, rtt_ms=rtt, loss_percent=loss) as wan:
            iperf = iperf_mbit(wan, (4, 8))
            forms = ("all",) if world == 2 else ("all", "ring")
            native_ways = [f"native/int8/{streams}/sealed/{form}" for form in forms for streams in (4, 8, 16)]
            ways = native_ways
            taken = measure(world, numel, ways, repeats=3, host=wan.address, prefix=wan.prefix)
        gloo_s = min(one.median_s for way, one in taken.items())
        for way, one in taken.items():
            size = 4 * numel if way.startswith("gloo") else CODECS["int8"].encoded_size(numel)
            mbit = 2 * (world - 1) / world * size * 8 / one.median_s / 1e6
            print(
                f"| {rate:g} | {rtt:g} | {loss:g} | {world} | {iperf:.0f} | {way} | {one.median_s:.2f} | {mbit:.0f} "
                f"| {mbit / iperf:.3f} | {gloo_s / one.median_s:.2f} | {one.cpu_s:.2f} |",
                flush=True,
            )


def codecs() -> None:
    n, chunk = 16 << 20, 1 << 16
    x, y = torch.randn(n) * 1e-3, torch.zeros(n)
    library = native.load()

    def rate(run: Callable[[], object]) -> float:
        """Best of several, GB of float32 per second."""
        times: list[float] = []
        for _ in range(7):
            began_at_s = time.perf_counter()
            run()
            times.append(time.perf_counter() - began_at_s)
        return 4 * n / min(times) / 1e9

    memcpy = rate(lambda: torch.from_numpy(y.numpy()).copy_(x))
    print(f"\nGB of float32 per second on one core, pieces of {chunk} values; memcpy {memcpy:.1f}\n")
    print(_heading("codec", "ratio", "instructions", "encode", "of memcpy", "decode and add", "of memcpy"))
    for codec, (variant, name) in itertools.product(CODECS.values(), enumerate(native.variants())):
        size = codec.encoded_size(chunk)
        encoded = torch.zeros(size * (n // chunk), dtype=torch.uint8)
        pieces = [
            (x.data_ptr() + 4 * i, y.data_ptr() + 4 * i, encoded.data_ptr() + i // chunk * size)
            for i in range(0, n, chunk)
        ]

        def encode(codec=codec, variant=variant, pieces=pieces) -> None:
            for source, _, there in pieces:
                library.zb_encode(codec.number, variant, source, chunk, there)

        def add(codec=codec, variant=variant, pieces=pieces) -> None:
            for _, total, there in pieces:
                library.zb_add(codec.number, variant, there, chunk, 0.5, total)

        rates = rate(encode), rate(add)
        print(
            f"| {codec.name} | {codec.ratio:.2f} | {name} | "
            + " | ".join(f"{r:.1f} | {r / memcpy:.2f}" for r in rates)
            + " |"
        )


def accuracy() -> None:
    n = 1 << 20
    print("\nRelative error of the mean in %, all-to-all, against float64\n")
    kinds: dict[str, Callable[[torch.Generator], torch.Tensor]] = {
        "Gaussian": lambda g: torch.randn(n, generator=g),
        "heavy-tailed": lambda g: torch.randn(n, generator=g) / torch.rand(n, generator=g).clamp_min(1e-3),
        "mixed scale": lambda g: (
            torch.randn(n, generator=g) * 10 ** (6 * torch.rand(n // 4096, generator=g) - 6).repeat_interleave(4096)
        ),
    }
    print("| values | codec | " + " | ".join(f"W={w}" for w in (2, 4, 8, 16)) + " |\n|---|---|---|---|---|---|")
    for (kind, make), codec in itertools.product(kinds.items(), CODECS.values()):
        errors: list[str] = []
        for world in (2, 4, 8, 16):
            generator = torch.Generator().manual_seed(world)
            total, exact = torch.zeros(n), torch.zeros(n, dtype=torch.float64)
            for _ in range(world):
                x = make(generator)
                exact += x.double() / world
                total += codec.decode(codec.encode(x), n) / world
            mean = codec.decode(codec.encode(total), n).double()
            errors.append(f"{100 * ((mean - exact).norm() / exact.norm()).item():.3g}")
        print(f"| {kind} | {codec.name} | " + " | ".join(errors) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["codecs", "loopback", "links", "accuracy"])
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--rates", type=float, nargs="+", default=[100, 1000], help="Mbit/s of the links")
    parser.add_argument("--rtts", type=float, nargs="+", default=[1, 80], help="ms")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4], help="nodes")
    parser.add_argument("--loss", type=float, default=0.0, help="percent of packets")
    arguments = parser.parse_args()
    if arguments.job:
        record = json.loads(arguments.job)
        return work(Job(**{**record, "ways": tuple(record["ways"])}))
    for what in arguments.what:
        match what:
            case "codecs":
                codecs()
            case "loopback":
                loopback()
            case "links":
                links(arguments.rates, arguments.rtts, arguments.worlds, arguments.loss)
            case "accuracy":
                accuracy()
            case _:
                parser.error(f"{what} is none of codecs, loopback, links, accuracy")


if __name__ == "__main__":
    main()
