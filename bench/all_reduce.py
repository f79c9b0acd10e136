"""The native all-reduce beside gloo's, in one run: what a codec costs, on one machine, over slow long links.

codecs      encode and decode-and-add of each codec on one core, beside memcpy of the same float32 values
loopback    256 MB of float32 over loopback, 2 and 4 processes: where the processor is the limit
links       namespaces with links of a rate and a round trip (root): where the link is the limit, beside iperf3 too
robust      combinations that bear liars, in turns with the mean: what outer.robust costs the processor
audit       reductions whose owners are audited, in turns with others: what that costs the processor
messages    reductions of next to nothing over loopback: what a message costs the processor
accuracy    relative error of the mean against float64, for 2 to 16 nodes, beside the schemes of earlier systems

  python bench/all_reduce.py [codecs] [loopback] [robust] [audit] [links] [messages] [accuracy]
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
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from evidence import count, require_known
from wan import Wan, iperf_mbit

from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.membership.records import RoundPlan
from zeroband.elastic.rounds.audit import Auditor, drawers
from zeroband.elastic.rounds.elastic_device_mesh import ElasticDeviceMesh
from zeroband.elastic.transport.base import Gathering, RoundRequest, Transfer
from zeroband.elastic.transport.engine import Engine, Operation, State
from zeroband.elastic.transport.handshake import NO_KEYS, StreamKeys
from zeroband.elastic.transport.links import Links
from zeroband.elastic.transport.shape import piece_bytes, route_of, shape_of
from zeroband.kernels import native
from zeroband.kernels.codec import CODECS
from zeroband.kernels.keyed_hash import PartHashes
from zeroband.kernels.robust import PIECE, Robustly, RobustRule

DEADLINE_S = 300.0
LEAST_S = 6
"""Of a transfer with int8 over links that are used in full; iperf3 takes as long, from its first byte."""


ROBUST = {
    "clip": RobustRule("clip"),
    "trimmed": RobustRule("trimmed", trim=0.25),
    "centered_clip": RobustRule("centered_clip", iterations=1),
}


@dataclass(frozen=True)
class Way:
    """One way to average: `native/CODEC/STREAMS/sealed|open/FORM/CONGESTION` or `gloo/LANES`.

    FORM is all, ring, audited, drawn (an audit for which no draw hits), or one of ROBUST.
    """

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
    """After one to warm up; with none, that one counts."""
    ways: tuple[str, ...]


@dataclass(frozen=True)
class Lap:
    """One repetition at one node."""

    began_at_s: float
    ended_at_s: float
    cpu_s: float
    staging_bytes: int | None = None
    """The most that the engine's frames in transit took; None where there is no engine."""
    error: float | None = None
    """Relative, of the mean against float64; None where nobody looked."""


