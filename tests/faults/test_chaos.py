"""One short soak, as a user starts it: real nodes, real faults, a report."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroband.chaos.command import main

pytestmark = [pytest.mark.soak, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(600)]

SECTIONS = ("# Chaos soak: all invariants held", "## Invariants", "## Faults", "## What survivors lost")


def test_short_soak_of_three_nodes_holds_all_invariants_and_writes_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZERO_BAND_RUN__DIR", str(tmp_path / "runs"))
    report = tmp_path / "report.md"
    options = ["--nodes", "3", "--minutes", "0.5", "--baseline-minutes", "0.15", "--mtbf-s", "6", "--seed", "3"]
    # other work may share the cores of a test: a node counts as hanging later than in a soak of its own
    shorter = ["--slack-s", "30", "--outer.inner-seconds", "3", "--data.cache-dir", str(tmp_path / "cache")]
    code = main([*options, "--report", str(report), *shorter])
    assert code == 0, capsys.readouterr().out
    text = report.read_text(encoding="utf-8")
    positions = [text.index(section) for section in SECTIONS]
    assert positions == sorted(positions)
    assert "0 digest mismatches, 0 hangs" in text
    assert "0 repeated, 0 skipped" in text
    assert "| all | 0 |" not in text, "no fault struck"
