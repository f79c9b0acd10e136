"""What an outer step costs the processor, and where that goes: beside a flat all-reduce by hand, in turns in one run.

ours      zeroband.DiLoCoOptimizer: the store, the guardian, the engine over loopback, sealed, int8, SGD with Nesterov
gloo      outer - inner in one flat tensor, gloo's all-reduce of it in float32, torch.optim.SGD with Nesterov, and back
before    `ours` of another checkout whose C++ is built (--against)
torchft   its DiLoCo, where the package is installed; it is not by default (bench/others.py has its collectives)

Nodes are processes of one rank, whose inner steps change nothing and are not measured. A turn is one outer step of all
nodes of a side; the other sides stand still meanwhile, but for the guardians. Processor time is the trainer's, with all
of its threads, until the journal has the round. Parts of a step are measured on the first node of `ours`; encoding,
decoding and hashing are those of the exchange, each measured alone on as many values.

    python bench/outer_step.py [--millions 25 100] [--nodes 2] [--turns 7] [--against /path/to/checkout]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from evidence import count, require
from torch import Tensor, nn

OURS, GLOO, BEFORE = "ours", "gloo", "before"
WIDTH = 1024
DEADLINE_S = 120.0
REST = "in no part"
WARM_UP_TURNS = 3
KEPT_ROUNDS = 2
"""In the journal, so that it is full when the turns count: memory that a machine has never touched costs more."""

LR, MOMENTUM = 0.7, 0.9

Lap = dict[str, Any]
"""What a node says of one turn: `cpu_s`, `wall_s`, `rss_mb`, and the processor seconds of `parts`."""


def shapes_of(numel: int) -> list[tuple[int, ...]]:
    """Matrices, each with a vector, as layers have them; the last one takes what is left."""
    shapes: list[tuple[int, ...]] = []
    while numel >= WIDTH * WIDTH + WIDTH:
        shapes += [(WIDTH, WIDTH), (WIDTH,)]
        numel -= WIDTH * WIDTH + WIDTH
    return [*shapes, (numel,)] if numel else shapes


def start_of(numel: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [0.02 * torch.randn(shape, generator=generator) for shape in shapes_of(numel)]


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class Walk:
    """What a node learns in a phase: another small piece of noise in each, added to all of its parameters."""

    def __init__(self, rank: int, parameters: Sequence[Tensor]) -> None:
        self._noise = 1e-3 * torch.randn(WIDTH * WIDTH + 4096, generator=torch.Generator().manual_seed(1 + rank))
        self._parameters, self._turn = parameters, 0

    @torch.no_grad()
    def step(self) -> None:
        self._turn += 1
        first = 37 * self._turn % 4096
        for parameter in self._parameters:
            flat = parameter.view(-1)
            for part in flat.split(WIDTH * WIDTH):
                part.add_(self._noise[first : first + part.numel()])


# -- ours -------------------------------------------------------------------------------------------------------------


class Parts:
    """Processor seconds, by part of an outer step: of this process while it is in a call, less what is nested in it."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._nested: list[float] = []

    @contextmanager
    def measured(self, name: str, clock: Callable[[], float] = time.process_time) -> Iterator[None]:
        self._nested.append(0.0)
        began = clock()
        try:
            yield
        finally:
            took = clock() - began
            self.spent[name] += took - self._nested.pop()
            if self._nested:
                self._nested[-1] += took

    def watch(self, owner: Any, attribute: str, name: str) -> None:
        """Measure a method of a class, or a function of a module, from now on."""
        inner = getattr(owner, attribute)

        def call(*args: Any, **options: Any) -> Any:
            with self.measured(name):
                return inner(*args, **options)

        setattr(owner, attribute, call)

    def take(self) -> dict[str, float]:
        spent, self.spent = dict(self.spent), defaultdict(float)
        return spent


