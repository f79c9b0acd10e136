"""Stall bundles of real processes: ranks that hang, that are stopped, that are gone, and a number used again."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from zeroband.observe import stall
from zeroband.observe.events import EVENTS_FILE
from zeroband.observe.stall import EVENT_LINES, KEPT_BUNDLES, STALLS_FOLDER, register_stack_dump, write_bundle

RANK = """
import sys, threading, time
from pathlib import Path
from zeroband.observe.stall import register_stack_dump

def where_the_trainer_hangs():
    print("up", flush=True)
    sys.stdin.read(1)

def where_the_watcher_waits():
    time.sleep(600)

threading.Thread(target=where_the_watcher_waits, daemon=True).start()
close = register_stack_dump(Path(sys.argv[1]), int(sys.argv[2])) if sys.argv[2] != "none" else None
where_the_trainer_hangs()
if sys.argv[3:] == ["close"]:
    close()
    where_the_trainer_hangs()
"""
WRITER = """
import os, sys, threading
from pathlib import Path
from zeroband.observe.stall import register_stack_dump, write_bundle

def write():
    for _ in range(60):
        write_bundle(Path(sys.argv[1]), reason="", view={}, rank_pids=[os.getpid(), *[os.getppid()] * 30])

register_stack_dump(Path(sys.argv[1]), 0)
writer = threading.Thread(target=write)
writer.start()
while writer.is_alive():
    writer.join(0.001)
"""
"""Local rank 0, whose writer goes on to the other ranks while the signal interrupts another of its threads."""

DEADLINE_S = 10.0

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a process that registers as a local rank and then hangs in a read."""
    ranks: list[subprocess.Popen[str]] = []

    def one(local_rank: int | str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", RANK, str(tmp_path), str(local_rank), *arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        ranks.append(
            subprocess.Popen(
                command, text=True, **pipes, env={**os.environ, "PYTHONPATH": str(Path(stall.__file__).parents[2])}
            )
        )
        assert _line(ranks[-1]) == "up\n"
        return ranks[-1]

    yield one
    for rank in ranks:
        rank.kill()
        rank.communicate()


def _line(rank: subprocess.Popen[str]) -> str:
    assert rank.stdout is not None
    return rank.stdout.readline()


def _proceed(rank: subprocess.Popen[str]) -> None:
    assert rank.stdin is not None
    rank.stdin.write(".")
    rank.stdin.flush()


def _await_state(pid: int, state: str) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != state:
        assert time.monotonic() < end_s
        time.sleep(0.001)


def _bundle(node_dir: Path, *pids: int, reason: str = "round 3 hangs", view: dict[str, Any] | None = None) -> Path:
    bundle = write_bundle(node_dir, reason=reason, view=view or {}, rank_pids=pids)
    assert bundle is not None
    return bundle


def _stacks(bundle: Path, local_rank: int) -> str:
    return (bundle / f"stacks.rank{local_rank}.txt").read_text()


@pytest.fixture
def bundled(tmp_path: Path) -> Callable[..., Path]:
    return lambda *pids, **rest: _bundle(tmp_path, *pids, **rest)


def test_bundles_hold_the_newest_stacks_of_all_threads_of_all_ranks(start: Start, bundled: Callable[..., Path]) -> None:
    ranks = [start(0), start(1)]
    for bundle in [bundled(*(rank.pid for rank in ranks)) for _ in range(2)]:
        for local_rank in (0, 1):
            text = _stacks(bundle, local_rank)
            assert text.count("in where_the_trainer_hangs") == 1 and "where_the_watcher_waits" in text
    assert all(rank.poll() is None for rank in ranks)


def test_long_file_of_stacks_is_cut_and_still_answers(
    start: Start, bundled: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stall, "_STACKS_BYTES", 10)
    rank = start(0)
    for _ in range(2):
        text = _stacks(bundled(rank.pid), 0)
        assert "where_the_trainer_hangs" in text and "\0" not in text
        assert (tmp_path / "rank0.stacks").read_text() == f"process {rank.pid} started {_started(rank.pid)}\n"


