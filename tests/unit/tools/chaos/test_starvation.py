"""How long processes waited for a processor: by rule, and as the kernel counts it of real ones."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from zeroband.tools.chaos.starvation import QueueTimes, Starvation

CPU = min(os.sched_getaffinity(0))
SPIN = f"import os; os.sched_setaffinity(0, [{CPU}]); print(flush=True)\nwhile True: pass"
IDLE = f"import os, time; os.sched_setaffinity(0, [{CPU}]); print(flush=True); time.sleep(600)"


def test_everybody_waits_for_the_member_that_waits_the_longest() -> None:
    starvation = Starvation()
    starvation.note(1.0, {"a": 0.2, "b": 0.5})
    starvation.note(2.0, {"a": 0.3, "b": 0.1})
    assert starvation.lost_s(0.0, 2.0) == pytest.approx(0.8)
    assert starvation.share(0.0, 2.0) == pytest.approx(0.4)
    assert starvation.lost_s(2.0, 9.0) == 0


def test_waiting_counts_at_most_as_long_as_the_span_it_falls_into() -> None:
    starvation = Starvation()
    starvation.note(4.0, {"a": 3.0, "b": 50.0}, background=["b"])
    assert starvation.lost_s(3.5, 10.0) == pytest.approx(0.5)
    assert starvation.lost_s(0.0, 4.0) == pytest.approx(3.0)


def test_node_in_the_background_keeps_nobody_waiting_but_itself() -> None:
    starvation = Starvation()
    starvation.note(1.0, {"a": 0.1, "b": 0.9}, background=["b"])
    assert starvation.lost_s(0.0, 1.0) == pytest.approx(0.1)
    assert starvation.lost_s(0.0, 1.0, ["b"]) == pytest.approx(0.9)


@contextmanager
def running(program: str) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()  # it is there
        yield process.pid
    finally:
        process.kill()
        process.wait()


def test_processes_that_share_a_processor_are_seen_to_wait_and_one_that_sleeps_is_not() -> None:
    with ExitStack() as stack:
        first, second, idle = (stack.enter_context(running(program)) for program in (SPIN, SPIN, IDLE))
        times, pids = QueueTimes(), {"first": [first], "both": [first, second], "idle": [idle], "gone": [2**22 + 1]}
        times.read(pids)
        waited_s, end_s = dict.fromkeys(pids, 0.0), time.monotonic() + 60
        while min(waited_s["first"], waited_s["both"]) < 0.1 and time.monotonic() < end_s:
            time.sleep(0.05)
            waited_s = {name: waited_s[name] + more for name, more in times.read(pids).items()}
    assert min(waited_s["first"], waited_s["both"]) >= 0.1
    assert waited_s["idle"] < waited_s["first"]
    assert waited_s["gone"] == 0