def values_of(rank: int, numel: int) -> torch.Tensor:
    """What a node averages. Shape: (numel,) float32."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)) * 1e-3


@dataclass
class EngineMesh:
    """What an audit needs of a node of one rank."""

    engine: Engine
    rank: int
    operation: Operation

    def is_so(self, known: bool) -> bool:
        return known

    def gather(self, request: RoundRequest, gathering: Gathering) -> Transfer:
        lengths, world = gathering.lengths, len(gathering.lengths)
        running = self.engine.gather(
            replace(self.operation, lane=gathering.number),
            lengths,
            self.rank,
            range(world),
            route_of(self.rank, range(world)),
            request.sent,
            request.result,
            chunk_bytes=piece_bytes(max(lengths)),
        )
        state = running.wait(DEADLINE_S)
        running.close()
        assert state == State.DONE, state
        return Transfer(len(request.sent), request.result.numel(), took_s=0.0)


# -- one process ------------------------------------------------------------------------------------------------------


class Worker:
    """Averages in every way, in turns, and writes down when it began and ended."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.store = dist.FileStore(f"{job.folder}/store", job.world)
        self.store.set_timeout(timedelta(seconds=DEADLINE_S))
        self.values = values_of(job.rank, job.numel)
        self.result = torch.zeros(job.numel)
        self.round = 0
        self.engines: dict[str, Engine] = {}
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
        _, codec, streams, sealing, form, congestion = way.parts
        engine = self.engines[way.name] = Engine(threads=1)
        links = Links(engine, RunKey(b""), sealing == "sealed")
        self._connect(way, engine, links, int(streams), sealing == "sealed")
        for peer in range(job.world):
            engine.set_congestion(peer, congestion)
        shape = replace(shape_of(job.numel, CODECS[codec], [1 / job.world] * job.world), is_ring=form == "ring")
        numbers, rule = itertools.count(1), ROBUST.get(form)
        members = tuple(f"n{rank}#1" for rank in range(job.world))
        mesh = EngineMesh(engine, job.rank, Operation(1, 0, 1, 1))
        chance = {"audited": 1.0, "drawn": 0.0}.get(form)
        auditor = None
        if chance is not None:
            auditor = Auditor(cast("ElasticDeviceMesh", mesh), CODECS[codec], None, lambda *_: chance)
        first, last = shape.bounds[job.rank], shape.bounds[job.rank + 1]

        def run() -> None:
            number = next(numbers)
            operation = mesh.operation = Operation(1, number << 16, 1, 1)
            robust = None if rule is None else Robustly(rule, job.world)
            hashes = None if auditor is None else PartHashes.of(auditor.key, job.world, first, last, shape.chunk_numel)
            reduction = engine.start(
                operation,
                shape,
                job.rank,
                range(job.world),
                self.values,
                self.result,
                robust=robust,
                hashes=hashes,
            )
            state = reduction.wait(DEADLINE_S)
            reduction.close()
            assert state == State.DONE, state
            if auditor is not None:
                plan = RoundPlan(number, 1, 1, members, (1,) * job.world)
                request = RoundRequest(plan, members[job.rank], self.values, self.result)
                told, _ = auditor.audit(request, Transfer(0, 0, took_s=0.0, borders=shape.bounds, hashes=hashes))
                assert not told.is_refused

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
        engine.add_stream(peer, connection, StreamKeys(*ends) if is_sealed else NO_KEYS)

    def lap(self, name: str) -> Lap:
        """Once, together with the others."""
        engine = self.engines.get(name)
        self.barrier()
        if engine is not None:
            engine.forget_peak()
        cpu_s, began_at_s = self.cpu_s(), time.monotonic()
        self.runs[name]()
        ended_at_s = time.monotonic()
        return Lap(began_at_s, ended_at_s, self.cpu_s() - cpu_s, None if engine is None else engine.peak_bytes)

    def measure(self) -> dict[str, list[Lap]]:
        """Of every way, its repetitions; one more, which warms up, comes before where there are any."""
        laps: dict[str, list[Lap]] = {name: [] for name in self.job.ways}
        for name in [*self.job.ways] * (1 + self.job.repeats):
            laps[name].append(self.lap(name))
        self.barrier()
        return {name: values[1:] or values for name, values in laps.items()}

    def cpu_s(self) -> float:
        """Of the processor, so far."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()


def work(worker: Worker) -> None:
    laps = {name: [asdict(lap) for lap in values] for name, values in worker.measure().items()}
    Path(worker.job.folder, f"{worker.job.rank}.json").write_text(json.dumps(laps))
    worker.barrier()
    worker.close()
    os._exit(0)  # gloo's threads take their time


# -- all of them ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Taken:
    """Of the repetitions of one way."""

    median_s: float
    best_s: float
    cpu_s: float
    """Of all processes, median."""
    staging_bytes: int | None
    """The most at any node in any repetition."""
    error: float | None
    """Of the last repetition, where the first node looked."""


def job_of(text: str) -> Job:
    """What `measure` hands to a process."""
    record: dict[str, Any] = json.loads(text)
    record["ways"] = tuple(record["ways"])
    return Job(**record)


def measure(
    world: int,
    numel: int,
    ways: Sequence[str],
    *,
    repeats: int,
    host: Callable[[int], str] = lambda rank: "127.0.0.1",
    prefix: Callable[[int], list[str]] = lambda rank: [],
    program: str = __file__,
) -> dict[str, Taken]:
    """Run the ways in turns in `world` processes of a program that takes `--job`."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [
                    *prefix(rank),
                    *(sys.executable, program, "--job"),
                    json.dumps(asdict(Job(folder, rank, world, host(rank), numel, repeats, tuple(ways)))),
                ],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(world)
        ]
        try:
            for process in processes:
                assert process.wait() == 0
        finally:
            for process in processes:  # of one that failed the others would wait
                process.kill()
        laps = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]
    return {way: _taken([[Lap(**lap) for lap in one[way]] for one in laps]) for way in ways}


