"""The end of a node's part: whose turn the report is, and what the user is told."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from zeroband.config import load_config
from zeroband.runtime.afterword import closing_words, end_of_run, is_last_here, start_report


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


def test_closing_words_say_where_everything_lies(run_dir: Path) -> None:
    (run_dir / "a" / "sample.txt").touch()
    flags = [f"--run.dir={run_dir.parent}", "--run.id=r", "--node.id=a", "--ckpt.path=s3://bucket/c/"]
    said = closing_words(load_config(flags, {}), run_dir / "report.html")
    assert [line.split()[0] for line in said.splitlines()[:6]] == [
        *("metrics", "events", "checkpoints", "sample", "report", "next"),
    ]
    assert "s3://bucket/c/r" in said and f"open {run_dir / 'report.html'}" in said
    bare = closing_words(load_config([*flags[:3]], {}), None)
    assert "report.html" not in bare and "export" not in bare and f"zeroband status {run_dir}" in bare


def test_run_ends_all_the_same_where_its_folder_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert end_of_run(load_config([f"--run.dir={tmp_path}", "--run.id=gone", "--node.id=a"], {})) == ""
    assert "cannot look into the run directory" in caplog.text


def test_run_ends_all_the_same_where_no_report_can_be_written(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    start_report(run_dir, writer=("-c", "raise SystemExit(3)"))
    assert "no report was written" in caplog.text
    start_report(run_dir, wait_s=0.0, writer=("-c", "pass"))
    flags = [f"--run.dir={run_dir.parent}", "--run.id=r", "--node.id=a", "--observe.report=false"]
    assert "report" not in end_of_run(load_config(flags, {}))
    assert not (run_dir / "report.html").exists()
