"""Ctrl-C twice: the first one is answered at once, the second one waits for nothing; none raises when all is over."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from zeroband.elastic.membership.departure import Departure
from zeroband.node.launched import LEAVING_SIGNALS
from zeroband.runtime.signals import SignalHandling


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM, *LEAVING_SIGNALS)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_ctrl_c_twice_ends_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    ends: list[int] = []

    def train() -> None:
        with SignalHandling(Departure(25.0), ranks=1, announces=True, end=ends.append):
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                assert capfd.readouterr().err.startswith("zeroband: interrupted; ")
                assert ends == []
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(SystemExit, match="130"):
        train()
    assert ends == [130]
    os.kill(os.getpid(), signal.SIGTERM)  # while Python gives itself back
    os.kill(os.getpid(), signal.SIGINT)
    assert ends == [130, 130, 130]