def _taken(laps: Sequence[Sequence[Lap]]) -> Taken:
    """`laps`: of every node, of every repetition."""
    rounds = list(zip(*laps, strict=True))
    spans = [max(lap.ended_at_s for lap in r) - min(lap.began_at_s for lap in r) for r in rounds]
    cpu = [sum(lap.cpu_s for lap in r) for r in rounds]
    staging = [lap.staging_bytes for r in rounds for lap in r if lap.staging_bytes is not None]
    error = laps[0][-1].error
    return Taken(statistics.median(spans), min(spans), statistics.median(cpu), max(staging, default=None), error)


def heading(*columns: str) -> str:
    return "\n| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|"


def loopback() -> None:
    numel = 64 << 20
    print("\n256 MB of float32 over loopback, one thread for each process\n")
    heads = ("nodes", "way", "median s", "best s", "processor s", "gloo / way, medians", "bests")
    print(heading(*heads, "peak staging bytes for each value"))
    for world in (2, 4):
        kinds = ("int8/1/open", "int8/1/sealed", "int4/1/open", "fp32/1/open")
        ways = ["gloo/1", *(f"native/{kind}/all/cubic" for kind in kinds)]
        taken = measure(world, numel, ways, repeats=7)
        for way, one in taken.items():
            ratio, best = taken["gloo/1"].median_s / one.median_s, taken["gloo/1"].best_s / one.best_s
            seconds = f"{one.median_s:.3f} | {one.best_s:.3f} | {one.cpu_s:.2f}"
            staging = "" if one.staging_bytes is None else f"{one.staging_bytes / numel:.2f}"
            print(f"| {world} | {way} | {seconds} | {ratio:.2f} | {best:.2f} | {staging} |", flush=True)


def audited_form() -> None:
    print("\nfloat32 over loopback, 4 nodes, one thread for each process, sealed, in turns\n")
    heads = (
        "codec",
        "values",
        "processor s, all nodes",
        "drawn only",
        "audited",
        "more",
        "bytes that a node sends more",
    )
    print(heading(*heads))
    world = 4
    for codec, numel in itertools.product(("int8", "int4", "fp32"), (1 << 20, 16 << 20)):
        ways = [f"native/{codec}/1/sealed/{form}/cubic" for form in ("all", "drawn", "audited")]
        plain, drawn, audited = measure(world, numel, ways, repeats=31).values()
        plan = RoundPlan(1, 1, 1, tuple(f"n{rank}#1" for rank in range(world)), (1,) * world)
        shown = (world - 1) * len(drawers(plan, numel)) * CODECS[codec].encoded_size(PIECE)
        sent = 2 * (world - 1) * CODECS[codec].encoded_size(numel) // world
        more, share = audited.cpu_s / plain.cpu_s - 1, shown / sent
        times = f"{plain.cpu_s:.4f} | {drawn.cpu_s:.4f} | {audited.cpu_s:.4f} | {more:+.1%}"
        print(f"| {codec} | {numel} | {times} | {shown} of {sent}, {share:.2%} |", flush=True)


def robust_forms() -> None:
    numel, world = 16 << 20, 4
    print("\n64 MB of float32 over loopback, 4 nodes, one thread for each process, int8, sealed\n")
    heads = ("form", "median s", "best s", "processor s, all nodes", "ns of processor more for each value of a node")
    print(heading(*heads))
    ways = [f"native/int8/1/sealed/{form}/cubic" for form in ("all", *ROBUST)]
    taken = measure(world, numel, ways, repeats=15)
    for way, one in taken.items():
        more_ns = (one.cpu_s - taken[ways[0]].cpu_s) / world / numel * 1e9
        print(f"| {way} | {one.median_s:.3f} | {one.best_s:.3f} | {one.cpu_s:.2f} | {more_ns:.2f} |", flush=True)


