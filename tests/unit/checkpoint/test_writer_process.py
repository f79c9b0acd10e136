"""The writer as a real process, started as the trainer starts it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.unit.checkpoint.saves import RULES, SECTIONS, buffers_of, layout, own, stamp_of

from zeroband.checkpoint.loading import open_checkpoint, steps_in_order
from zeroband.checkpoint.peers import WriterStatus
from zeroband.checkpoint.saving import SaveOrder, SaveRules
from zeroband.checkpoint.storage import LocalStorage
from zeroband.checkpoint.writer import WriterSpec
from zeroband.checkpoint.writer_process import PeerWriters, WriterProcess
from zeroband.state.slot import bytes_of

AT = {"round": 1, "step": 10}
INNER = ("exp_avg", "exp_avg_sq")


class Fellow(PeerWriters):
    """Another member's writer, which says what the test has it say."""

    def __init__(self) -> None:
        self.words: dict[str, str] = {}
        self.said: list[str] = []

    def say(self, attempt: str, word: str) -> None:
        self.said.append(word)

    def hear(self, attempt: str) -> Mapping[str, str]:
        return self.words


@dataclass
class Trainer:
    """What a trainer has to do with its writer."""

    writer: WriterProcess
    storage: LocalStorage
    descriptors: Mapping[str, int]
    fellow: Fellow
    events: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    told: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def hear(self, kind: str, fields: Mapping[str, Any]) -> None:
        self.events.append((kind, fields))
        self.told.release()

    def stage(self, step: int) -> None:
        self.writer.await_free()  # an event is told a moment before the save is over
        staged = {**buffers_of(step), **buffers_of(step + 1000, INNER)}
        for name, descriptor in self.descriptors.items():
            os.pwrite(descriptor, bytes_of(staged[name]), 0)

    def give(self, step: int, members: Sequence[str] = ("a",), *, is_left_out: bool = False) -> None:
        self.writer.give(SaveOrder(stamp_of(step, members=members), tuple(members), {"step": step}, is_left_out))

    def await_event(self) -> str:
        assert self.told.acquire(timeout=60), "the writer says nothing"
        return self.events[-1][0]


@pytest.fixture
def trainer(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Trainer]:
    """Marked with `rules=...` where they are to be others."""
    storage = LocalStorage(tmp_path / "checkpoints/run", "a")
    own(storage)
    descriptors: dict[str, int] = {}
    for name in (*SECTIONS, *INNER):
        (tmp_path / name).write_bytes(bytes(4 * layout().numel))
        descriptors[name] = os.open(tmp_path / name, os.O_RDWR)
    spec = WriterSpec(
        path=str(tmp_path / "checkpoints"),
        run_id="run",
        node_id="a",
        slots=layout().slots,
        outer={name: descriptors[name] for name in SECTIONS},
        inner={name: descriptors[name] for name in INNER},
        rules=getattr(request, "param", RULES),
        max_file_bytes=1 << 30,
        lock=str(tmp_path / "lock"),
    )
    held: list[Trainer] = []
    hear: Callable[[str, Mapping[str, Any]], None] = lambda kind, fields: held[0].hear(kind, fields)  # noqa: E731
    fellow = Fellow()
    writer = WriterProcess(spec, tuple(descriptors.values()), tmp_path / "log", hear, fellow)
    held.append(Trainer(writer, storage, descriptors, fellow))
    yield held[0]
    writer.close(waits=True)
    for descriptor in descriptors.values():
        os.close(descriptor)


@pytest.mark.slow
def test_writer_ignores_the_trainers_signals_and_finishes_when_the_trainer_is_gone(trainer: Trainer) -> None:
    trainer.stage(10)
    trainer.give(10)
    assert trainer.await_event() == "checkpoint_committed"  # it is up, and its signals are set
    trainer.stage(20)
    trainer.give(20)
    trainer.writer.close(waits=False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        os.kill(trainer.writer.pid, number)
    trainer.writer.await_free()
    assert steps_in_order(trainer.storage) == [20, 10]


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [SaveRules(2, None, peer_wait_s=600.0, retry_s=0.0)], indirect=True)
def test_writer_that_died_is_reported_and_replaced(trainer: Trainer) -> None:
    trainer.stage(10)
    trainer.give(10, members=("a", "b"))  # waits for b, which never comes
    assert trainer.writer.is_busy
    os.kill(trainer.writer.pid, signal.SIGKILL)
    assert trainer.await_event() == "checkpoint_failed"
    assert "its writer ended (-9)" in trainer.events[-1][1]["reason"]
    assert not trainer.writer.is_busy and steps_in_order(trainer.storage) == []
    trainer.give(20)
    assert trainer.await_event() == "checkpoint_committed"


@pytest.mark.slow
def test_writer_that_cannot_be_replaced_costs_a_checkpoint_and_no_more(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    os.kill(trainer.writer.pid, signal.SIGKILL)
    with suppress(ChildProcessError):  # a look at the writer may have reaped it already
        os.waitid(os.P_PID, trainer.writer.pid, os.WEXITED | os.WNOWAIT)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        trainer.give(10)
    assert trainer.await_event() == "checkpoint_failed"
    assert "Too many open files" in trainer.events[-1][1]["reason"] and not trainer.writer.is_busy
    trainer.stage(20)
    trainer.give(20)
    assert trainer.await_event() == "checkpoint_committed"


@pytest.mark.slow
def test_node_that_is_left_out_says_so_to_the_first_member(trainer: Trainer, tmp_path: Path) -> None:
    trainer.give(10, members=("Z", "a"), is_left_out=True)
    trainer.writer.close(waits=True)
    folder = tmp_path / "checkpoints/run/step_00000010.tmp/parts"
    assert [path.read_text() for path in folder.iterdir()] == ['{"files": {}}']


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [SaveRules(2, None, peer_wait_s=600.0, retry_s=0.0)], indirect=True)
def test_members_that_are_lost_or_unavailable_are_not_waited_for_and_nonsense_is_not_understood(
    trainer: Trainer,
) -> None:
    fellow = trainer.fellow
    fellow.words["Z"] = '{"out": 3, "'
    trainer.stage(10)
    trainer.give(10, members=("Z", "a", "b"))
    assert trainer.await_event() == "checkpoint_share_written"
    trainer.writer.go_on_with(["Z", "a"])
    trainer.writer.go_on_with(["Z", "a", "new"])
    assert trainer.writer.is_busy and any('"is_waiting": false' in word for word in fellow.said)
    fellow.words["Z"] = WriterStatus(out="the disk is full").to_json()
    trainer.writer.await_free()
    why = {"Z": "the disk is full", "b": "the run continues without it"}
    assert trainer.events[-2] == ("checkpoint_incomplete", {**AT, "nodes": ["Z", "b"], "why": why})
    manifest = open_checkpoint(trainer.storage, 10).manifest
    assert (manifest.nodes, manifest.missing) == (("a",), why)
