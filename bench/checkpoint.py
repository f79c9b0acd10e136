"""What a checkpoint costs: the stall of the loop, the rate of writing, the time to restore; each beside a plain one.

    python bench/checkpoint.py [--config configs/14M.toml] [--repeats 7] [--steps 5] [--folder DIR]

One rank. The state is that of the trainer: parameters and both moments, float32. In turns, so that all see the same
noise of the machine: the copy of the same bytes (`Tensor.copy_` between buffers that were touched before), the time
that `Checkpoints` keeps the loop from training (`take`, then `wait_for_copy` when the next gradients are there), the
same where it is waited for at once, and `torch.distributed.checkpoint.async_save` of the same tensors, with its
defaults and with a stager that takes the same memory again for each checkpoint, as ours does. The copy over DCP's stall
bounds every way that copies once and waits for it. What a copy takes from the gradients beside it is in no stall but in
the window: 2 x `--steps` inner steps of the real loop with a checkpoint in their middle, against as many without.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.distributed.checkpoint as dcp
from evidence import count
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from zeroband.checkpoint.loading import restore
from zeroband.checkpoint.own_state import views_of
from zeroband.checkpoint.storage import open_storage
from zeroband.config import RunConfig, load_config
from zeroband.elastic.membership.departure import Departure
from zeroband.node.mesh import init_local_mesh
from zeroband.node.sharding import local_part
from zeroband.observe.events import NoEvents
from zeroband.runtime.build import TrainerParts, build_trainer
from zeroband.runtime.checkpointing import Checkpoints
from zeroband.runtime.loop import forward_backward
from zeroband.runtime.single_node import SingleNode
from zeroband.state.flat import FlatLayout

PIECE = 16 << 20
RUN = "bench"
DCP, DCP_REUSED = "DCP async_save", "DCP async_save, staging reused"


@dataclass
class Times:
    """Seconds of each kind, one value a turn."""

    taken: dict[str, list[float]] = field(default_factory=dict[str, list[float]])

    def measure(self, kind: str, work: Callable[[], object]) -> None:
        from_s = time.perf_counter()
        work()
        self.taken.setdefault(kind, []).append(time.perf_counter() - from_s)

    def extend(self, kind: str, work: Callable[[], object]) -> None:
        """Add to the value of the newest turn."""
        from_s = time.perf_counter()
        work()
        self.taken[kind][-1] += time.perf_counter() - from_s

    def median(self, kind: str) -> float:
        return statistics.median(self.taken[kind])

    def best(self, kind: str) -> float:
        return min(self.taken[kind])

    def row(self, kind: str, plain: str, size: int) -> str:
        rates = f"{size / self.median(kind) / 1e6:.0f}"
        ratios = f"{self.median(kind) / self.median(plain):.2f} | {self.best(kind) / self.best(plain):.2f}"
        return f"| {kind} | {1000 * self.median(kind):.0f} | {1000 * self.best(kind):.0f} | {rates} | {ratios} |"


class Bench:
    """A node that trains alone, its snapshots, and the same tensors as DCP takes them."""

    def __init__(self, config: RunConfig, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        local = init_local_mesh()
        stack.callback(local.close)
        self.node: TrainerParts = build_trainer(config, local, Departure(1.0))
        self.node.node_dir.mkdir(parents=True, exist_ok=True)
        world = SingleNode(self.node, NoEvents())
        self.hooks = world.outer
        self.snapshots = Checkpoints(self.node, world, NoEvents())
        stack.callback(self.snapshots.close, waits=True)
        self.layout = FlatLayout.of(self.node.model)
        self.times = Times()
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
        )
        self._stager = DefaultStager(options)
        stack.callback(self._stager.close)

    def state(self) -> dict[str, Tensor]:
        named = {name: local_part(parameter.data) for name, parameter in self.node.model.named_parameters()}
        return {**named, **{name: local_part(moment) for name, moment in self.node.inner.named_moments().items()}}

    @property
    def state_bytes(self) -> int:
        return 12 * self.layout.numel

    def train(self, steps: int) -> None:
        for step in range(steps):
            tokens = self.gradients()
            self.snapshots.wait_for_copy()
            self.hooks.sync_gradients(step, tokens)
            self.node.inner.step()
            self.node.inner.zero_grad()
            self.hooks.sync_parameters(step, ends_round=True)

    def gradients(self) -> int:
        """The passes of one inner step; how many tokens were learned from."""
        self.node.loader.assign(self.hooks.progress.assigned["alone"])
        return forward_backward(self.node).tokens

    def pass_step(self) -> None:
        """Go on by a step without computing one, so that the next checkpoint is another one."""
        self.hooks.sync_gradients(0, 0)
        self.hooks.sync_parameters(0, ends_round=True)

    def take(self) -> None:
        assert self.snapshots.take((self.node.node_id,), waits=False), "the writer is still busy"

    def await_writer(self) -> None:
        writer = self.snapshots._writer
        assert writer is not None
        writer.await_free()

    def stalls(self, repeats: int) -> None:
        sources = list(self.state().values())
        targets = [torch.zeros_like(tensor, device="cpu") for tensor in sources]

        self.save_by_dcp(self.folder / "dcp", self._stager)  # takes the memory that it then takes again
        self._pending.result()
        shutil.rmtree(self.folder / "dcp")

        def copy() -> None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)

        for turn in range(repeats):
            self.times.measure("copy of the same bytes", copy)
            self.pass_step()
            self.times.measure("zeroband, waited for at once", self.take_at_once)
            self.await_writer()
            self.pass_step()
            self.times.measure("zeroband", self.take)
            self.gradients()
            self.times.extend("zeroband", self.snapshots.wait_for_copy)
            self.await_writer()
            for kind, stager in ((DCP, None), (DCP_REUSED, self._stager)):
                path = self.folder / f"dcp{turn}"
                self.times.measure(kind, partial(self.save_by_dcp, path, stager))
                self._pending.result()
                shutil.rmtree(path)

    def take_at_once(self) -> None:
        self.take()
        self.snapshots.wait_for_copy()

    def save_by_dcp(self, path: Path, stager: DefaultStager | None) -> None:
        saving = dcp.async_save(self.state(), checkpoint_id=path, async_stager=stager)
        self._pending = cast(Future[object], saving)

    def windows(self, repeats: int, steps: int) -> None:
        for _ in range(repeats):
            self.times.measure("steps alone", partial(self.train, 2 * steps))

            def around() -> None:
                self.train(steps)
                self.take()
                self.train(steps)

            self.times.measure("steps with a checkpoint", around)
            self.await_writer()

            def around_dcp() -> None:
                self.train(steps)
                self.save_by_dcp(self.folder / "dcp", self._stager)
                self.train(steps)

            self.times.measure("steps with DCP async_save", around_dcp)
            self._pending.result()
            shutil.rmtree(self.folder / "dcp")

    def disk(self, repeats: int) -> None:
        """Write as many bytes plainly, one file, synced."""
        data, path = memoryview(bytes(PIECE)), self.folder / "plain"

        def write() -> None:
            with path.open("wb", buffering=0) as file:
                for _ in range(self.state_bytes // PIECE):
                    file.write(data)
                os.fsync(file.fileno())

        for _ in range(repeats):
            self.times.measure("plain write and fsync", write)
            self.pass_step()
            self.take_at_once()
            self.times.measure("zeroband, taken to durable", self.await_writer)

    def restores(self, repeats: int) -> None:
        """Restore everything, and read the same files plainly; both from the disk, and again from the page cache."""
        storage = open_storage(str(self.folder / "checkpoints"), RUN)
        flat = {"params": torch.zeros(self.layout.numel)}
        moments = {name: torch.zeros(self.layout.numel) for name in ("exp_avg", "exp_avg_sq")}
        views = views_of(self.layout.slots, moments)
        newest = self.folder / "checkpoints" / RUN / f"step_{self.hooks.progress.inner_step:08d}"
        files = [path for path in newest.rglob("*") if path.is_file()]
        target = bytearray(max(path.stat().st_size for path in files))

        def read() -> None:
            for path in files:
                with path.open("rb", buffering=0) as file:
                    file.readinto(target)

        def take_up() -> None:
            found = restore(storage, self.layout.slots, flat)
            assert found is not None
            found.read_inner("bench", views)

        for _ in range(repeats):
            for kind, work in (("plain read", read), ("zeroband, verified", take_up)):
                forget(files)
                self.times.measure(f"{kind}, from the disk", work)
                self.times.measure(f"{kind}, from the page cache", work)


def forget(files: list[Path]) -> None:
    """Have the kernel drop what it holds of files."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def opened(arguments: argparse.Namespace) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name, ExitStack() as stack:
        settings = {
            "run.id": RUN,
            "run.dir": f"{name}/runs",
            "node.id": "bench",
            "data.source.type": "synthetic",
            "data.seq_length": "256",
            "train.total_steps": "100000",
            "train.batch_size": "4",
            "train.micro_bs": "4",
            "train.dtype": "float32",
            "ckpt.path": f"{name}/checkpoints",
            "ckpt.keep_last": "1",
        }
        model = tomllib.loads(Path(arguments.config).read_text(encoding="utf-8"))["model"]
        settings |= {f"model.{key}": str(value) for key, value in model.items()}
        flags = [f"--{key}={value}" for key, value in settings.items()]
        yield Bench(load_config(flags), Path(name), stack)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/14M.toml")
    parser.add_argument("--repeats", type=count, default=7)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--folder", default=None)
    arguments = parser.parse_args()
    with opened(arguments) as bench:
        bench.train(1)
        bench.take_at_once()  # starts everything that starts once
        bench.await_writer()
        bench.stalls(arguments.repeats)
        if arguments.steps:
            bench.windows(max(3, arguments.repeats // 2), arguments.steps)
        bench.disk(arguments.repeats)
        bench.restores(arguments.repeats)
        size, times = bench.state_bytes, bench.times
        print(f"{bench.layout.numel / 1e6:.1f} M parameters, {size / 1e6:.0f} MB of state, {bench.node.local.device}\n")
        print("| | median ms | best ms | MB/s | ratio of medians | of bests |\n|---|---|---|---|---|---|")
        for plain, ours in (
            ("copy of the same bytes", ("zeroband", "zeroband, waited for at once", DCP, DCP_REUSED)),
            ("steps alone", ("steps with a checkpoint", "steps with DCP async_save")),
            ("plain write and fsync", ("zeroband, taken to durable",)),
            ("plain read, from the disk", ("zeroband, verified, from the disk",)),
            ("plain read, from the page cache", ("zeroband, verified, from the page cache",)),
        ):
            for kind in (plain, *ours) if plain in times.taken else ():
                print(times.row(kind, plain, size))
        for dcp_kind in (DCP, DCP_REUSED):
            print(f"\n| over the stall of {dcp_kind} | of medians | of bests |\n|---|---|---|")
            for kind in ("zeroband", "zeroband, waited for at once", "copy of the same bytes"):
                of_medians = times.median(kind) / times.median(dcp_kind)
                print(f"| {kind} | {of_medians:.2f} | {times.best(kind) / times.best(dcp_kind):.2f} |")


if __name__ == "__main__":
    main()