def messages() -> None:
    print("\nA block of int8 for each member over loopback, one stream between any two\n")
    print(heading("nodes", "form", "median ms", "processor ms, all nodes", "processor µs for each message"))
    for world in (2, 4, 8):
        ways = [f"native/int8/1/sealed/{form}/cubic" for form in ("all", "ring")]
        for way, one in measure(world, 256 * world, ways, repeats=50).items():
            each_us = one.cpu_s / (2 * world * (world - 1)) * 1e6
            print(f"| {world} | {way} | {one.median_s * 1e3:.2f} | {one.cpu_s * 1e3:.2f} | {each_us:.0f} |", flush=True)


def links(rates: Sequence[float], rtts: Sequence[float], worlds: Sequence[int], loss: float) -> None:
    heads = ("Mbit/s", "RTT ms", "loss %", "nodes", "iperf3", "way", "median s", "Mbit/s out", "of iperf3", "gloo/way")
    print(heading(*heads, "CPU s"))
    for rate, rtt, world in itertools.product(rates, rtts, worlds):
        numel = int(rate * 1e6 / 8 * LEAST_S / 2 * world / (world - 1)) // 256 * 256
        with Wan(world, rate_mbit=rate, rtt_ms=rtt, loss_percent=loss) as wan:
            iperf = iperf_mbit(wan, (4, 8), seconds=LEAST_S)
            forms = ("all",) if world == 2 else ("all", "ring")
            controls = ("cubic",) if loss == 0 else ("cubic", "bbr")
            native_ways = [
                f"native/int8/{streams}/sealed/{form}/{control}"
                for form, control, streams in itertools.product(forms, controls, (4, 8))
            ]
            there: dict[str, Any] = {"host": wan.address, "prefix": wan.prefix}
            taken = measure(world, numel, ["gloo/1", "gloo/8"], repeats=0, **there)  # 30 seconds and more each
            taken |= measure(world, numel, native_ways, repeats=2, **there)
        gloo_s = min(one.median_s for way, one in taken.items() if way.startswith("gloo"))
        for way, one in taken.items():
            size = 4 * numel if way.startswith("gloo") else CODECS["int8"].encoded_size(numel)
            mbit = 2 * (world - 1) / world * size * 8 / one.median_s / 1e6
            print(
                f"| {rate:g} | {rtt:g} | {loss:g} | {world} | {iperf:.0f} | {way} | {one.median_s:.2f} | {mbit:.0f} "
                f"| {mbit / iperf:.3f} | {gloo_s / one.median_s:.2f} | {one.cpu_s:.2f} |",
                flush=True,
            )


def codecs() -> None:
    torch.set_num_threads(1)  # memcpy is of one core, too
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
    print(heading("codec", "ratio", "instructions", "encode", "of memcpy", "decode and add", "of memcpy"))
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


# -- accuracy ---------------------------------------------------------------------------------------------------------

Quantise = Callable[[torch.Tensor], torch.Tensor]
"""What is left of values, (n,) float32, after they were encoded and decoded."""


def six_sigma(x: torch.Tensor) -> torch.Tensor:
    """Encode a whole tensor in uint8: 256 buckets within 3 sigma of the mean, the outermost for what lies beyond.

    A bucket stands for the mean of its values. INTELLECT-1's scheme, arXiv:2412.01152.
    """
    low, width = x.mean() - 3 * x.std(), (6 * x.std() / 256).clamp_min(1e-30)
    bucket = ((x - low) / width).floor().clamp(0, 255).long()
    ones = torch.ones_like(x, dtype=torch.float64)
    sums, counts = (torch.zeros(256, dtype=torch.float64).index_add_(0, bucket, v) for v in (x.double(), ones))
    return (sums / counts.clamp_min(1)).float()[bucket]


def min_max(x: torch.Tensor) -> torch.Tensor:
    """uint8 of a whole tensor: between its smallest and its largest value, rounded down."""
    low, width = x.min(), ((x.max() - x.min()) / 255).clamp_min(1e-30)
    return low + width * ((x - low) / width).floor().clamp(0, 255)


