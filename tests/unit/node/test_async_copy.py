"""Copies beside training: when they are whole, and what becomes of a driver that refuses to pin."""

from __future__ import annotations

import mmap
import threading
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from torch import Tensor

from zeroband.node import async_copy as copying
from zeroband.node.async_copy import (
    GpuCopier,
    HostCopier,
    PendingNumbers,
    PinnedMemory,
    copier_for,
    copy_over,
    host_copies,
    to_device,
)

CPU = torch.device("cpu")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


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


def test_copies_of_an_outer_step_on_a_cpu_are_the_tensors_themselves() -> None:
    tensors = [torch.randn(5), torch.randn(3)]
    assert [t.data_ptr() for t in host_copies(tensors)] == [t.data_ptr() for t in tensors]
    assert list(host_copies([])) == [] and to_device(tensors[0], CPU) is tensors[0]
    target = torch.nn.Parameter(torch.zeros(5)).detach()
    copy_over(tensors[0], target)
    assert torch.equal(target, tensors[0])


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_of_an_outer_step_on_a_gpu_are_whole(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several pieces; a caller may change what it copied from, and reads each copy before it asks for the next."""
    monkeypatch.setattr(copying, "STAGED", 1 << 16)
    sources = [torch.randn(n) for n in (1, 1 << 16, (1 << 20) + 7, 3)]
    targets = [torch.zeros(s.shape, dtype=dtype, device="cuda") for s in sources]
    for source, target in zip(sources, targets, strict=True):
        given = source.clone()
        copy_over(given, target)
        given.zero_()
    arrived = [copy.clone() for copy in host_copies(targets)]
    for source, copy in zip(sources, arrived, strict=True):
        assert copy.device == CPU and torch.equal(copy, source.to(dtype))
    moved = to_device(sources[2], targets[2].device)
    assert moved.is_cuda and torch.equal(moved.cpu(), sources[2])


class Driver:
    """CUDA's runtime as far as pinning goes: it has room for so many pieces, which may not overlap."""

    def __init__(self, room: int = 1000) -> None:
        self.room = room
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if any(address < at + held and at < address + size for at, held in self.pinned.items()):
            return 712
        if len(self.pinned) == self.room:
            return 2
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Nothing else of CUDA is there: an empty tensor of a GPU is one of the CPU."""
    driver, ones = Driver(), torch.ones
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch, "ones", lambda *shape, device=None, **given: ones(*shape, **given))
    return driver


def mapped(folder: Path, numel: int, name: str = "held") -> Tensor:
    return torch.from_file(str(folder / name), shared=True, size=numel, dtype=torch.float32)


PAGE_VALUES = mmap.PAGESIZE // 4
GPU = torch.device("cuda")


def test_rank_locks_the_pages_of_its_own_ranges_once_each_and_in_pieces(
    stack: ExitStack, driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "PIECE_BYTES", 2 * mmap.PAGESIZE)
    held = mapped(tmp_path, 100 * PAGE_VALUES)
    long, beside, far = held[10 : 5 * PAGE_VALUES + 3], held[5 * PAGE_VALUES + 3 : 5 * PAGE_VALUES + 9], held[-20:-10]
    pinned = PinnedMemory(GPU, [far, long, held[50:50], beside], stack)
    begin, page = held.data_ptr(), mmap.PAGESIZE
    assert driver.pinned == {
        begin: 2 * page,
        begin + 2 * page: 2 * page,
        begin + 4 * page: 2 * page,
        begin + 99 * page: page,
    }
    assert pinned.error == 0
    stack.close()
    assert not driver.pinned


@pytest.mark.parametrize("room", [1000, 1, 0])
def test_no_copy_crosses_the_border_of_two_pieces(
    stack: ExitStack, driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """A piece that the driver refused begins at such a border, too."""
    monkeypatch.setattr(copying, "PIECE_BYTES", mmap.PAGESIZE)
    driver.room = room
    held, source = mapped(tmp_path, 4 * PAGE_VALUES), torch.randn(3 * PAGE_VALUES)
    target = held[7 : 7 + 3 * PAGE_VALUES]
    pinned = PinnedMemory(GPU, [target], stack)
    assert (pinned.error != 0) == (room < 4)
    copied, copy_ = list[tuple[int, int]](), Tensor.copy_

    def copy(to: Tensor, of: Tensor, *, non_blocking: bool) -> Tensor:
        on_host = min(to, of, key=lambda end: not held.data_ptr() <= end.data_ptr() < held.data_ptr() + held.nbytes)
        start = on_host.data_ptr() - held.data_ptr()
        copied.append((start // mmap.PAGESIZE, (start + on_host.nbytes - 1) // mmap.PAGESIZE))
        return copy_(to, of, non_blocking)

    monkeypatch.setattr(Tensor, "copy_", copy)
    pinned.store(target, source)
    assert torch.equal(target, source)
    assert torch.equal(pinned.load(target, CPU), source)
    pages = [(page, page) for page in range(4)]
    assert copied == [*pages, *pages]


def test_memory_locked_by_one_owner_can_be_locked_by_the_next(stack: ExitStack, driver: Driver, tmp_path: Path) -> None:
    held = mapped(tmp_path, 10)
    PinnedMemory(GPU, [held], stack)
    with ExitStack() as second:
        assert PinnedMemory(GPU, [held], second).error == 712
    stack.close()
    with ExitStack() as third:
        assert PinnedMemory(GPU, [held], third).error == 0
    assert not driver.pinned


def test_nothing_is_locked_for_a_cpu(stack: ExitStack, driver: Driver) -> None:
    held = torch.zeros(5)
    PinnedMemory(CPU, [held], stack).store(held, torch.ones(5))
    assert held.all() and not driver.pinned


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
    stack: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
    room: int,
    caplog: pytest.LogCaptureFixture,
    driver: Driver,
    tmp_path: Path,
) -> None:
    training, made = Stream(), list[Stream]()
    driver.room = room

    def make_stream(device: torch.device) -> Stream:
        made.append(Stream())
        return made[-1]

    for name, fake in {
        "Stream": make_stream,
        "Event": Event,
        "stream": lambda stream: stream,
        "current_stream": lambda device: training,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
    targets = [mapped(tmp_path, 4, "first"), mapped(tmp_path, 4, "second")]
    copier = GpuCopier(GPU, targets, stack)
    assert len(driver.pinned) == room
    assert ("not all memory is pinned" in caplog.text) == (room < len(targets))
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
    reading = PendingNumbers(values)
    assert reading.read() == reading.read() == [1.5, float("inf")]


@pytest.mark.gpu
@gpu
def test_reading_of_a_gpu_waits_for_it_when_it_is_asked_and_not_before() -> None:
    busy = torch.randn(4096, 4096, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            busy = busy @ busy * 1e-3
        reading = PendingNumbers(torch.stack([busy.isfinite().all().double()]))
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
    assert PinnedMemory(device, [target], stack).error == 0
    copier = GpuCopier(device, [target], stack)  # it is pinned already, which the driver refuses to do again
    source = torch.randn(1 << 20, device=device)
    copier.begin([(target, source)])
    copier.finish()
    assert torch.equal(target, source.cpu())
    plain = torch.zeros(1 << 20)
    copier.begin([(plain, source)])
    copier.finish()
    assert torch.equal(plain, source.cpu())
    with ExitStack() as again:
        assert PinnedMemory(device, [target], again).error != 0
    assert torch.ones(1, device=device).item() == 1


@pytest.mark.gpu
@gpu
def test_gpu_copies_to_and_from_ranges_of_mapped_memory_in_pieces(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again and again at one place, as a program that makes one optimizer after another does.

    In /dev/shm, as nodes have it: recent kernels let no driver lock the pages of files on a disk.
    """
    monkeypatch.setattr(copying, "PIECE_BYTES", 1 << 20)
    device = torch.device("cuda")
    folder = Path(stack.enter_context(TemporaryDirectory(dir="/dev/shm")))
    held, source = mapped(folder, 1 << 22), torch.randn(1 << 22, device=device)
    ranges = [(5, 1 << 20), ((1 << 20) + 3, 3 << 20), ((3 << 20) + 1, (1 << 22) - 7)]
    for _ in range(3):
        held.zero_()
        with ExitStack() as stack:
            pinned = PinnedMemory(device, [held[start:stop] for start, stop in ranges], stack)
            assert pinned.error == 0 and held[5:10].is_pinned()
            for start, stop in ranges:
                pinned.store(held[start:stop], source[start:stop])
            torch.cuda.synchronize()
            for start, stop in ranges:
                assert torch.equal(held[start:stop], source[start:stop].cpu())
                assert torch.equal(pinned.load(held[start:stop], device), source[start:stop])
            torch.cuda.synchronize()
        assert not held[5:10].is_pinned()
