"""What a run came to: its counters, and over another link; outcomes on disk; a comparison that goes on where it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.unit.tools.compare.outcomes import PARAMS, counted, failed, outcome

from zeroband.elastic.transport.shape import CONTENTION, MESSAGE_S
from zeroband.tools.compare import command
from zeroband.tools.compare.command import Comparison
from zeroband.tools.compare.options import read_options
from zeroband.tools.compare.results import Point, ResultFiles, RunResult, at_link, measured, payload_ratio
from zeroband.tools.compare.runner import Stopped
from zeroband.tools.compare.trials import Trial
from zeroband.tools.plan.forecast import HEADERS, Link


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

    def __init__(self, *, stops_at: int = 10**9, fails: str = "", best_outer: float | None = None) -> None:
        self.made: list[tuple[str, float, int]] = []
        self._stops_at, self._fails, self._best_outer = stops_at, fails, best_outer

    def run(self, one: Trial, start: Path | None, on_progress: Callable[[float], None]) -> RunResult:
        if len(self.made) == self._stops_at:
            raise Stopped("interrupted")
        self.made.append((one.arm.name, one.lr, one.seed))
        on_progress(0.5)
        if one.arm.name == self._fails:
            return RunResult(one.arm.name, one.lr, one.seed, one.digest, failure="boom", took_s=1.0)
        if self._fails == "everything":
            return RunResult(one.arm.name, one.lr, one.seed, one.digest, PARAMS, (Point(10, None),), measured=counted())
        loss = 1.0 + abs(one.lr - 4e-3) + 0.1 * one.seed
        if self._best_outer is not None:
            loss += abs(float(one.arm.name.rpartition("=")[2]) - self._best_outer)
        shown = {"points": (Point(10, loss),), "tuning_loss": loss, "measured": counted(), "took_s": 1.0}
        return RunResult(one.arm.name, one.lr, one.seed, one.digest, PARAMS, **shown)


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


def test_best_alternative_is_found_from_the_middle_on_and_it_alone_runs_all_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outer rates of 0.2 to 1, of which 0.8 is the best; the neighbours of the best pair are tried, and no others."""
    machine = Machine(best_outer=0.8)
    family = "--methods=diloco:optimizer.lr=0.2|0.4|0.6|0.8|1.0"
    results = tmp_path / "results"
    compared(tmp_path, monkeypatch, machine, family, "--lrs=2e-3,4e-3", f"--results={results}")
    made = [(float(arm.rpartition("=")[2]), lr, seed) for arm, lr, seed in machine.made]
    bracket = [(0.6, lr, 0) for lr in (2e-3, 4e-3, 8e-3)] + [(0.8, lr, 0) for lr in (4e-3, 8e-3, 2e-3)]
    assert made == [*bracket, (1.0, 4e-3, 0), (0.8, 4e-3, 1)]
    found = ResultFiles(results).load_all()
    assert len(found) == 8 and found[0].made_by.command == "zeroband compare ..." and found[0].made_by.commit
    assert (results / "diloco-optimizer.lr-0.8-lr-0.004-seed-1.json").exists()
    again = Machine()
    compared(tmp_path, monkeypatch, again, family, "--lrs=2e-3,4e-3", f"--results={results}")
    assert again.made == []


def test_failure_is_no_result_to_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared(tmp_path, monkeypatch, Machine(fails="ddp"), "--methods=ddp", f"--results={tmp_path / 'results'}")
    assert ResultFiles(tmp_path / "results").load_all() == []


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
    assert "| ddp | failed | -" in table and "- Failed runs: ddp." in table


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


# -- counters, against numbers computed by hand ----------------------------------------------------------------------

LINK = Link(up_bytes_per_s=1e6, down_bytes_per_s=1e6, rtt_s=0.1)
LAST_S = 0.4 / 32
"""The last chunk, a sixteenth of a shard, where a node sends 400 kB: to one other of two nodes, or to three of four."""


def line(step: int, step_s: float, **outer: Any) -> dict[str, Any]:
    values = {f"outer/{name}": value for name, value in outer.items()}
    return {"step": step, "train/step_s": step_s, "train/tokens": 100 * step, **values}


def test_counters_are_folded_over_nodes_and_rounds() -> None:
    ends_round = {"round": 1, "sent_bytes": 30, "received_bytes": 40, "blocked_s": 0.6, "apply_s": 0.1}
    one = [line(1, 0.5), line(2, 1.1, **ends_round), line(3, 0.5), line(4, 1.1, **{**ends_round, "round": 2})]
    other = [line(1, 0.5), line(2, 1.1, **{**ends_round, "sent_bytes": 50}), line(3, 0.5), line(4, 1.1)]
    found = measured([one, other])
    assert (found.nodes, found.steps, found.tokens, found.rounds) == (2, 4, 400, 2)
    assert (found.sent_bytes, found.received_bytes, found.peak_bytes) == (55, 60, 50)
    assert (found.step_s, found.wall_s, found.apply_s) == pytest.approx((0.5, 3.2, 0.15))
    assert found.blocked_s == pytest.approx(0.9)
    assert found.compute_utilisation == pytest.approx(2.0 / 3.2)
    assert found.sent_per_token == 55 / 200


