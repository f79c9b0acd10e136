"""What is done in a forked child comes back, also where it fails."""

from __future__ import annotations

import os

import pytest

from zeroband.errors import ConfigError
from zeroband.tools.cluster.forked import in_child


def test_value_comes_from_another_process() -> None:
    value, pid = in_child(lambda: ([1.5, None], os.getpid()))
    assert value == [1.5, None] and pid != os.getpid()


def test_error_of_the_child_is_raised() -> None:
    def fail() -> None:
        raise ConfigError("no such key")

    with pytest.raises(ConfigError, match="no such key"):
        in_child(fail)


def test_child_that_dies_is_an_error() -> None:
    with pytest.raises(ChildProcessError, match="ended before it answered"):
        in_child(lambda: os._exit(1))
