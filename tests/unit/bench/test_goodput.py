"""The two accounts of goodput, in a published setting."""

from __future__ import annotations

import re
import sys

import pytest
from bench import goodput
from bench.virtual_models import NodeModel, RunModel
from bench.virtual_run import SimulationResult, VirtualRun

PHASE_S = 30.0


def test_causes_of_loss_add_up_to_what_does_not_count() -> None:
    spent_s = {"away": 100.0, "joining": 5.0, "waiting": 3.0, "transferring": 2.0, "frozen": 10.0, "training": 880.0}
    found = SimulationResult(tokens=800, possible=1000.0, losses=4, spent_s=spent_s)
    assert (found.training, found.goodput) == (0.88, 0.8)
    loss_s = goodput.loss_s(found)
    assert loss_s["absent"] == 25 and loss_s["trained in vain"] == pytest.approx(20)
    assert sum(loss_s.values()) == pytest.approx((1 - found.goodput) * 1000 / 4)
    assert goodput.phases_lost(found, 10.0) == pytest.approx((200 - 100) / 4 / 10)


def test_nodes_that_are_there_train_and_a_failure_costs_about_half_a_phase() -> None:
    """Eight learners that fail every 210 s each, as in the published 0.88."""
    model = RunModel(
        nodes=(NodeModel(PHASE_S / goodput.STEPS, goodput.MBIT_S),) * 8,
        inner_steps=2 * goodput.STEPS,
        inner_seconds=PHASE_S,
        encoded_bytes=0,
        state_bytes=0,
        rtt_ms=0,
        agreement_s=0.5,
        detect_s=5.0,
        overlaps=True,
        mtbf_s=210.0,
        away_s=28.6,
        straggler_grace=0.1,
    )
    found = VirtualRun(model).play(200)
    there = 1 - found.spent_s["away"] / sum(found.spent_s.values())
    assert found.losses > 100 and found.training > there - 0.01
    assert goodput.phases_lost(found, PHASE_S) < 0.62


def test_command_prints_both_accounts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["goodput", "--nodes", "4", "--rounds", "20", "--mtbf-s", "300", "--by-time"])
    goodput.main()
    said = capsys.readouterr().out
    rows = [line for line in said.splitlines() if re.search(r"\| failures, (grace|waiting)", line)]
    header = said.splitlines()[0].split(" | ")
    assert header[1:3] == ["training", "counted"] and len(rows) == 2
    for row in rows:
        cells = row.split(" | ")
        assert len(cells) == len(header) and 1 > float(cells[1]) > float(cells[2]) > 0
