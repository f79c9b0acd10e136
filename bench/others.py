"""The native all-reduce beside what other packages offer for the same: hivemind's averaging and torchft's collectives.

Every way averages the same float32 values over loopback, in turns in the same processes. What decides who takes part is
not in the time: hivemind's search for a group (5 s by default), torchft's quorum and commit, our epochs.

  native     the engine, one stream between any two nodes
  gloo       float32, the sum; what the ratios are against
  hivemind   its AllReduceRunner, which its averager runs once it has found a group, with each of its compressions
             (uint8 blocks need bitsandbytes); always encrypted, through a process of its own (p2pd) at each node
  torchft    its process group on gloo (a sum), the same in a process of its own ("baby"), and its manager's all-reduce
             (the mean); its quantised all-reduce needs a GPU

The other packages are optional, and a row says what it lacks: `pip install hivemind torchft` in an environment of one's
own, beside this one.

  python bench/others.py [--mb 64] [--worlds 2 4] [--repeats 7]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from datetime import timedelta
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import all_reduce
import numpy
import torch
import torch.distributed as dist
from all_reduce import DEADLINE_S, Job, Lap, Taken, Way, heading, job_of, measure, values_of, work
from evidence import count, finite, require

TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
COMPRESSIONS = {
    "fp32": "NoCompression",
    "fp16": "Float16Compression",
    "uint8": "Uniform8BitQuantization",
    "uint8 blocks": "BlockwiseQuantization",
}
WAYS = (
    "gloo/1",
    "native/int8/1/sealed/all/cubic",
    "native/int8/1/open/all/cubic",
    "native/fp32/1/open/all/cubic",
    *(f"hivemind/{name}" for name in COMPRESSIONS),
    *(f"torchft/{kind}" for kind in ("gloo", "baby gloo", "managed", "quantised")),
)
GIVES_SUM = ("gloo/1", "torchft/gloo", "torchft/baby gloo")


def why_not(way: str) -> str | None:
    """What keeps a way from being measured here; None if nothing does."""
    package, kind, *_ = way.split("/")
    try:
        if package in ("hivemind", "torchft"):
            import_module(package)
        if kind == "uint8 blocks":
            import_module("bitsandbytes")
    except (ImportError, OSError) as error:
        return f"{error}; pip install {getattr(error, 'name', None) or package}"
    if package == "hivemind":
        return _why_not_compressed(kind)
    return _why_not_quantised() if way == "torchft/quantised" else None


def _why_not_compressed(name: str) -> str | None:
    """A reducer drops the members whose parts it cannot read, and calls that an average."""
    compressions: Any = import_module("hivemind.compression")
    compression, values = getattr(compressions, COMPRESSIONS[name])(), torch.randn(1 << 16)
    try:
        compression.extract(compression.compress(values, compressions.CompressionInfo.from_tensor(values)))
    except (TypeError, ValueError, RuntimeError) as error:
        return f"it cannot read what it wrote, with NumPy {numpy.__version__}: {error}"
    return None


def _why_not_quantised() -> str:
    if torch.accelerator.is_available():
        return "its kernels and NCCL want a GPU for each process; this measures processors"
    try:
        groups, collectives = import_module("torchft.process_group"), import_module("torchft.collectives")
        average = dist.ReduceOp(dist.ReduceOp.AVG)
        collectives.allreduce_quantized([torch.zeros(1024)], average, groups.ProcessGroupDummy(0, 1))
    except (ImportError, RuntimeError) as error:
        return f"needs a GPU: {error}"
    raise AssertionError("torchft's quantised all-reduce ran without a GPU: measure it here")


# -- one process ------------------------------------------------------------------------------------------------------


class Hivemind:
    """One node of hivemind: its p2pd and the event loop that serves it."""

    def __init__(self, job: Job, store: dist.Store) -> None:
        self.job = job
        self.compressions: Any = import_module("hivemind.compression")
        self.libp2p: Any = import_module("hivemind.p2p")
        self.averaging: Any = import_module("hivemind.averaging.allreduce")
        self.loop = import_module("hivemind.utils.asyncio").switch_to_uvloop()
        threading.Thread(target=self.loop.run_forever, name="hivemind", daemon=True).start()
        known = [address for rank in range(job.rank) for address in store.get(f"maddrs{rank}").decode().split()]
        self.p2p = self.run(self.libp2p.P2P.create(initial_peers=known, nat_port_map=False, auto_nat=False))
        addresses = self.run(self.p2p.get_visible_maddrs())
        store.set(f"peer{job.rank}", self.p2p.peer_id.to_base58())
        store.set(f"maddrs{job.rank}", " ".join(str(address) for address in addresses))
        peers = [store.get(f"peer{rank}").decode() for rank in range(job.world)]
        self.peers = tuple(self.libp2p.PeerID.from_base58(peer) for peer in peers)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(DEADLINE_S)

    async def runner(self, name: str, number: int, values: torch.Tensor) -> Any:
        """One all-reduce, ready for what the others send."""
        namespace = f"{name}{number}"
        runner = self.averaging.AllReduceRunner(
            p2p=self.p2p,
            servicer_type=self.averaging.AllReduceRunner,
            prefix=namespace,
            group_id=namespace.encode(),
            tensors=[values],
            ordered_peer_ids=self.peers,
            peer_fractions=(1 / self.job.world,) * self.job.world,
            compression=getattr(self.compressions, COMPRESSIONS[name])(),
        )
        await runner.add_p2p_handlers(self.p2p, namespace=namespace)
        return runner

    async def forget(self, runner: Any, name: str, number: int) -> None:
        await runner.remove_p2p_handlers(self.p2p, namespace=f"{name}{number}")


class Worker(all_reduce.Worker):
    """Averages in the other packages' ways too, and looks how far the means are off."""

    def __init__(self, job: Job) -> None:
        self.readies: dict[str, Callable[[], None]] = {}
        """What comes before a repetition and is not measured."""
        self.closings: list[Callable[[], None]] = []
        self.stores: list[dist.TCPStore] = []
        """Served as long as they are held."""
        super().__init__(job)
        self.children = _children()
        self.result.share_memory_()  # a process of torchft's works on it
        self.exact = torch.zeros(job.numel if job.rank == 0 else 0, dtype=torch.float64)
        for rank in range(job.world if job.rank == 0 else 0):
            self.exact += values_of(rank, job.numel) / job.world

    def lap(self, name: str) -> Lap:
        self.result.zero_()
        self.readies.get(name, lambda: None)()
        lap = super().lap(name)
        if self.job.rank > 0:
            return lap
        mean = self.result.double() / (self.job.world if name in GIVES_SUM else 1)
        return replace(lap, error=((mean - self.exact).norm() / self.exact.norm()).item())

    def cpu_s(self) -> float:
        return super().cpu_s() + sum(_cpu_s_of(child) for child in self.children)

    def close(self) -> None:
        for closing in self.closings:
            closing()
        super().close()

    def _prepare(self, way: Way) -> Callable[[], None]:
        match way.parts:
            case ["hivemind", compression]:
                return self._prepare_hivemind(compression)
            case ["torchft", "managed"]:
                return self._prepare_managed()
            case ["torchft", kind]:
                return self._prepare_torchft(kind)
            case _:
                return super()._prepare(way)

    @cached_property
    def hivemind(self) -> Hivemind:
        node = Hivemind(self.job, self.store)
        self.closings.append(lambda: node.run(node.p2p.shutdown()))
        return node

    def _prepare_hivemind(self, compression: str) -> Callable[[], None]:
        node, numbers = self.hivemind, itertools.count()
        runners: list[Any] = []

        def ready() -> None:
            number = next(numbers)
            if runners:
                node.run(node.forget(runners.pop(), compression, number - 1))
            runners.append(node.run(node.runner(compression, number, self.values)))

        async def average() -> None:
            async for difference in runners[0]:
                torch.add(self.values, difference, out=self.result)
            assert not runners[0].banned_senders, "somebody's values are not in the mean"

        self.readies[f"hivemind/{compression}"] = ready
        return lambda: node.run(average())

    def _prepare_torchft(self, kind: str) -> Callable[[], None]:
        groups: Any = import_module("torchft.process_group")
        maker = groups.ProcessGroupBabyGloo if kind == "baby gloo" else groups.ProcessGroupGloo
        group = maker(timeout=timedelta(seconds=DEADLINE_S))
        store = f"{self._tcp_store(kind)}/{kind}"
        group.configure(store, f"{self.job.rank}", self.job.rank, self.job.world)
        self.closings.append(_kill_children if kind == "baby gloo" else group.shutdown)
        return lambda: self._reduce(group, dist.ReduceOp.SUM)

    def _reduce(self, group: Any, operation: Any) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        self.result.copy_(self.values)
        group.allreduce([self.result], options).wait()

    def _prepare_managed(self) -> Callable[[], None]:
        job = self.job
        torchft, groups = import_module("torchft"), import_module("torchft.process_group")
        if job.rank == 0:
            lighthouse: Any = import_module("torchft.coordination").LighthouseServer(
                bind="127.0.0.1:0", min_replicas=job.world, join_timeout_ms=10_000
            )
            self.closings.append(lighthouse.shutdown)
            self.store.set("lighthouse", lighthouse.address().rpartition(":")[2])
        own_store = self._serve()
        timeout = timedelta(seconds=DEADLINE_S)
        manager: Any = torchft.Manager(
            groups.ProcessGroupGloo(timeout=timeout),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=job.world,
            use_async_quorum=False,
            timeout=timeout,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=own_store.port,
            lighthouse_addr=f"http://127.0.0.1:{self.store.get('lighthouse').decode()}",
            replica_id=f"{job.rank}",
            hostname="127.0.0.1",
            init_sync=False,
        )
        self.closings.append(partial(manager.shutdown, wait=False))
        group, commits = groups.ManagedProcessGroup(manager), itertools.count()

        def ready() -> None:
            if next(commits) > 0:
                assert manager.should_commit(), manager.errored()
            manager.start_quorum()

        self.readies["torchft/managed"] = ready
        return lambda: self._reduce(group, dist.ReduceOp.AVG)

    def _tcp_store(self, name: str) -> str:
        """Address of a store that the first node serves."""
        if self.job.rank == 0:
            self.store.set(f"store of {name}", f"127.0.0.1:{self._serve().port}")
        return self.store.get(f"store of {name}").decode()

    def _serve(self) -> dist.TCPStore:
        self.stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        return self.stores[-1]


