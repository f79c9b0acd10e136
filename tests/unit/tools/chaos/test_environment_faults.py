"""Faults from inside a node's processes, in a real one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zeroband.tools.chaos.effects import CLOCK_AHEAD_S, EnvironmentFaults
from zeroband.tools.chaos.plan import Kind

LOOKS = """
import sys, time
def is_free():
    try:
        open("/dev/null").close()
        return True
    except OSError:
        return False
for line in sys.stdin:
    until_s = time.monotonic() + 20
    found = lambda: (is_free(), round((time.time() - float(line)) / 3600))
    wanted = {"free": (True, 0), "gone": (False, 0), "ahead": (True, 7)}[sys.argv.pop(1)]
    while found() != wanted and time.monotonic() < until_s:
        time.sleep(0.01)
    print(found() == wanted, flush=True)
"""


@pytest.mark.slow
def test_processes_of_one_node_meet_a_fault_and_lose_it_again(tmp_path: Path) -> None:
    env_faults = EnvironmentFaults(tmp_path)
    env = {**os.environ, **env_faults.environment(), "ZERO_BAND_NODE__ID": "node1"}
    command = [sys.executable, "-c", LOOKS, "free", "gone", "free", "ahead", "free"]
    assert CLOCK_AHEAD_S == 7 * 3600
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        env_faults.set("node0", Kind.DESCRIPTORS_GONE, is_on=True)
        for kind, is_on in (
            (Kind.CLOCK_JUMPS, False),
            (Kind.DESCRIPTORS_GONE, True),
            (Kind.DESCRIPTORS_GONE, False),
            (Kind.CLOCK_JUMPS, True),
            (Kind.CLOCK_JUMPS, False),
        ):
            env_faults.set("node1", kind, is_on=is_on)
            process.stdin.write(f"{time.time()}\n")
            process.stdin.flush()
            assert process.stdout.readline() == "True\n", (kind, is_on)
        process.stdin.close()
