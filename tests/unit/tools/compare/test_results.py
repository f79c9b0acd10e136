"""Outcomes on disk, and a comparison that goes on where it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tests.unit.tools.compare.outcomes import PARAMS, counted, failed, outcome

from zeroband.tools.compare import command
from zeroband.tools.compare.command import Comparison
from zeroband.tools.compare.options import read_options
from zeroband.tools.compare.results import Outcome, Point, ResultFiles
from zeroband.tools.compare.runner import Stopped
from zeroband.tools.compare.trials import Trial


def test_outcome_comes_back_as_it_was_kept(tmp_path: Path) -> None:
    files, kept = ResultFiles(tmp_path / "new"), replace(outcome("ddp", 1e-3, None), digest="d1")
    files.save(kept)
    assert files.load("d1") == kept and kept.state == "diverged"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["d1.json"]


@pytest.mark.parametrize("damage", ["", "{}", '{"format": 0}', "[1]", '{"format": 1, "points": [], "measured": null}'])
def test_file_that_cannot_be_read_counts_as_none(tmp_path: Path, damage: str) -> None:
    (tmp_path / "d1.json").write_text(damage)
    assert ResultFiles(tmp_path).load("d1") is None


def test_failed_run_and_one_of_another_digest_are_made_again(tmp_path: Path) -> None:
    files = ResultFiles(tmp_path)
    files.save(replace(failed("ddp", 1e-3), digest="d1"))
    files.save(replace(outcome("ddp", 1e-3, 1.0), digest="d2"))
    (tmp_path / "d2.json").rename(tmp_path / "d3.json")
    assert files.load("d1") is None and files.load("d3") is None


class Machine:
    """Stands for the runner: a loss for each method and learning rate; stops, or fails, where it is told to."""

    def __init__(self, *, stops_at: int = 10**9, fails: str = "") -> None:
        self.made: list[tuple[str, float, int]] = []
        self._stops_at, self._fails = stops_at, fails

    def run(self, one: Trial, start: Path | None, on_progress: Callable[[float], None]) -> Outcome:
        if len(self.made) == self._stops_at:
            raise Stopped("interrupted")
        self.made.append((one.arm.name, one.lr, one.seed))
        on_progress(0.5)
        if one.arm.name == self._fails:
            return Outcome(one.arm.name, one.lr, one.seed, one.digest, failure="boom", took_s=1.0)
        if self._fails == "everything":
            return Outcome(one.arm.name, one.lr, one.seed, one.digest, PARAMS, (Point(10, None),), measured=counted())
        loss = 1.0 + abs(one.lr - 4e-3) + 0.1 * one.seed
        shown = {"points": (Point(10, loss),), "tuning_loss": loss, "measured": counted(), "took_s": 1.0}
        return Outcome(one.arm.name, one.lr, one.seed, one.digest, PARAMS, **shown)


def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    """Have comparisons make their runs by a machine; no text is cut, and no figure is drawn."""
    monkeypatch.setenv("ZERO_BAND_RUN__DIR", str(tmp_path / "runs"))
    monkeypatch.setattr(command, "Runner", lambda *_args, **_options: machine)
    monkeypatch.setattr(command, "cut", lambda *_: None)
    monkeypatch.setattr(command, "write_pngs", lambda *_: ())


def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: Machine, *flags: str) -> Comparison:
    pretend(tmp_path, monkeypatch, machine)
    options = read_options(["--methods=ddp,diloco", "--lrs=1e-3,2e-3", f"--out={tmp_path}", "--seeds=2", *flags])
    comparison = Comparison(options, "zeroband compare ...")
    comparison.run(Console(quiet=True))
    return comparison


def test_document_says_the_model_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared(tmp_path, monkeypatch, Machine(), "--model.n-layers=3", "--model.d-model=96")
    told = (tmp_path / "table.md").read_text()
    assert "| model | 1k trained parameters: a Llama decoder of 3 layers, width 96, " in told


def test_learning_rates_are_added_until_the_best_is_bracketed_then_the_other_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine()
    comparison = compared(tmp_path, monkeypatch, machine)
    of_ddp = [(lr, seed) for arm, lr, seed in machine.made if arm == "ddp"]
    assert of_ddp == [(1e-3, 0), (2e-3, 0), (4e-3, 0), (8e-3, 0), (4e-3, 1)]
    assert [(row.lr, row.is_bracketed, len(row.losses)) for row in comparison.rows()] == [(4e-3, True, 2)] * 2
    assert (tmp_path / "table.md").read_text().startswith("| method |")


@pytest.mark.soak
def test_interrupted_comparison_makes_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Stopped):
        compared(tmp_path, monkeypatch, Machine(stops_at=6))
    rest = Machine()
    comparison = compared(tmp_path, monkeypatch, rest)
    assert rest.made == [("diloco", lr, seed) for lr, seed in ((2e-3, 0), (4e-3, 0), (8e-3, 0), (4e-3, 1))]
    assert len(comparison.outcomes) == 10
    again = Machine()
    compared(tmp_path, monkeypatch, again, "--title=other")
    assert again.made == []


def test_failed_method_stands_in_the_table_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(fails="ddp")
    compared(tmp_path, monkeypatch, machine)
    assert [arm for arm, _, _ in machine.made] == ["ddp", *["diloco"] * 5]
    table = (tmp_path / "table.md").read_text()
    assert "| ddp | failed | -" in table and "- Runs that failed: ddp." in table


CLAIM = """
[compare]
methods = ["ddp", "diloco"]
lrs = [4e-3]
seeds = {seeds}
[[compare.claims]]
figure = "loss_ratio"
of = "{of}"
over = "ddp"
at_most = {at_most}
"""


@pytest.mark.parametrize(
    ("of", "at_most", "fails", "code", "said"),
    [
        ("diloco", 1.0, "", 0, ""),
        (
            "diloco",
            1.1,
            "one seed",
            4,
            "cannot tell: loss_ratio of diloco over ddp: at most 1.1; found 1 with one seed",
        ),
        ("diloco", 0.5, "", 3, "NOT MET: loss_ratio of diloco over ddp: at most 0.5; found 1"),
        ("demo", 1.0, "", 1, "not measured: loss_ratio of demo over ddp: at most 1; demo is not in this comparison"),
        ("diloco", 1.0, "diloco", 1, "diloco, lr 0.004, seed 0 failed"),
        ("diloco", 1.0, "everything", 1, "no run ended with a loss, so nothing was compared"),
    ],
)
def test_comparison_fails_where_its_claims_are_not_met_or_not_measured(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    of: str,
    at_most: float,
    fails: str,
    code: int,
    said: str,
) -> None:
    pretend(tmp_path, monkeypatch, Machine(fails=fails))
    (tmp_path / "claims.toml").write_text(CLAIM.format(of=of, at_most=at_most, seeds=1 if fails == "one seed" else 2))
    assert command.main([f"@{tmp_path / 'claims.toml'}", f"--out={tmp_path / 'out'}"]) == code
    assert said in capsys.readouterr().err
