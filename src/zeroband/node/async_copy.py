"""Copies that go on during training: from host memory in a thread, from a GPU on a separate stream.

Who begins one leaves its sources as they are until `finish`; forward and backward passes do, they only read parameters.
A few numbers that a device has still to compute are read with `PendingNumbers`.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from zeroband.observe.log import get_logger

_log = get_logger(__name__)

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Target and source of each copy, of one length and float32; targets are on the CPU."""

PIECE_BYTES = 1 << 28
"""Most bytes that a driver is asked to lock into memory at a time; a multiple of the page."""


class Copier(Protocol):
    """Copies one batch of tensors at a time. Owned by one thread."""

    def begin(self, pairs: Pairs) -> None:
        """Start to copy what the sources hold once all is done that this thread has asked for."""
        ...

    def finish(self) -> None:
        """Return when all that was begun is copied; at once where nothing was. Raises what went wrong in it."""
        ...


def copier_for(device: torch.device, targets: Sequence[Tensor], stack: ExitStack) -> Copier:
    """Return what copies tensors of a device into these targets and parts of them; `stack` gives back what it takes.

    `targets`: only what this rank writes; on a GPU they are locked into memory.
    """
    return GpuCopier(device, targets, stack) if device.type == "cuda" else HostCopier(stack)


class HostCopier:
    """Copies between host memory in one thread, without the interpreter's lock and without torch's pool of threads."""

    def __init__(self, stack: ExitStack) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="staging")
        self._running: Future[None] | None = None
        stack.callback(self._pool.shutdown)

    def begin(self, pairs: Pairs) -> None:
        arrays = [(target.numpy(), source.detach().cpu().numpy()) for target, source in pairs]
        self._running = self._pool.submit(_copy_all, arrays)

    def finish(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.result()


def _copy_all(arrays: Sequence[tuple[Any, Any]]) -> None:
    for target, source in arrays:
        np.copyto(target, source)


class GpuCopier:
    """Copies from a GPU straight into the targets, pinned as far as its driver agrees; `begin` waits for the rest."""

    def __init__(self, device: torch.device, targets: Sequence[Tensor], stack: ExitStack) -> None:
        self._device = device
        self._pinned = PinnedMemory(device, targets, stack)
        if self._pinned.error:
            fields = {"cuda_error": self._pinned.error}
            _log.warning("not all pinned, so that training waits for copies", extra={"fields": fields})
        self._stream = torch.cuda.Stream(device)
        self._copied = torch.cuda.Event(blocking=True)
        stack.callback(self._stream.synchronize)  # before the targets are given back

    def begin(self, pairs: Pairs) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                self._pinned.store(target, source.detach())
                source.record_stream(self._stream)
        self._copied.record(self._stream)

    def finish(self) -> None:
        self._copied.synchronize()


class PinnedMemory:
    """Mapped host memory that a GPU copies to and from without the CPU.

    Only pages of the ranges given are locked, in pieces, so that a driver that refuses one still serves those before.
    No copy may cross the border of two pieces: `store` and `load` cut copies there. `stack` unlocks the pages, which
    has to come before the memory is unmapped: the driver takes for locked what is mapped there later. On a CPU nothing
    is locked.

    `ranges`: 1-D tensors on the CPU. A page belongs to one piece only.
    """

    def __init__(self, device: torch.device, ranges: Sequence[Tensor], stack: ExitStack) -> None:
        self.error = 0
        """The driver's error where it refused a piece; 0: all are locked."""
        self._borders: list[int] = []
        """Addresses at which pieces begin or end, ascending."""
        if device.type != "cuda":
            return
        pieces = list(_pieces_of(ranges))
        self._borders = sorted({border for piece in pieces for border in piece})
        runtime: Any = torch.cuda.cudart()
        for start, stop in pieces:
            self.error = int(runtime.cudaHostRegister(start, stop - start, 0))
            if self.error:
                with contextlib.suppress(
                    RuntimeError
                ):  # the runtime keeps it, and torch takes it for its next kernel's
                    torch.ones(1, device=device)
                return
            stack.callback(runtime.cudaHostUnregister, start)

    def store(self, target: Tensor, source: Tensor) -> None:
        """Have a range filled from the device, behind what its current stream was given. Shapes: both (n,)."""
        sizes = self._cut(target)
        for to, part in zip(target.split(sizes), source.split(sizes), strict=True):
            to.copy_(part, non_blocking=True)

    def load(self, source: Tensor, device: torch.device) -> Tensor:
        """Return a range on the device, (n,), behind what its current stream was given."""
        target = torch.empty_like(source, device=device)
        sizes = self._cut(source)
        for to, part in zip(target.split(sizes), source.split(sizes), strict=True):
            to.copy_(part, non_blocking=True)
        return target

    def _cut(self, held: Tensor) -> list[int]:
        """Values of a range before each border that lies in it, and behind the last one."""
        start, each = held.data_ptr(), held.element_size()
        first = bisect_right(self._borders, start)
        last = bisect_right(self._borders, start + held.numel() * each - 1)
        cuts = [0, *((border - start) // each for border in self._borders[first:last]), held.numel()]
        return [stop - begin for begin, stop in pairwise(cuts)]


def _pieces_of(ranges: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Yield addresses [start, stop) of the ranges' pages, each page once, at most `PIECE_BYTES` at a time."""
    page = mmap.PAGESIZE
    spans: list[tuple[int, int]] = []
    for start, numel, each in sorted((held.data_ptr(), held.numel(), held.element_size()) for held in ranges):
        first, last = start // page * page, -(-(start + numel * each) // page) * page
        if numel == 0:
            continue
        if spans and first < spans[-1][1]:
            spans[-1] = spans[-1][0], max(last, spans[-1][1])
        else:
            spans.append((first, last))
    for first, last in spans:
        for start in range(first, last, PIECE_BYTES):
            yield start, min(start + PIECE_BYTES, last)


class PendingNumbers:
    """Numbers of a device, on their way to the host behind what it was given before: to ask late is not to wait.

    `values`: (n,) of any float type.
    """

    def __init__(self, values: Tensor) -> None:
        self._held = values.detach().to("cpu", non_blocking=values.is_cuda)  # from a GPU into pinned memory
        self._copied = torch.cuda.Event(blocking=True) if values.is_cuda else None
        if self._copied is not None:
            self._copied.record()
        self.ready_at_s = time.monotonic()
        """When they were there, by the process's monotonic clock; from a GPU, when they were found there."""

    def read(self) -> list[float]:
        """Return the numbers, once the device has come to them."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied, self.ready_at_s = None, time.monotonic()
        return self._held.tolist()
