"""The end of a node's part: whose turn the report is, and what the user is told."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from zeroband.config import RunConfig, load_config
from zeroband.elastic.membership.departure import Departure
from zeroband.errors import Leaving, RunOver, StoreLost
from zeroband.node.launched import RANKS_FILE
from zeroband.runtime import run_summary
from zeroband.runtime.run_summary import RunSummary, end_of_run, is_last_here, start_report, summary_of


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for name in ("a", "b", "no-node"):
        (tmp_path / "r" / name).mkdir(parents=True)
    for name in ("a", "b"):
        (tmp_path / "r" / name / "events.jsonl").touch()
    return tmp_path / "r"


def test_report_is_due_from_the_last_trainer_in_the_folder(run_dir: Path) -> None:
    assert is_last_here(run_dir, "a")
    with (run_dir / "b" / "events.jsonl").open() as _file:
        assert is_last_here(run_dir, "a")  # a reader is no trainer
    held = os.open(run_dir / "b", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert not is_last_here(run_dir, "a")
    assert is_last_here(run_dir, "b")
    os.close(held)
    assert is_last_here(run_dir, "a")


def test_summary_of_say_where_everything_lies(run_dir: Path) -> None:
    (run_dir / "a" / "sample.txt").touch()
    flags = [f"--run.dir={run_dir.parent}", "--run.id=r", "--node.id=a", "--ckpt.path=s3://bucket/c/"]
    said = summary_of(load_config(flags, {}), run_dir / "report.html")
    assert [line.split()[0] for line in said.splitlines()[:6]] == [
        *("metrics", "events", "checkpoints", "sample", "report", "next"),
    ]
    assert "s3://bucket/c/r" in said and f"zeroband board {run_dir}" in said
    left = summary_of(load_config(flags, {}), None, is_complete=False)
    assert "the same command, with --run.id r --resume" in left and "zeroband sample" not in left
    assert "--resume" not in said
    for start in ("1", "2"):
        (run_dir / "a" / "wandb" / f"offline-run-{start}").mkdir(parents=True)
    offline = run_dir / "a" / "wandb" / "offline-run-2"
    assert f"wandb       wandb sync {offline}\n" in summary_of(load_config(flags, {}), None)
    bare = summary_of(load_config([*flags[:3]], {}), None)
    assert "report.html" not in bare and "export" not in bare and f"zeroband status {run_dir}" in bare


def test_run_ends_all_the_same_where_its_folder_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert end_of_run(load_config([f"--run.dir={tmp_path}", "--run.id=gone", "--node.id=a"], {})) == ""
    assert "cannot read the run directory" in caplog.text


def test_run_ends_all_the_same_where_no_report_can_be_written(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not start_report(run_dir, writer=("-c", "raise SystemExit(3)"))
    assert "no report was written" in caplog.text
    assert start_report(run_dir, wait_s=0.0, writer=("-c", "pass"))
    flags = [f"--run.dir={run_dir.parent}", "--run.id=r", "--node.id=a", "--observe.report=false"]
    assert "report" not in end_of_run(load_config(flags, {}))
    assert not (run_dir / "report.html").exists()


# -- whichever way it ends ------------------------------------------------------------------------------------------


@pytest.fixture
def config(run_dir: Path) -> RunConfig:
    return load_config([f"--run.dir={run_dir.parent}", "--run.id=r", "--node.id=a", "--observe.report=true"], {})


@pytest.fixture
def waits_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """For how long each report that was started would be waited for."""
    waits_s: list[float] = []

    def start(run_dir: Path, *, wait_s: float) -> bool:
        waits_s.append(wait_s)
        return True

    monkeypatch.setattr(run_summary, "start_report", start)
    return waits_s


def end_by(error: BaseException | None, config: RunConfig, departure: Departure) -> list[str]:
    """What the user is told where the training ends so."""
    said: list[str] = []
    departure.holds_work = True
    with nullcontext() if error is None else pytest.raises(type(error)), RunSummary(config, departure, said.append):
        if error is not None:
            raise error
    return said


@pytest.mark.parametrize(
    ("error", "wait_s"),
    [
        (None, 5.0),
        (Leaving("drained"), 5.0),
        (RunOver("meanwhile"), 5.0),
        (StoreLost("no answer"), 5.0),
        (ValueError("a bug"), 5.0),
        (SystemExit(130), 0.0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_end_has_its_report_and_its_words(
    error: BaseException | None, wait_s: float, config: RunConfig, run_dir: Path, waits_s: list[float]
) -> None:
    (said,) = end_by(error, config, Departure(25.0))
    assert waits_s == [wait_s]
    assert f"{run_dir / 'report.html'}, in a moment" in said


def test_nobody_waits_longer_for_the_report_than_the_node_may_stay(config: RunConfig, waits_s: list[float]) -> None:
    late, too_late = Departure(25.0), Departure(25.0)
    late.ask(time.monotonic() - 24.0)
    too_late.ask(time.monotonic() - 26.0)
    for departure in (late, too_late):
        end_by(Leaving("asked"), config, departure)
    assert 0.0 < waits_s[0] <= 1.0 and waits_s[1] == 0.0


def test_failure_that_the_launcher_answers_with_another_start_is_no_end(
    config: RunConfig, waits_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert end_by(StoreLost("no answer"), config, Departure(25.0)) == [] == waits_s
    assert len(end_by(Leaving("asked"), config, Departure(25.0))) == 1  # after which it does not start again
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    assert len(end_by(StoreLost("no answer"), config, Departure(25.0))) == 1


def test_other_ranks_and_nodes_that_never_came_in_are_silent(
    config: RunConfig, waits_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreLost), RunSummary(config, Departure(25.0), pytest.fail):
        raise StoreLost("no answer")
    ranks = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", RANKS_FILE: "file"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    assert end_by(None, config, Departure(25.0)) == [] == waits_s


def test_signal_ends_the_wait_for_the_report_and_changes_no_exit_code(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(run_dir: Path, *, wait_s: float) -> bool:
        raise SystemExit(143)

    monkeypatch.setattr(run_summary, "start_report", interrupt)
    assert end_by(None, config, Departure(25.0)) == []
    assert end_by(StoreLost("no answer"), config, Departure(25.0)) == []
