from __future__ import annotations

import os
import signal
import threading

import pytest

from zeroband.tools.cluster.interrupts import counted_interrupts, uninterrupted


def _send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def test_counted_interrupts_count_instead_of_raising_and_keep_the_first() -> None:
    with counted_interrupts() as interrupts:
        assert interrupts.count == 0
        _send(signal.SIGTERM)
        _send(signal.SIGINT)
        assert (interrupts.count, interrupts.exit_code) == (2, 143)


def test_counted_interrupts_give_the_handlers_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with counted_interrupts():
        pass
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
    with pytest.raises(KeyboardInterrupt):
        _send(signal.SIGINT)


def test_counted_interrupts_leave_an_ignored_signal_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with counted_interrupts() as interrupts:
            _send(signal.SIGHUP)
            assert interrupts.count == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_uninterrupted_holds_signals_off_until_its_end() -> None:
    with uninterrupted():
        _send(signal.SIGINT)
        _send(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        _send(signal.SIGINT)


def test_uninterrupted_runs_its_body_in_another_thread() -> None:
    done: list[bool] = []

    def work() -> None:
        with uninterrupted():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
