"""Copies beside training: when they are whole, and what becomes of a driver that refuses to pin."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from torch import Tensor

from zeroband.node import async_copy as copying
from zeroband.node.async_copy import GpuCopier, HostCopier, Reading, copier_for, pin, unpin

CPU = torch.device("cpu")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_host_copy_is_whole_when_it_is_finished(stack: ExitStack) -> None:
    copier = copier_for(CPU, [], stack)
    source, target = torch.nn.Parameter(torch.randn(100)), torch.zeros(100)
    for _ in range(2):
        copier.begin([(target[:60], source[:60]), (target[60:], source[60:])])
        copier.finish()
        assert torch.equal(target, source)
        target.zero_()
    copier.finish()  # nothing was begun
    assert not target.any()


def test_host_copy_goes_on_beside_the_thread_that_began_it(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    may_copy, copyto = threading.Event(), np.copyto

    def copy_when_told(target: np.ndarray, source: np.ndarray) -> None:
        assert may_copy.wait(10)
        copyto(target, source)

    monkeypatch.setattr(np, "copyto", copy_when_told)
    copier, target = HostCopier(stack), torch.zeros(3)
    copier.begin([(target, torch.ones(3))])
    assert not target.any()
    may_copy.set()
    copier.finish()
    assert target.all()


def test_host_copy_that_fails_says_so_when_it_is_finished(stack: ExitStack) -> None:
    copier = HostCopier(stack)
    copier.begin([(torch.zeros(3), torch.ones(4))])
    with pytest.raises(ValueError, match="could not broadcast"):
        copier.finish()
    copier.finish()


class Driver:
    """CUDA's runtime as far as pinning goes: it has room for so many buffers."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if len(self.pinned) == self.room:
            return 2
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0


def test_buffer_is_pinned_in_whole_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, buffers = Driver(room=1), [torch.zeros(5), torch.zeros(3)]
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    assert [pin(buffer, CPU) for buffer in buffers] == [0, 2]
    assert driver.pinned == {buffers[0].data_ptr(): 20}
    unpin(buffers[0])
    assert not driver.pinned


class Stream:
    """A stream of a GPU that is never done before it is asked to be."""

    def __init__(self) -> None:
        self.waits_for: list[Stream] = []
        self.is_done = True

    def wait_stream(self, other: Stream) -> None:
        self.waits_for.append(other)

    def synchronize(self) -> None:
        self.is_done = True

    def __enter__(self) -> Stream:
        self.is_done = False
        return self

    def __exit__(self, *_: object) -> None: ...


class Event:
    def __init__(self, *, blocking: bool) -> None:
        self.stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()


@pytest.mark.parametrize("room", [2, 1, 0])
def test_copies_from_a_gpu_follow_what_it_computes_and_pin_what_its_driver_takes(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, room: int, caplog: pytest.LogCaptureFixture
) -> None:
    driver, training, made = Driver(room), Stream(), list[Stream]()

    def make_stream(device: torch.device) -> Stream:
        made.append(Stream())
        return made[-1]

    for name, fake in {
        "cudart": lambda: driver,
        "Stream": make_stream,
        "Event": Event,
        "stream": lambda stream: stream,
        "current_stream": lambda device: training,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
    targets = [torch.zeros(4), torch.zeros(4)]
    copier = GpuCopier(CPU, targets, stack)
    assert len(driver.pinned) == room
    assert ("not pinned" in caplog.text) == (room < len(targets))
    copier.finish()  # nothing was begun
    copier.begin([(target, torch.ones(4)) for target in targets])
    (stream,) = made
    assert stream.waits_for == [training] and not stream.is_done
    copier.finish()
    assert stream.is_done and all(target.all() for target in targets)
    copier.begin([])
    stack.close()
    assert stream.is_done and not driver.pinned


@pytest.mark.gpu
@gpu
def test_gpu_copies_straight_into_pinned_memory_what_was_computed_before(stack: ExitStack) -> None:
    device = torch.device("cuda")
    target = torch.zeros(1 << 24)
    copier = GpuCopier(device, [target], stack)
    assert target.is_pinned()
    source, busy = torch.zeros(1 << 24, device=device), torch.randn(4096, 4096, device=device)
    for value in (1.0, 2.0):
        for _ in range(20):
            busy = busy @ busy * 1e-3  # the values come long after the copy was asked for
        source.fill_(value)
        copier.begin([(target, source)])
        busy = busy @ busy  # training goes on
        copier.finish()
        source.zero_()
        assert (target == value).all()


def test_reading_gives_what_was_computed_before_it_was_begun() -> None:
    values = torch.tensor([1.5, float("inf")], dtype=torch.float64)
    reading = Reading(values)
    assert reading.read() == reading.read() == [1.5, float("inf")]


@pytest.mark.gpu
@gpu
def test_reading_of_a_gpu_waits_for_it_when_it_is_asked_and_not_before() -> None:
    busy = torch.randn(4096, 4096, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            busy = busy @ busy * 1e-3
        reading = Reading(torch.stack([busy.isfinite().all().double()]))
        begun_at_s = reading.ready_at_s
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert reading.read() == [1.0]
    assert reading.ready_at_s > begun_at_s


@pytest.mark.gpu
@gpu
def test_memory_that_the_driver_refuses_to_pin_is_copied_to_all_the_same(stack: ExitStack) -> None:
    device = torch.device("cuda")
    target = torch.zeros(1 << 20)
    assert pin(target, device) == 0
    stack.callback(unpin, target)
    copier = GpuCopier(device, [target], stack)  # it is pinned already, which the driver refuses to do again
    source = torch.randn(1 << 20, device=device)
    copier.begin([(target, source)])
    copier.finish()
    assert torch.equal(target, source.cpu())
    plain = torch.zeros(1 << 20)
    copier.begin([(plain, source)])
    copier.finish()
    assert torch.equal(plain, source.cpu())
    assert copying.pin(target, device) != 0 and torch.ones(1, device=device).item() == 1
