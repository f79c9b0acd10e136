"""`scripts/gpu_check.sh` with commands that only stand for the real ones: what it runs, and what it writes down."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Check = Callable[..., subprocess.CompletedProcess[str]]

PREDICTED = "# GPUs\n\nPredictions.\n\n"
PYTHON = """\
case "$*" in
    *is_available*) exit ${NO_GPU:-0} ;;
    *get_device_name*) printf 'a card with torch 9' ;;
    *) echo "python $*"; [ "$2" != round ] || exit ${ROUND_FAILS:-0} ;;
esac
"""


@pytest.fixture
def check(root: Path, tmp_path: Path) -> Check:
    """check(*parts, **env) runs it in a folder of its own."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(root / "scripts" / "gpu_check.sh", tmp_path / "scripts")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "gpu.md").write_text(f"{PREDICTED}## Measured\n\nof long ago\n", encoding="utf-8")
    for name, body in {"python": PYTHON, "pytest": 'echo "pytest $*"'}.items():
        command = tmp_path / ".venv" / "bin" / name
        command.parent.mkdir(parents=True, exist_ok=True)
        command.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        command.chmod(0o755)

    def run(*parts: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(tmp_path / "scripts" / "gpu_check.sh"), *parts],
            env={"PATH": os.environ["PATH"], **env}, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    return run


def written(tmp_path: Path) -> str:
    return (tmp_path / "docs" / "gpu.md").read_text(encoding="utf-8")


def test_every_part_is_run_and_written_down_below_the_predictions(check: Check, tmp_path: Path) -> None:
    done = check()
    assert done.returncode == 0, done.stderr
    text = written(tmp_path)
    assert text.startswith(f"{PREDICTED}## Measured\n\n`./scripts/gpu_check.sh` on a card with torch 9, ")
    assert [line for line in text.splitlines() if line.startswith("### ")] == [
        f"### {name}" for name in ("tests", "nodes", "kernels", "150M", "1B")
    ]
    assert "of long ago" not in text and "FAILED" not in text
    assert "pytest -q -p no:cacheprovider -m gpu tests/unit tests/gpu" in text
    assert "python bench/train_loop.py" in text and " @1B --data.source.type synthetic-tokens" in text


def test_what_fails_is_written_down_and_the_rest_still_runs(check: Check, tmp_path: Path) -> None:
    done = check("kernels", "1B", ROUND_FAILS="7")
    assert done.returncode == 1
    text = written(tmp_path)
    assert "FAILED with 7 after" in text and "python bench/train_loop.py" in text and "### tests" not in text


def test_parts_are_kept_from_call_to_call(check: Check, tmp_path: Path) -> None:
    assert check("nodes").returncode == check("kernels").returncode == 0
    assert "### nodes" in written(tmp_path) and "### kernels" in written(tmp_path)


def test_unknown_part_names_those_that_exist(check: Check) -> None:
    done = check("everything")
    assert done.returncode == 2 and "there are: tests nodes kernels 150M 1B" in done.stderr


def test_machine_without_a_gpu_is_told_how_to_get_a_torch_that_sees_one(check: Check) -> None:
    done = check(NO_GPU="1")
    assert done.returncode == 1 and "./scripts/setup.sh --torch cuda" in done.stderr
