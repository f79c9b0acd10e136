"""Copies that go on beside training: from host memory in a thread, from a GPU on a stream of its own.

Who begins one leaves its sources as they are until `finish`; forward and backward passes do, they only read parameters.
A few numbers that a device has still to compute are read with `Reading`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from zeroband.observe.log import get_logger

_log = get_logger(__name__)

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Target and source of each copy, of one length and float32; targets are on the CPU."""


class Copier(Protocol):
    """Copies one batch of tensors at a time. Owned by one thread."""

    def begin(self, pairs: Pairs) -> None:
        """Start to copy what the sources hold once all is done that this thread has asked for."""
        ...

    def finish(self) -> None:
        """Return when all that was begun is copied; at once where nothing was. Raises what went wrong in it."""
        ...


def copier_for(device: torch.device, targets: Sequence[Tensor], stack: ExitStack) -> Copier:
    """What copies tensors of a device into these targets and parts of them; `stack` gives back what it takes."""
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
    """Copies from a GPU straight into the targets, pinned if its driver lets them be; else `begin` waits for them."""

    def __init__(self, device: torch.device, targets: Sequence[Tensor], stack: ExitStack) -> None:
        self._device = device
        for target in targets:
            if code := pin(target, device):
                _log.warning("not pinned, so that training waits for copies", extra={"fields": {"cuda_error": code}})
                break
            stack.callback(unpin, target)
        self._stream = torch.cuda.Stream(device)
        self._copied = torch.cuda.Event(blocking=True)
        stack.callback(self._stream.synchronize)  # before the targets are given back

    def begin(self, pairs: Pairs) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source.detach(), non_blocking=True)
                source.record_stream(self._stream)
        self._copied.record(self._stream)

    def finish(self) -> None:
        self._copied.synchronize()


class Reading:
    """Numbers of a device, on their way to the host behind what it was given before: whoever asks late does not wait.

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


def pin(buffer: Tensor, device: torch.device) -> int:
    """Let a GPU copy to and from mapped host memory by itself. Returns the driver's error, 0 where it agrees."""
    runtime: Any = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.numel() * buffer.element_size(), 0))
    if code:
        with contextlib.suppress(RuntimeError):  # the runtime keeps the error, and torch takes it for its next kernel's
            torch.ones(1, device=device)
    return code


def unpin(buffer: Tensor) -> None:
    """Take back what `pin` did."""
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(buffer.data_ptr())