def watch_all(parts: Parts) -> list[Any]:
    """Measure the parts of an outer step; the journals that were written to."""
    from zeroband.elastic.rounds import exchange, runner
    from zeroband.elastic.rounds.audit import Auditor
    from zeroband.elastic.rounds.elastic_device_mesh import ElasticDeviceMesh
    from zeroband.elastic.rounds.journal import Journal
    from zeroband.elastic.rounds.outer_state import OuterState
    from zeroband.outer.diloco import DiLoCo
    from zeroband.outer.merge import MixMerge

    parts.watch(MixMerge, "write", "contribution")
    parts.watch(exchange.MeanExchange, "load", "finite check")
    parts.watch(ElasticDeviceMesh, "reduce_mean", "exchange")
    parts.watch(Auditor, "audit", "audit")
    parts.watch(runner, "digest_of", "digest of the result")
    parts.watch(DiLoCo, "step", "outer step")
    parts.watch(OuterState, "compute_digest", "digest of the state")
    for name in ("restart", "receive"):
        parts.watch(MixMerge, name, "write-back")
    for name in ("announce_ready", "await_turn", "vote", "await_verdict"):
        parts.watch(ElasticDeviceMesh, name, "store and waits")
    parts.watch(exchange.MeanExchange, "conclude", "conclude")
    journals: list[Any] = []
    record = Journal.record

    def recorded(journal: Any, *args: Any, **options: Any) -> None:
        """Pack at once, so that the time of the thread that does is this part's alone."""
        journals[:] = [journal]
        with parts.measured("journal"):
            record(journal, *args, **options)
            journal.settle()

    Journal.record = recorded  # type: ignore[method-assign]
    return journals