def _started(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def test_stopped_and_dead_ranks_are_noted_and_neither_signalled_nor_waited_for(
    start: Start, bundled: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stall, "_ANSWER_S", 1e9)  # a wait for one of them would last for ever
    stopped, living, zombie, reaped = (start(rank) for rank in range(4))
    stopped.send_signal(signal.SIGSTOP)
    zombie.kill()
    reaped.kill()
    reaped.wait()
    _await_state(stopped.pid, "T")
    _await_state(zombie.pid, "Z")
    bundle = bundled(stopped.pid, living.pid, zombie.pid, reaped.pid)
    assert _stacks(bundle, 0) == f"no stacks: process {stopped.pid} is stopped (state T)\n"
    assert "where_the_trainer_hangs" in _stacks(bundle, 1)
    assert _stacks(bundle, 2) == f"no stacks: process {zombie.pid} is dead (state Z)\n"
    assert _stacks(bundle, 3).startswith(f"no stacks: process {reaped.pid} is gone")
    pending = re.search(r"ShdPnd:\s*(\w+)", Path(f"/proc/{stopped.pid}/status").read_text())
    assert pending is not None and int(pending[1], 16) == 0


@pytest.mark.parametrize("has_old_file", [False, True], ids=["never registered", "has the number of a dead rank"])
def test_process_that_did_not_register_is_not_signalled(
    start: Start, bundled: Callable[..., Path], tmp_path: Path, has_old_file: bool
) -> None:
    stranger = start("none")
    if has_old_file:
        (tmp_path / "rank0.stacks").write_text(f"process {stranger.pid} started {int(_started(stranger.pid)) - 1}\n")
    assert "did not register" in _stacks(bundled(stranger.pid), 0)
    _proceed(stranger)
    assert stranger.wait(DEADLINE_S) == 0  # SIGUSR2 would have killed it


def test_rank_that_closed_is_not_signalled_and_survives_a_late_signal(
    start: Start, bundled: Callable[..., Path]
) -> None:
    rank = start(0, "close")
    _proceed(rank)
    assert _line(rank) == "up\n"
    rank.send_signal(signal.SIGUSR2)  # decided before the rank closed
    assert "did not register" in _stacks(bundled(rank.pid), 0)
    _proceed(rank)
    assert rank.wait(DEADLINE_S) == 0


def test_rank_that_blocks_the_signal_is_given_up(
    start: Start, bundled: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stall, "_ANSWER_S", 0.05)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    try:
        rank = start(0)  # inherits the mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert f"process {rank.pid} did not answer within 0.05 s (state S)" in _stacks(bundled(rank.pid), 0)


def test_rank_that_writes_the_bundle_is_in_it_and_stacks_of_an_earlier_life_are_gone(
    bundled: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "rank0.stacks").write_text("process 1 started 1\nold stacks\n")
    before = signal.getsignal(signal.SIGUSR2)
    close = register_stack_dump(tmp_path, 0)
    header = (tmp_path / "rank0.stacks").read_text()
    stacks = _stacks(bundled(os.getpid()), 0)
    close()
    close()
    signal.signal(signal.SIGUSR2, before)
    assert "in write_bundle" in stacks
    assert header == f"process {os.getpid()} started {_started(os.getpid())}\n"


def test_rank_that_writes_the_bundle_survives_it(tmp_path: Path) -> None:
    """A walk over the frames of threads that run, as faulthandler's, crashes at one bundle in five, or in fifty."""
    environ = {**os.environ, "PYTHONPATH": str(Path(stall.__file__).parents[2])}
    ran = subprocess.run([sys.executable, "-c", WRITER, str(tmp_path)], env=environ, check=False, capture_output=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    bundles = list((tmp_path / STALLS_FOLDER).iterdir())
    assert len(bundles) == KEPT_BUNDLES and all("in write_bundle" in _stacks(bundle, 0) for bundle in bundles)


def test_bundle_holds_reason_view_and_newest_events(bundled: Callable[..., Path], tmp_path: Path) -> None:
    lines = [json.dumps({"kind": "round_committed", "round": n}) + "\n" for n in range(EVENT_LINES + 50)]
    (tmp_path / EVENTS_FILE).write_text("".join(lines))
    bundle = bundled(view={"round": 7, "alive": ["a#1"], "rate": float("nan"), "at": Path("x")})
    assert re.fullmatch(r"\d{8}T\d{6}Z-1", bundle.name) and bundle.parent == tmp_path / STALLS_FOLDER
    assert (bundle / "reason.txt").read_text() == "round 3 hangs\n"
    view = json.loads((bundle / "view.json").read_text(), parse_constant=pytest.fail)
    assert view == {"round": 7, "alive": ["a#1"], "rate": "nan", "at": "x"}
    assert (bundle / EVENTS_FILE).read_text() == "".join(lines[-EVENT_LINES:])


def test_events_of_a_bundle_are_whole_lines(bundled: Callable[..., Path], tmp_path: Path) -> None:
    line = "x" * (3 << 18) + "\n"  # two do not fit into what is read
    (tmp_path / EVENTS_FILE).write_text(line * 3)
    assert (bundled() / EVENTS_FILE).read_text() == line


def test_newest_bundles_stay_whatever_the_clock_did(
    bundled: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / STALLS_FOLDER / ".99").mkdir(parents=True)  # left by a crash
    for n in range(KEPT_BUNDLES + 3):
        monkeypatch.setattr(time, "gmtime", lambda n=n: time.struct_time((2030 - n, 1, 1, 0, 0, 0, 0, 1, 0)))
        bundled()
    numbers = {int(path.name.rpartition("-")[2]) for path in (tmp_path / STALLS_FOLDER).iterdir()}
    assert numbers == set(range(4, KEPT_BUNDLES + 4))


@pytest.mark.defect(9)
def test_bundle_that_breaks_off_is_never_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def seen() -> list[str]:
        return [path.name for path in (tmp_path / STALLS_FOLDER).iterdir() if not path.name.startswith(".")]

    during: list[list[str]] = []

    def break_off(*_: object, **__: object) -> int:
        during.append(seen())
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "write_bytes", break_off)  # of the last file
    assert write_bundle(tmp_path, reason="r", view={}, rank_pids=()) is None
    assert (during, seen()) == ([[]], [])


@pytest.mark.parametrize("trouble", ["disk", "view"])
def test_bundle_that_cannot_be_written_is_a_warning(
    trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("zeroband"), "propagate", True)
    view: dict[Any, Any] = {("no", "key"): 1} if trouble == "view" else {}
    if trouble == "disk":
        (tmp_path / "full").symlink_to("/dev/full")
        monkeypatch.setattr(Path, "write_text", lambda *_, **__: (tmp_path / "full").write_bytes(b"x"))
    assert write_bundle(tmp_path, reason="r", view=view, rank_pids=()) is None
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == ["no stall bundle"]
