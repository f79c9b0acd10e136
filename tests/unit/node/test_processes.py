from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from zeroband.errors import ConfigError
from zeroband.node.processes import MARK, kill_marked, marked_pids, start_child


def _wait_for(path: Path) -> str:
    """The text of a file as soon as it has a whole line."""
    end_s = time.monotonic() + 10
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < end_s, f"nothing in {path}"
        time.sleep(0.002)
    return path.read_text()


@pytest.fixture
def mark() -> Iterator[str]:
    mark = f"test-{os.urandom(8).hex()}"
    yield mark
    kill_marked(mark)


def _start(script: str, output: Path, mark: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, MARK: mark}
    return start_child(["/bin/sh", "-c", script], env=env, output=output, death_signal=signal.SIGKILL)


def test_start_child_runs_in_its_own_session_and_appends_its_output(tmp_path: Path, mark: str) -> None:
    output = tmp_path / "out"
    output.write_text("before\n")
    process = _start("echo said; echo failed >&2; exit 7", output, mark)
    assert process.wait(10) == 7
    assert output.read_text() == "before\nsaid\nfailed\n"
    sleeping = _start("sleep 60", tmp_path / "other", mark)
    assert os.getsid(sleeping.pid) == sleeping.pid


@pytest.mark.slow
def test_start_child_ends_the_process_when_its_owner_is_killed(tmp_path: Path, mark: str) -> None:
    owner_script = (
        "import os, signal, sys, time; from pathlib import Path\n"
        "from zeroband.node.processes import start_child\n"
        "start_child(['/bin/sh', '-c', 'echo $$; sleep 60; true'], env=os.environ, output=Path(sys.argv[1]),"
        " death_signal=signal.SIGKILL)\n"
        "time.sleep(60)"
    )
    env = {**os.environ, MARK: mark, "PYTHONPATH": os.pathsep.join(sys.path)}
    owner = subprocess.Popen([sys.executable, "-c", owner_script, str(tmp_path / "out")], env=env)
    leashed = int(_wait_for(tmp_path / "out"))
    assert leashed in marked_pids(mark)
    owner.kill()
    owner.wait()
    end_s = time.monotonic() + 10
    while leashed in marked_pids(mark):
        assert time.monotonic() < end_s, "the leashed process outlives its owner"
        time.sleep(0.002)


def test_start_child_refuses_other_systems_than_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="Linux"):
        start_child(["true"], env={}, output=tmp_path / "out", death_signal=signal.SIGKILL)


def test_kill_marked_reaches_processes_that_left_session_and_parent(tmp_path: Path, mark: str) -> None:
    process = _start("setsid sh -c 'echo $$; sleep 60' & wait", tmp_path / "out", mark)
    orphan = int(_wait_for(tmp_path / "out"))
    process.kill()
    process.wait()
    assert orphan in marked_pids(mark)
    kill_marked(mark)
    assert marked_pids(mark) == []


def test_kill_marked_leaves_processes_with_another_mark(tmp_path: Path, mark: str) -> None:
    process = _start("sleep 60", tmp_path / "out", mark)
    kill_marked(mark[:-1])
    assert process.poll() is None


def test_kill_marked_outruns_a_process_that_keeps_forking(tmp_path: Path, mark: str) -> None:
    script = "i=0; while [ $i -lt 500 ]; do sleep 60 & i=$((i + 1)); [ $i = 5 ] && echo up; done; wait"
    _start(script, tmp_path / "out", mark)
    _wait_for(tmp_path / "out")
    kill_marked(mark)
    assert marked_pids(mark) == []
