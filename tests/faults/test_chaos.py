"""One short soak, as a user starts it: real nodes, real faults, a report."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from zeroband.tools.chaos.command import main, soak
from zeroband.tools.chaos.options import ChaosOptions

pytestmark = [pytest.mark.soak, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(600)]

SECTIONS = ("# Chaos soak: all invariants held", "## Invariants", "## Faults", "## What survivors lost")


def test_short_soak_of_three_nodes_holds_all_invariants_and_writes_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.md"
    options = ["--nodes", "3", "--minutes", "0.5", "--baseline-minutes", "0.15", "--mtbf-s", "6", "--seed", "3"]
    # other work may share the cores of a test: a node counts as hanging later than in a soak of its own
    shorter = ["--slack-s", "30", "--outer.inner-seconds", "3", "--data.cache-dir", str(tmp_path / "cache")]
    code = main([*options, "--report", str(report), "--run.dir", str(tmp_path / "runs"), *shorter])
    assert code == 0, capsys.readouterr().out
    text = report.read_text(encoding="utf-8")
    positions = [text.index(section) for section in SECTIONS]
    assert positions == sorted(positions)
    assert "0 digest mismatches, 0 hangs" in text
    assert "0 repeated, 0 skipped" in text
    rounds, samples = re.findall(r"^(\d+) rounds committed.* (\d+) samples trained", text, re.MULTILINE)[0]
    assert int(rounds) > 5 and int(samples) > 0
    assert "| all | 0 |" not in text, "no fault struck"


def test_short_soak_with_two_stores_and_two_nodes_that_cannot_be_dialled_holds_all_invariants(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.md"
    options = [
        "--nodes",
        "4",
        "--stores",
        "2",
        "--dial-out-only",
        "2",
        "--kinds",
        "store lost,relay killed",
        "--seed",
        "1",
    ]
    times = ["--minutes", "1", "--baseline-minutes", "0.15", "--mtbf-s", "6", "--slack-s", "30", "--fault.detect-s=3"]
    where = ["--run.dir", str(tmp_path / "runs"), "--data.cache-dir", str(tmp_path / "cache")]
    code = main([*options, *times, "--report", str(report), *where, "--outer.inner-seconds", "3"])
    assert code == 0, capsys.readouterr().out
    struck = dict(re.findall(r"^\| (store lost|relay killed) \| (\d+) ", report.read_text("utf-8"), re.MULTILINE))
    assert struck.keys() == {"store lost", "relay killed"}


def spinning(stack: ExitStack) -> None:
    """A program that never rests, in a session of its own, until the stack is closed."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
    stack.callback(process.wait)
    stack.callback(process.kill)


def test_soak_on_a_host_without_a_processor_to_spare_is_starved_and_broke_nothing(tmp_path: Path) -> None:
    """All nodes share one core, with programs that never rest from the first fault on."""
    flags = ["@configs/chaos.toml", "--outer.inner-seconds=none", "--outer.inner-steps=80"]
    options = ChaosOptions(
        (*flags, "--fault.inject=[]", "--fault.detect-s=2", f"--data.cache-dir={tmp_path / 'cache'}"),
        nodes=2,
        keep_undisturbed=1,
        minutes=0.7,
        baseline_minutes=0.2,
        mtbf_s=8.0,
        seed=2,
        slack_s=0.1,
        directory=tmp_path,
    )
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [min(everywhere)])
    try:
        with ExitStack() as stack:

            def say(line: str) -> None:
                if "faults in" in line:
                    for _ in range(12):
                        spinning(stack)
                if "no more faults" in line:
                    stack.close()

            outcome = soak(options, say=say)
    finally:
        os.sched_setaffinity(0, everywhere)
    assert outcome.judgement.exit_code == 3, outcome.report
    assert "# Chaos soak: STARVED, no conclusion" in outcome.report
    assert any("for a CPU" in line for line in outcome.judgement.starved)