class Ours:
    """A node of the drop-in optimizer, whose inner optimizer does nothing."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        import zeroband
        from zeroband.kernels import native
        from zeroband.kernels.codec import CODECS

        self._parts, rank = Parts(), job["rank"]
        watch_all(self._parts)
        self.parameters = [nn.Parameter(part) for part in start_of(job["numel"])]
        self._optimizer = zeroband.DiLoCoOptimizer(
            params=[(f"layers.{place}", parameter) for place, parameter in enumerate(self.parameters)],
            batch_size=1,
            inner_steps=1,
            inner_optimizer=partial(torch.optim.SGD, lr=0.0),
            store=job["store"],
            settings={
                "run.id": job["side"],
                "run.token": "bench" * 8,
                "run.dir": job["folder"],
                "node.id": f"node{rank}",
                "elastic.start_nodes": job["nodes"],
                "elastic.journal_gb": KEPT_ROUNDS * 1.02e-9 * job["numel"],
            },
        )
        self._codec, self._library = CODECS["int8"], native.load()
        self._alone = 0.001 * torch.randn(job["numel"] // job["nodes"])

    def lap(self) -> Lap:
        self._parts.take()
        self._optimizer.step()
        parts, report = self._parts.take(), self._optimizer.last_round
        assert report is not None, "a founder is in each round"
        told = {name: getattr(report, f"{name}_s") for name in ("wait", "transfer", "apply")}
        return {"parts": parts, "members": len(report.members), "told": told, "digest": report.state_digest}

    def alone(self) -> dict[str, float]:
        """Processor seconds of what the exchange does for a shard."""
        found, encoded, total = dict[str, float](), self._codec.encode(self._alone), torch.zeros_like(self._alone)
        kind, numel = (self._codec.number, -1), total.numel()
        for name, work in {
            "encode": lambda: self._library.zb_encode(*kind, self._alone.data_ptr(), numel, encoded.data_ptr()),
            "decode": lambda: self._library.zb_decode(*kind, encoded.data_ptr(), numel, total.data_ptr()),
            "add": lambda: self._codec.add(encoded, 0.5, total),
        }.items():
            work()
            began = time.process_time()
            work()
            found[name] = time.process_time() - began
        return found

    def close(self) -> None:
        self._optimizer.close()


# -- by hand ----------------------------------------------------------------------------------------------------------


class ByHand:
    """DiLoCo as one writes it for nodes that never fail: everything in flat tensors."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=DEADLINE_S)
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        store = dist.FileStore(f"{job['folder']}/gloo", job["nodes"])
        self._group, self._nodes = gloo(store, job["rank"], job["nodes"], options), job["nodes"]
        self._inner = torch.cat([part.view(-1) for part in start_of(job["numel"])])
        self._outer = nn.Parameter(self._inner.clone())
        self._outer.grad = torch.zeros_like(self._inner)
        self._optimizer = torch.optim.SGD([self._outer], lr=LR, momentum=MOMENTUM, nesterov=True)
        self.parameters = [self._inner]

    @torch.no_grad()
    def lap(self) -> Lap:
        assert self._outer.grad is not None
        torch.sub(self._outer, self._inner, out=self._outer.grad)
        self._group.allreduce([self._outer.grad]).wait()
        self._outer.grad.div_(self._nodes)
        self._optimizer.step()
        self._inner.copy_(self._outer)
        return {"members": self._nodes}

    def alone(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        os._exit(0)  # gloo's threads take their time


def work(job: Mapping[str, Any]) -> None:
    """One node of a side: a line on stdin asks for a turn, a line of JSON answers."""
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    node = ByHand(job) if job["side"] == GLOO else Ours(job)
    walk = Walk(job["rank"], [parameter.data for parameter in node.parameters])
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        if line.strip() == "alone":
            print(json.dumps(node.alone()), file=answers, flush=True)
            continue
        walk.step()
        cpu_s, began_s, faults = time.process_time(), time.monotonic(), page_faults()
        lap = node.lap()
        lap |= {"cpu_s": time.process_time() - cpu_s, "wall_s": time.monotonic() - began_s, "rss_mb": resident_mb()}
        lap["faults"] = page_faults() - faults
        if "parts" in lap:
            lap["parts"][REST] = lap["cpu_s"] - sum(lap["parts"].values())
        print(json.dumps(lap), file=answers, flush=True)
    node.close()


# -- all of them ------------------------------------------------------------------------------------------------------


class Side:
    """The nodes of one way to take outer steps."""

    def __init__(self, name: str, sources: Path, job: Mapping[str, Any], stack: ExitStack) -> None:
        self.name, self.laps = name, list[list[Lap]]()
        env = {**os.environ, "PYTHONPATH": str(sources), "OMP_NUM_THREADS": str(job["threads"])}
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="zeroband-bench-"))
        self._nodes = [
            subprocess.Popen(
                [sys.executable, __file__, "--job", json.dumps({**job, "side": name, "rank": rank, "folder": folder})],
                env=env,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for rank in range(job["nodes"])
        ]
        stack.callback(self._close)
        self._answers()  # all are members

    def ask(self, what: str) -> list[Lap]:
        for node in self._nodes:
            assert node.stdin is not None
            node.stdin.write(f"{what}\n")
            node.stdin.flush()
        return self._answers()

    def _answers(self) -> list[Lap]:
        said: list[Lap] = []
        for node in self._nodes:
            assert node.stdout is not None
            line = node.stdout.readline()
            require(bool(line), f"a node of {self.name!r} ended with {node.poll()}")
            said.append(json.loads(line))
        return said

    def turn(self) -> None:
        laps = self.ask("turn")
        require(all(lap["members"] == len(laps) for lap in laps), f"nodes of {self.name!r} stepped without the others")
        require(len({lap.get("digest") for lap in laps}) == 1, f"nodes of {self.name!r} hold other states")
        self.laps.append(laps)

    def median(self, what: str) -> float:
        """Of all turns that count and all nodes."""
        return statistics.median(lap[what] for laps in self.laps[WARM_UP_TURNS:] for lap in laps)

    def least(self, what: str) -> float:
        return min(lap[what] for laps in self.laps[WARM_UP_TURNS:] for lap in laps)

    def of_first(self, what: str, name: str) -> float:
        """Median of a figure of the first node."""
        return statistics.median(self._of_first(what, name))

    def least_of_first(self, what: str, name: str) -> float:
        return min(self._of_first(what, name))

    def _of_first(self, what: str, name: str) -> list[float]:
        return [laps[0][what].get(name, 0.0) for laps in self.laps[WARM_UP_TURNS:]]

    def names(self, what: str) -> list[str]:
        found = {name: None for laps in self.laps for name in laps[0].get(what, {})}
        return sorted(found, key=lambda name: name == REST)

    def _close(self) -> None:
        for node in self._nodes:
            with suppress(BrokenPipeError):
                if node.stdin is not None:
                    node.stdin.close()
        for node in self._nodes:
            try:
                node.wait(30)
            except subprocess.TimeoutExpired:
                node.kill()
                node.wait()


def measure(millions: float, options: argparse.Namespace) -> list[Side]:
    """Outer steps of all sides in turns, the first one changing."""
    from zeroband.elastic.store.local_server import RedisServer

    here = Path(__file__).resolve().parents[1] / "src"
    sources = {OURS: here, GLOO: here}
    if options.against is not None:
        sources[BEFORE] = options.against.resolve() / "src"
    with ExitStack() as stack:
        url = stack.enter_context(RedisServer()).url
        job = {"numel": round(millions * 1e6), "nodes": options.nodes, "threads": options.threads, "store": url}
        sides = [Side(name, where, job, stack) for name, where in sources.items()]
        for turn in range(WARM_UP_TURNS + options.turns):
            for side in sides if turn % 2 else reversed(sides):
                side.turn()
        ends = {side.laps[-1][0]["digest"] for side in sides if side.name != GLOO}
        require(len(ends) == 1, "the two versions came to other states")
        show(millions, sides, sides[0].ask("alone")[0])
    return sides


def show(millions: float, sides: Sequence[Side], alone: Mapping[str, float]) -> None:
    by_name = {side.name: side for side in sides}
    gloo = by_name[GLOO]
    print(
        f"\n{millions:g} M parameters, {len(gloo.laps[0])} nodes, {len(gloo.laps) - WARM_UP_TURNS} turns\n\n"
        "| way | processor ms, median | least | to gloo's | wall ms | to gloo's | page faults | resident MB, a turn |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for side in sides:
        first, last = (statistics.median(lap["rss_mb"] for lap in side.laps[at]) for at in (WARM_UP_TURNS, -1))
        grown = (last - first) / max(1, len(side.laps) - 1 - WARM_UP_TURNS)
        cpu_s, wall_s = side.median("cpu_s"), side.median("wall_s")
        print(
            f"| {side.name} | {1e3 * cpu_s:.0f} | {1e3 * side.least('cpu_s'):.0f} | {cpu_s / gloo.median('cpu_s'):.2f} "
            f"| {1e3 * wall_s:.0f} | {wall_s / gloo.median('wall_s'):.2f} | {side.median('faults'):.0f} "
            f"| {last:.0f}, {grown:+.1f} |"
        )
    if find_spec("torchft") is None:
        print("| torchft | not installed | | | | | | |")
    show_parts([side for side in sides if side.name != GLOO], alone)


def show_parts(sides: Sequence[Side], alone: Mapping[str, float]) -> None:
    """Where the processor time goes, and what of the time that training stands still is in no metric of a node."""

    def row(name: str, spent_s: Sequence[float]) -> None:
        print(f"| {name} | {' | '.join(f'{1e3 * each:.1f}' for each in spent_s)} |")

    titles = [f"{side.name}, {which}" for side in sides for which in ("median", "least")]
    print(f"\n| part, processor ms | {' | '.join(titles)} |\n|---|{'---|' * len(titles)}")
    for name in dict.fromkeys(name for side in sides for name in side.names("parts")):
        row(name, [each("parts", name) for side in sides for each in (side.of_first, side.least_of_first)])
    print("\nalone, ms, of a shard: " + ", ".join(f"{name} {1e3 * spent:.1f}" for name, spent in alone.items()))
    for side in sides:
        told = {name: side.of_first("told", name) for name in side.names("told")}
        rest_s = side.median("wall_s") - sum(told.values())
        named = ", ".join(f"outer/{name}_s {1e3 * spent:.0f}" for name, spent in told.items())
        print(f"{side.name}, ms of wall: {named}, in no metric but outer/blocked_s {1e3 * rest_s:.0f}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, nargs="+", default=[25.0], help="of parameters")
    parser.add_argument("--nodes", type=count, default=2)
    parser.add_argument("--turns", type=count, default=7, help="that count, after 3 others")
    parser.add_argument("--threads", type=count, default=1, help="of each node, for torch and the outer step")
    parser.add_argument("--against", type=Path, help="another checkout, whose C++ is built")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        return work(json.loads(options.job))
    require(options.nodes > 1, "one node exchanges nothing")
    for millions in options.millions:
        measure(millions, options)


if __name__ == "__main__":
    main()
