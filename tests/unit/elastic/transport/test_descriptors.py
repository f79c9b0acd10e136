"""Descriptors: what a node may need, what it may have, and what is said in between."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from zeroband.elastic.guardian.process import ProcessStates
from zeroband.elastic.transport.descriptors import (
    ShortageLog,
    descriptors_needed,
    raise_limit,
    shortage,
    with_descriptors,
)
from zeroband.elastic.transport.dial import run_blocking

NONE_LEFT = OSError(errno.EMFILE, "Too many open files")


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_limit_is_raised_as_far_as_it_may(limits: tuple[int, int]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, limits[1]))
    assert shortage(3, None) is not None
    raise_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == limits[1]
    assert shortage(3, None) is None


def test_shortage_says_how_many_are_missing_and_what_to_do(limits: tuple[int, int]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
    assert (descriptors_needed(1, None), descriptors_needed(64, None), descriptors_needed(64, 8)) == (256, 2524, 1012)
    assert shortage(64, 8) is None
    problem = shortage(64, None)
    assert problem is not None
    assert all(said in problem for said in ("64 nodes", "2524", "1024", "ulimit -Hn", "comm.streams"))


def test_missing_descriptor_is_said_once_in_a_while_and_other_errors_are_not(caplog: pytest.LogCaptureFixture) -> None:
    shortages = ShortageLog()
    shortages.warn("b#1 cannot be called", OSError(errno.ECONNREFUSED, "refused"))
    assert caplog.messages == []
    for _ in range(3):
        shortages.warn("b#1 cannot be called", OSError(errno.EMFILE, "Too many open files"))
    (said,) = caplog.messages
    assert said.startswith("b#1 cannot be called: Too many open files (the limit is ")


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextlib.contextmanager
def only(free: int) -> Generator[Callable[[], None]]:
    """Have this process be able to open so many files more; what is given ends that."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = list[int]()

    def release() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

    highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        while len(held) < free:
            resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] + 1, before[1]))
            held.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(free):
            os.close(held.pop())
        yield release
    finally:
        release()
        for descriptor in held:
            os.close(descriptor)


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def sleep(self, for_s: float) -> None:
        self.now_s += for_s


def test_what_needs_descriptors_is_tried_again_until_there_are_some() -> None:
    time, tries = FakeTime(), list[float]()

    def make() -> str:
        tries.append(time.now_s)
        if time.now_s < 5.0:
            raise NONE_LEFT
        return "made"

    assert with_descriptors("it fails", make, clock=lambda: time.now_s, sleep=time.sleep) == "made"
    assert len(tries) > 10


@pytest.mark.parametrize(
    ("error", "timeout_s", "is_aborted", "ends_at_s"),
    [
        (NONE_LEFT, 3.0, False, 3.0),
        (NONE_LEFT, 3.0, True, 0.0),
        (OSError(errno.ENFILE, "Too many open files in system"), 1.0, False, 1.0),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), 3.0, False, 0.0),
    ],
)
def test_it_is_given_up_in_bounded_time(error: OSError, timeout_s: float, is_aborted: bool, ends_at_s: float) -> None:
    time = FakeTime()

    def make() -> None:
        raise error

    with pytest.raises(OSError, match=str(error.strerror)) as caught:
        with_descriptors(
            *("it fails", make),
            is_aborted=lambda: is_aborted,
            timeout_s=timeout_s,
            clock=lambda: time.now_s,
            sleep=time.sleep,
        )
    assert caught.value is error and time.now_s == pytest.approx(ends_at_s, abs=0.2)


async def connect(address: tuple[str, int]) -> str:
    connection = socket.socket()
    with connection:
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, address)
    return "connected"


@pytest.mark.parametrize("free", range(6))
def test_a_call_with_few_descriptors_succeeds_or_fails_as_such_and_keeps_none(free: int) -> None:
    """An event loop takes three, a connection one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        before = open_files()
        with only(free) as release:
            try:
                outcome = run_blocking(connect(listener.getsockname()), is_aborted=lambda: True)
            except OSError as error:
                outcome = errno.errorcode[error.errno or 0]
            release()
            assert outcome == ("connected" if free >= 4 else "EMFILE")
        assert open_files() == before


def test_a_call_waits_for_descriptors_that_come_back() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, only(0) as release:
        timer = threading.Timer(0.1, release)
        timer.start()
        assert run_blocking(connect(listener.getsockname())) == "connected"
        timer.join()


def test_a_process_without_descriptors_still_sees_how_others_are() -> None:
    """So a guardian does not take its trainer for dead."""
    with contextlib.closing(ProcessStates([os.getpid(), 1 << 30])) as states:
        with only(0):
            seen = states.read()
        assert seen[0] in "RS" and seen[1] == "X"