def all_to_all_of(quantise: Quantise, sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """Every owner adds the encoded parts, encodes the mean once, and all decode that."""
    return torch.cat(
        [quantise(sum_of([quantise(part) / len(sources) for part in parts])) for parts in _shards(sources)]
    )


def ring_of(quantise: Quantise, sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """A partial sum of shares is encoded by every member, the mean once by its owner."""
    means: list[torch.Tensor] = []
    for parts in _shards(sources):
        total = torch.zeros_like(parts[0])
        for part in parts[:-1]:
            total = quantise(total + part / len(sources))
        means.append(quantise(total + parts[-1] / len(sources)))
    return torch.cat(means)


def requantised_ring_of(quantise: Quantise, sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """The same, but the mean is encoded again at every hop on its way round: what the last member holds."""
    means = list(ring_of(quantise, sources).split(_shard_numel(sources)))
    for _ in range(len(sources) - 2):
        means = [quantise(mean) for mean in means]
    return torch.cat(means)


def _shard_numel(sources: Sequence[torch.Tensor]) -> int:
    return -(-sources[0].numel() // len(sources) // 256) * 256


def _shards(sources: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    """Of each owner, the part of every member."""
    return list(zip(*(source.split(_shard_numel(sources)) for source in sources), strict=True))


def sum_of(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part
    return total


def accuracy() -> None:
    n, worlds = 1 << 20, (2, 4, 8, 16)
    print("\nRelative error of the mean in %, against float64")
    kinds: dict[str, Callable[[torch.Generator], torch.Tensor]] = {
        "Gaussian": lambda g: torch.randn(n, generator=g),
        "heavy-tailed": lambda g: torch.randn(n, generator=g) / torch.rand(n, generator=g).clamp_min(1e-3),
        "mixed scale": lambda g: (
            torch.randn(n, generator=g) * 10 ** (6 * torch.rand(n // 4096, generator=g) - 6).repeat_interleave(4096)
        ),
    }
    ways: dict[str, Callable[[Sequence[torch.Tensor]], torch.Tensor]] = {}
    for codec in CODECS.values():
        quantise = lambda x, codec=codec: codec.decode(codec.encode(x), x.numel())  # noqa: E731
        ways[f"{codec.name} | all-to-all"] = partial(all_to_all_of, quantise)
        ways[f"{codec.name} | ring"] = partial(ring_of, quantise)
    ways["uint8, 6 sigma, bucket means | ring, encoded at every hop"] = partial(requantised_ring_of, six_sigma)
    ways["uint8, 6 sigma, bucket means | all-to-all"] = partial(all_to_all_of, six_sigma)
    ways["uint8, min-max, rounded down | ring, encoded at every hop"] = partial(requantised_ring_of, min_max)
    ways["uint8, min-max, rounded down | all-to-all"] = partial(all_to_all_of, min_max)
    print(heading("values", "encoding", "way", *(f"W={world}" for world in worlds)))
    for (kind, make), (way, average) in itertools.product(kinds.items(), ways.items()):
        errors: list[str] = []
        for world in worlds:
            generator = torch.Generator().manual_seed(world)
            sources = [make(generator) for _ in range(world)]
            exact = sum_of([source.double() for source in sources]) / world
            off = (average(sources).double() - exact).norm() / exact.norm()
            errors.append(f"{100 * off.item():.3g}")
        print(f"| {kind} | {way} | " + " | ".join(errors) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", nargs="*", default=["codecs", "loopback", "robust", "audit", "links", "messages", "accuracy"]
    )
    parser.add_argument("--job", type=job_of, help=argparse.SUPPRESS)
    parser.add_argument("--rates", type=float, nargs="+", default=[100, 1000], help="Mbit/s of the links")
    parser.add_argument("--rtts", type=float, nargs="+", default=[1, 80], help="ms")
    parser.add_argument("--worlds", type=count, nargs="+", default=[2, 4], help="nodes")
    parser.add_argument("--loss", type=float, default=0.0, help="percent of packets")
    arguments = parser.parse_args()
    if arguments.job:
        return work(Worker(arguments.job))
    require_known(parser, arguments.what, ("codecs", "loopback", "robust", "audit", "links", "messages", "accuracy"))
    for what in arguments.what:
        match what:
            case "codecs":
                codecs()
            case "loopback":
                loopback()
            case "links":
                links(arguments.rates, arguments.rtts, arguments.worlds, arguments.loss)
            case "robust":
                robust_forms()
            case "audit":
                audited_form()
            case "messages":
                messages()
            case _:
                accuracy()


if __name__ == "__main__":
    main()