def test_line_of_a_flush_is_about_several_rounds() -> None:
    numbers = [(1, 30), (2, 30), (4, 60), (5, 30)]
    found = measured([[line(step, 1.0, round=number, sent_bytes=sent) for step, (number, sent) in enumerate(numbers)]])
    assert (found.rounds, found.sent_bytes, found.peak_bytes) == (5, 150, 30)


def test_steps_that_all_end_rounds_are_counted_without_what_they_were_blocked() -> None:
    """Though the rounds took longer, beside training."""
    ends_round = {"round": 1, "wait_s": 0.3, "transfer_s": 0.4, "blocked_s": 0.35}
    assert measured([[line(1, 0.5, **ends_round), line(2, 0.7, **ends_round)]]).step_s == pytest.approx(0.25)


def test_node_without_metrics_is_an_error() -> None:
    with pytest.raises(ValueError, match="wrote no metrics"):
        measured([[line(1, 0.5)], []])


def test_payload_is_counted_once_however_often_it_was_sent() -> None:
    found = counted(nodes=4, sent=6000.0)  # 100 steps of 2 x 1000 bytes are the reference
    assert payload_ratio(found, PARAMS) == pytest.approx(200_000 / (6000 / 1.5))
    assert payload_ratio(replace(found, payload_bytes=2000.0), PARAMS) == pytest.approx(100)
    assert payload_ratio(replace(found, nodes=1), PARAMS) is None


def test_payloads_are_counted_where_they_are_sent_whatever_the_algorithm_is_called() -> None:
    """An aggregator sends none of its own; a line about two rounds has the payload of the newest."""
    one = [
        line(1, 0.5, round=1, sent_bytes=90, payload_bytes=30),
        line(2, 0.5, round=3, sent_bytes=180, payload_bytes=30),
    ]
    aggregator = [line(1, 0.5, round=1, sent_bytes=200), line(2, 0.5, round=3, sent_bytes=400, payload_bytes=None)]
    assert measured([one, aggregator]).payload_bytes == 90
    assert measured([aggregator]).payload_bytes is None


def test_link_makes_a_round_wait_for_its_bytes() -> None:
    found = counted(nodes=2, rounds=10, sent=4e6)  # 10 steps of 0.1 s, 0.1 s of applying, 400 kB a round
    took_s = HEADERS * (0.4 + LAST_S) + 0.1 + 2 * MESSAGE_S
    predicted = at_link(found, LINK)
    assert predicted.step_s == pytest.approx((1.0 + 0.1 + took_s) / 10)
    assert predicted.compute_utilisation == pytest.approx(1.0 / (1.1 + took_s))
    gathered = at_link(replace(found, payload_bytes=4e6), LINK)
    assert gathered.step_s == pytest.approx((1.1 + HEADERS * 0.4 + 0.1 + MESSAGE_S) / 10)
    crowded = at_link(replace(found, nodes=4), LINK)
    assert crowded.step_s == pytest.approx((1.1 + HEADERS * (CONTENTION * 0.4 + LAST_S) + 0.1 + 6 * MESSAGE_S) / 10)


def test_overlap_hides_what_fits_into_a_round() -> None:
    found = counted(nodes=2, rounds=10, sent=4e6)
    assert at_link(found, LINK, overlap_steps=10).step_s == pytest.approx(0.11)
    assert at_link(found, LINK, overlap_steps=2).step_s == pytest.approx(
        0.11 + (HEADERS * (0.4 + LAST_S) + 0.1 - 0.2 + 2 * MESSAGE_S) / 10
    )
    slow = at_link(found, Link(2.5e5, 2.5e5, 0.1), overlap_steps=500)  # a round lasts 1 s
    assert slow.step_s == pytest.approx(0.11 + (HEADERS * 4 * (0.4 + LAST_S) + 0.1 + 2 * MESSAGE_S - 1.0) / 10)


def test_other_machines_step_time_may_be_assumed() -> None:
    found = counted(nodes=2, rounds=10, sent=4e6)
    assert at_link(found, LINK, step_s=2.0).compute_utilisation > 0.95
    alone = counted(nodes=1, rounds=0, sent=0)
    assert at_link(alone, LINK, step_s=2.0).step_s == 2.0