def _kill_children() -> None:
    """Of multiprocessing; one that ends because its pipe did prints a traceback."""
    for child in multiprocessing.active_children():
        child.kill()


def _children() -> list[Path]:
    """The folder in /proc of every process that this one started."""
    stats = [(path, _stat(path)) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [path for path, stat in stats if stat and int(stat[1]) == os.getpid()]


def _stat(process: Path) -> list[str]:
    """What the kernel says of a process, from its state on; empty if it is gone."""
    try:
        return process.joinpath("stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _cpu_s_of(process: Path) -> float:
    stat = _stat(process)
    return (int(stat[11]) + int(stat[12])) / TICKS_A_SECOND if stat else 0.0


# -- all of them ------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", type=job_of, help=argparse.SUPPRESS)
    parser.add_argument("--mb", type=count, default=64, help="MB (2^20 bytes) of float32 at each node")
    parser.add_argument("--worlds", type=count, nargs="+", default=[2, 4], help="nodes")
    parser.add_argument("--repeats", type=count, default=7, help="of each way, after one that warms up")
    arguments = parser.parse_args()
    if arguments.job:
        return work(Worker(arguments.job))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # torchft does not choose its address
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of what others call that torch will drop
    reasons = {way: why_not(way) for way in WAYS}
    others = [reason for way, reason in reasons.items() if not way.startswith(("gloo", "native"))]
    require(None in others, f"no way of another package can be run here: {others[0]}")
    numel = arguments.mb << 18
    print(f"\n{arguments.mb} MB of float32 over loopback; {os.cpu_count()} cores, {load()}")
    heads = ("nodes", "way", "median s", "best s", "processor s", "gloo / way, medians", "bests")
    print(heading(*heads, "relative error of the mean"))
    for world in arguments.worlds:
        ways = [way for way, reason in reasons.items() if reason is None]
        taken = measure(world, numel, ways, repeats=arguments.repeats, program=__file__)
        for way, reason in reasons.items():
            what = row(taken[way], taken["gloo/1"]) if reason is None else f"not measured: {reason} |" + " |" * 5
            print(f"| {world} | {way} | {what}", flush=True)
    print(f"\nAfterwards {load()}")


def load() -> str:
    return f"load average {os.getloadavg()[0]:.1f}"


def row(one: Taken, gloo: Taken) -> str:
    ratios = f"{gloo.median_s / one.median_s:.2f} | {gloo.best_s / one.best_s:.2f}"
    error = finite(float("nan") if one.error is None else one.error, "the error of a mean")
    return f"{one.median_s:.3f} | {one.best_s:.3f} | {one.cpu_s:.2f} | {ratios} | {error:.2g} |"


if __name__ == "__main__":
    main()
