"""What the health check says of a node, by files like those of a trainer and of /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from zeroband.config import load_config
from zeroband.config.render import render_toml
from zeroband.node.shared_flags import SharedFlags
from zeroband.node.shm import NodeFolder
from zeroband.observe.events import EventLog
from zeroband.observe.facts import CONFIG_FILE
from zeroband.observe.metrics import MetricsLog
from zeroband.observe.stall import register_stack_dump
from zeroband.runtime.health import problems_of, ranks_in
from zeroband.tools.health import main

HUNG_S = 60


class Trainer:
    """What a trainer of two ranks leaves for others to see; it wrote its last line just now."""

    def __init__(self, tmp_path: Path) -> None:
        self.proc, self.node_dir, shm_dir = tmp_path / "proc", tmp_path / "runs" / "default" / "n0", tmp_path / "shm"
        self.events, self._metrics = EventLog(self.node_dir), MetricsLog(self.node_dir)
        flags = [f"--node.shm_dir={shm_dir}", "--fault.detect_s=1", f"--fault.hung_s={HUNG_S}"]
        (self.node_dir / CONFIG_FILE).write_text(render_toml(load_config(flags, {})))
        self.folder = NodeFolder.path_of(shm_dir, "default", "n0")
        self.folder.mkdir(parents=True)
        self.events.emit("node_started", total_steps=100, local_world_size=2, parameters=1000)
        self._metrics.record(1, {"train/loss": 3.0})
        for rank in (0, 1):
            self.process(rank, "S")
            opened = self.proc / str(100 + rank) / "fd"
            opened.mkdir()
            (opened / "3").symlink_to(self.node_dir / f"rank{rank}.stacks")
            (opened / "4").symlink_to("socket:[1]")

    def process(self, rank: int, state: str) -> None:
        folder = self.proc / str(100 + rank)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "stat").write_text(f"{100 + rank} (python) {state} 1 1")

    def be_silent(self, seconds: float) -> None:
        for path in self.node_dir.glob("*.jsonl"):
            os.utime(path, times=(time.time() - seconds,) * 2)

    def said(self) -> list[str]:
        return list(problems_of(sorted(ranks_in(self.proc))))


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


@pytest.fixture
def flags(trainer: Trainer) -> Iterator[SharedFlags]:
    flags = SharedFlags(trainer.folder / "flags", create=True)
    yield flags
    flags.close()


def test_ranks_are_found_by_the_file_that_they_hold_open(trainer: Trainer) -> None:
    (trainer.proc / "7").mkdir()  # a process of another user: its descriptors are not to be seen
    assert sorted(ranks_in(trainer.proc)) == [(trainer.proc / f"{pid}", trainer.node_dir) for pid in (100, 101)]


def test_rank_that_registered_for_stack_dumps_is_found(tmp_path: Path) -> None:
    close = register_stack_dump(tmp_path, 3)
    found = set(ranks_in(Path("/proc")))
    close()
    rank = (Path(f"/proc/{os.getpid()}"), tmp_path)
    assert rank in found and rank not in set(ranks_in(Path("/proc")))


def test_node_that_writes_is_well(trainer: Trainer) -> None:
    trainer.be_silent(HUNG_S - 5)
    assert trainer.said() == []


@pytest.mark.parametrize(("state", "word"), [("T", "stopped"), ("Z", "dead")])
def test_a_rank_that_does_not_run_is_named(trainer: Trainer, state: str, word: str) -> None:
    trainer.process(1, state)
    assert trainer.said() == [f"n0: process 101 is {word}"]


def test_node_alone_that_writes_nothing_stalls(trainer: Trainer) -> None:
    trainer.be_silent(HUNG_S + 5)
    assert trainer.said() == ["n0: no progress for 65 s (fault.hung_s=60)"]


def test_member_that_waits_at_its_boundary_is_well_and_one_that_hangs_is_not(
    trainer: Trainer, flags: SharedFlags
) -> None:
    trainer.be_silent(HUNG_S + 5)
    assert len(trainer.said()) == 1
    flags.advance()
    assert trainer.said() == []


def test_node_on_its_way_in_or_at_its_end_has_deadlines_of_its_own(trainer: Trainer) -> None:
    trainer.events.emit("join_state", state="discover", since="wait_old_lease", why="free")
    trainer.be_silent(HUNG_S + 5)
    assert trainer.said() == []
    trainer.events.emit("join_state", state="member", since="announcing", why="admitted")
    trainer.be_silent(HUNG_S + 5)
    assert len(trainer.said()) == 1
    trainer.events.emit("run_finished", step=100)
    trainer.be_silent(HUNG_S + 5)
    assert trainer.said() == []


def test_machine_without_a_trainer_is_not_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == "no trainer runs here\n"
