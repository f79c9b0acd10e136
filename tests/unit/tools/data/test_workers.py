"""What a worker says over its pipe, above all when it cannot go on."""

from __future__ import annotations

import os
import threading
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
from tests.unit.tools.data.preparations import write_lines

from zeroband.data.files import Files
from zeroband.data.tokenizer import ByteTokenizer
from zeroband.tools.data.plan import Plan, PrepareOptions, make_plan
from zeroband.tools.data.units import Task
from zeroband.tools.data.workers import main


def plan_of(source: object) -> Plan:
    return make_plan([str(source)], "byte", ByteTokenizer(), PrepareOptions(), Files())


def said(plan: Plan, out: object, task: Task) -> list[tuple[str, Any]]:
    """All messages of a worker that is given one task."""
    ours, theirs = Pipe()
    worker = threading.Thread(target=main, args=([str(os.dup(theirs.fileno()))],))
    theirs.close()
    ours.send((plan, str(out), 0.0))
    ours.send(task)
    worker.start()
    found = list[tuple[str, Any]]()
    while not found or found[-1][0] not in ("done", "error"):
        found.append(ours.recv())
    ours.close()
    worker.join(10.0)
    return found


def test_defect_of_a_worker_is_told_with_its_cause(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = plan_of(write_lines(tmp_path / "a.jsonl", ["text"]))
    assert said(plan, tmp_path / "out", Task(7)) == [
        ("error", "IndexError: tuple index out of range; this is a bug; see the traceback above")
    ]
    assert "Traceback" in capfd.readouterr().err


def test_place_that_a_worker_cannot_open_is_told(tmp_path: Path) -> None:
    plan = plan_of(write_lines(tmp_path / "a.jsonl", ["text"]))
    ((kind, text),) = said(plan, "nosuch://a", Task(0))
    assert kind == "error" and text.startswith("OUT='nosuch://a' cannot be opened")
