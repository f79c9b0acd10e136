"""Copies between host memory and a model's device, through memory that is pinned for a GPU.

`Copier` overlaps training: from host memory in a thread, from a GPU on a separate stream. The caller leaves the sources
unchanged until `finish`; forward and backward passes only read parameters. `host_copies` and `copy_over` are for an
outer step, which training waits for. `PendingNumbers` reads a few numbers that a device has yet to compute.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from zeroband.kernels.host_passes import copy_away
from zeroband.observe.log import get_logger

_log = get_logger(__name__)

Pairs = Sequence[tuple[Tensor, Tensor]]
"""(target, source) of each copy: of equal length, targets float32 on the CPU, sources on the device, of any type."""

PIECE_BYTES = 1 << 28
"""Most bytes to pin in one call of the driver; a multiple of the page size."""

STAGED = 1 << 23
"""Values of a piece that `copy_over` stages: long enough for the full rate of PCIe, small compared with a parameter."""


class Copier(Protocol):
    """Copies one batch of tensors at a time. Used by one thread."""

    def begin(self, pairs: Pairs) -> None:
        """Start copying the sources, after everything that this thread has queued on the device."""
        ...

    def finish(self) -> None:
        """Wait until the copy is complete; at once if none was started. Raises its error."""
        ...


def copier_for(device: torch.device, targets: Sequence[Tensor], stack: ExitStack) -> Copier:
    """Return a copier from a device into these targets and parts of them; `stack` releases its resources.

    `targets`: only what this rank writes; pinned for a GPU.
    """
    return GpuCopier(device, targets, stack) if device.type == "cuda" else HostCopier(stack)


class HostCopier:
    """Copies between host memory in one thread, holding neither the GIL nor torch's thread pool."""

    def __init__(self, stack: ExitStack) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="staging")
        self._running: Future[None] | None = None
        stack.callback(self._pool.shutdown)

    def begin(self, pairs: Pairs) -> None:
        arrays = [(target.numpy(), source.detach().cpu().dequantize().numpy()) for target, source in pairs]
        self._running = self._pool.submit(_copy_all, arrays)

    def finish(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.result()


def _copy_all(arrays: Sequence[tuple[Any, Any]]) -> None:
    for target, source in arrays:
        np.copyto(target, source)


class GpuCopier:
    """Copies from a GPU straight into the targets. `begin` blocks for those that the driver could not pin."""

    def __init__(self, device: torch.device, targets: Sequence[Tensor], stack: ExitStack) -> None:
        self._device = device
        self._pinned = PinnedMemory(device, targets, stack)
        if self._pinned.error:
            fields = {"cuda_error": self._pinned.error}
            _log.warning(
                "not all memory is pinned, so copies block training; node.shm_dir needs a memory file system, as "
                "/dev/shm is",
                extra={"fields": fields},
            )
        self._stream = torch.cuda.Stream(device)
        self._copied = torch.cuda.Event(blocking=True)
        stack.callback(self._stream.synchronize)  # runs before the targets are released

    def begin(self, pairs: Pairs) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                values = source.detach().dequantize()  # a copy in memory of this stream; itself if float32
                self._pinned.store(target, values)
                values.record_stream(self._stream)
        self._copied.record(self._stream)

    def finish(self) -> None:
        self._copied.synchronize()


def host_copies(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the values of each tensor in host memory, to be read only; from a GPU the next one travels meanwhile.

    A copy from a GPU lies in memory that torch pins and uses again, for two of the tensors at a time. A tensor on the
    CPU is yielded as it is.
    """
    held = None
    for tensor in tensors:
        coming = tensor.detach().to("cpu", non_blocking=tensor.is_cuda), _mark(tensor.device)
        if held is not None:
            yield _arrived(*held)
        held = coming
    if held is not None:
        yield _arrived(*held)


def _mark(device: torch.device) -> torch.cuda.Event | None:
    """Return an event after everything that this thread has queued on a GPU; None on the CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _arrived(copy: Tensor, event: torch.cuda.Event | None) -> Tensor:
    if event is not None:
        event.synchronize()
    return copy


def copy_over(source: Tensor, target: Tensor) -> None:
    """Copy host memory to a tensor on any device, in stream order. Shapes: both (n,), contiguous.

    `source`: float32; it may change when this returns. To a GPU in pieces through pinned memory: a copy from memory
    that is not pinned reaches a fraction of the rate of PCIe.
    """
    device = target.device
    if device.type != "cuda":
        copy_away(source, target)
        return
    rooms = [torch.empty(min(STAGED, source.numel()), dtype=torch.float32, pin_memory=True) for _ in range(2)]
    sent: list[torch.cuda.Event | None] = [None, None]
    for i, (part, to) in enumerate(zip(source.split(STAGED), target.split(STAGED), strict=True)):
        room = _arrived(rooms[i % 2][: part.numel()], sent[i % 2])
        copy_away(part, room)
        to.copy_(room if to.dtype == room.dtype else room.to(device, non_blocking=True), non_blocking=True)
        sent[i % 2] = _mark(device)


def to_device(source: Tensor, device: torch.device) -> Tensor:
    """Return host memory, (n,) float32, on a device; on the CPU the tensor itself."""
    if device.type != "cuda":
        return source.to(device)
    copy = torch.empty_like(source, device=device)
    copy_over(source, copy)
    return copy


class PinnedMemory:
    """Pinned host memory that a GPU copies to and from without the CPU.

    Pins only the pages of the given ranges, in pieces, so that earlier pieces stay pinned if the driver refuses one.
    No copy may cross the border of two pieces: `store` and `load` split copies there. `stack` unpins the pages, which
    must happen before the memory is unmapped: otherwise the driver considers later mappings there pinned. No-op on CPU.

    `ranges`: 1-D tensors on the CPU. A page belongs to one piece only.
    """

    def __init__(self, device: torch.device, ranges: Sequence[Tensor], stack: ExitStack) -> None:
        self.error = 0
        """The driver's error code if it refused a piece; 0: all are pinned."""
        self._borders: list[int] = []
        """Addresses of the pieces' borders, ascending."""
        if device.type != "cuda":
            return
        pieces = list(_pieces_of(ranges))
        self._borders = sorted({border for piece in pieces for border in piece})
        runtime: Any = torch.cuda.cudart()
        for start, stop in pieces:
            self.error = int(runtime.cudaHostRegister(start, stop - start, 0))
            if self.error:
                with contextlib.suppress(RuntimeError):  # clear the sticky error, else torch's next kernel reports it
                    torch.ones(1, device=device)
                return
            stack.callback(runtime.cudaHostUnregister, start)

    def store(self, target: Tensor, source: Tensor) -> None:
        """Copy from the device into a range, in stream order. Shapes: both (n,)."""
        sizes = self._cut(target)
        for to, part in zip(target.split(sizes), source.split(sizes), strict=True):
            to.copy_(part, non_blocking=True)

    def load(self, source: Tensor, device: torch.device) -> Tensor:
        """Copy a range to the device, (n,), in stream order."""
        target = torch.empty_like(source, device=device)
        sizes = self._cut(source)
        for to, part in zip(target.split(sizes), source.split(sizes), strict=True):
            to.copy_(part, non_blocking=True)
        return target

    def _cut(self, held: Tensor) -> list[int]:
        """Return the sizes of the parts between the borders within a range."""
        start, each = held.data_ptr(), held.element_size()
        first = bisect_right(self._borders, start)
        last = bisect_right(self._borders, start + held.numel() * each - 1)
        cuts = [0, *((border - start) // each for border in self._borders[first:last]), held.numel()]
        return [stop - begin for begin, stop in pairwise(cuts)]


def _pieces_of(ranges: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Yield the addresses [start, stop) of the ranges' pages, each page once, at most `PIECE_BYTES` at a time."""
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
    """Numbers that travel from a device to the host in stream order, so that a late read does not wait.

    `values`: (n,) of any float type.
    """

    def __init__(self, values: Tensor) -> None:
        self._held = values.detach().to("cpu", non_blocking=values.is_cuda)  # torch pins the target
        self._copied = torch.cuda.Event(blocking=True) if values.is_cuda else None
        if self._copied is not None:
            self._copied.record()
        self.ready_at_s = time.monotonic()
        """Monotonic time at which they arrived; for a GPU, at which `read` found them."""

    def read(self) -> list[float]:
        """Return the numbers once the device has computed them."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied, self.ready_at_s = None, time.monotonic()
        return self._held.tolist()
