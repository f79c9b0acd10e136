"""Descriptors: what a node may need, what it may have, and what is said in between."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator

import pytest

from zeroband.elastic.transport.descriptors import Complaints, needed, raise_limit, shortage


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
    assert (needed(1, None), needed(64, None), needed(64, 8)) == (256, 2524, 1012)
    assert shortage(64, 8) is None
    problem = shortage(64, None)
    assert problem is not None
    assert all(said in problem for said in ("64 nodes", "2524", "1024", "ulimit -Hn", "comm.streams"))


def test_missing_descriptor_is_said_once_in_a_while_and_other_errors_are_not(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints()
    complaints.say("b#1 cannot be called", OSError(errno.ECONNREFUSED, "refused"))
    assert caplog.messages == []
    for _ in range(3):
        complaints.say("b#1 cannot be called", OSError(errno.EMFILE, "Too many open files"))
    (said,) = caplog.messages
    assert said.startswith("b#1 cannot be called: Too many open files (the limit is ")
