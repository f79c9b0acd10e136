from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from zeroband.observe.process_stat import identity_of, parent_of, started_at_ticks, state_of


@pytest.fixture(params=[b"sleep", b"a (b) c", b"a\xff) R 1"], ids=["plain", "brackets", "no text"])
def process(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that sleeps, by a name that is hard to read."""
    program = tmp_path / os.fsdecode(request.param)
    program.symlink_to(shutil.which("sleep") or "")
    with subprocess.Popen([program, "60"]) as process:
        yield process
        process.kill()


def test_a_running_process_has_parent_start_and_identity(process: subprocess.Popen[bytes]) -> None:
    pid, own = process.pid, started_at_ticks(os.getpid())
    assert own is not None
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    assert own <= (started_at_ticks(pid) or 0) <= uptime_s * os.sysconf("SC_CLK_TCK") + 1  # rounding
    assert parent_of(pid) == os.getpid()
    assert identity_of(pid) == f"{pid}:{started_at_ticks(pid)}"


def test_states_tell_a_stopped_process_from_a_dead_one_and_from_none(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    assert state_of(process.pid) == "T" and identity_of(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert (state_of(process.pid), identity_of(process.pid)) == ("Z", "")
    process.wait()
    assert (state_of(process.pid), identity_of(process.pid)) == ("X", "")
    assert parent_of(process.pid) is started_at_ticks(process.pid) is None
