"""Real runs on ids that were made before: the tutorial of docs/data.md, word for word, and a terabyte."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zeroband.observe.jsonl import JsonlTail
from zeroband.tools.data.audit import audit, read_rounds

ROOT = Path(__file__).resolve().parents[2]


def blocks() -> dict[str, list[str]]:
    """The section's blocks, by their languages."""
    section = (ROOT / "docs" / "data.md").read_text(encoding="utf-8").partition("## From a folder of Parquet")[2]
    found: dict[str, list[str]] = {}
    for language, block in re.findall(r"```(\w+)\n(.*?)```", section.partition("\n## ")[0], flags=re.DOTALL):
        found.setdefault(language, []).append(block)
    return found


@pytest.mark.slow
def test_folder_of_parquet_is_prepared_and_trained_on_by_two_nodes(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    for number in range(2):
        texts = [f"document {number} {row}, " + "words of it " * (5 + row % 7) for row in range(400)]
        pq.write_table(pa.table({"text": texts}), tmp_path / "corpus" / f"{number}.parquet")
    for name in ("scripts", "src"):
        (tmp_path / name).symlink_to(ROOT / name)
    python = tmp_path / ".venv" / "bin" / "python"  # as scripts/setup.sh leaves it in a clone
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    found = blocks()
    (settings,) = found["toml"]
    (tmp_path / "run.toml").write_text(settings, encoding="utf-8")
    environ = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "ZERO_BAND_TRAIN__THREADS": "1",
        "ZERO_BAND_RUN__DIR": str(tmp_path / "runs"),
    }
    prepare, simulate = found["bash"][0], found["bash"][-1]
    said = ""
    for commands in (prepare, simulate):
        command = ["bash", "-euo", "pipefail", "-c", commands]
        made = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240)
        assert made.returncode == 0, made.stdout + made.stderr
        said += made.stdout
    assert 'type = "tokens"' in said and "document 0" in said, "what to paste, and samples as text"
    (run_dir,) = {path.parent.parent for path in (tmp_path / "runs").glob("*/*/metrics.jsonl")}
    metrics = [JsonlTail(path).read() for path in sorted(run_dir.glob("*/metrics.jsonl"))]
    losses = [[row["train/loss"] for row in rows if "train/loss" in row] for rows in metrics]
    assert len(losses) == 2 and all(last[-1] < last[0] for last in losses)
    result = audit(read_rounds(run_dir))
    assert result.is_exact and sum(account.trained for account in result.accounts.values()) == 40 * 8 * 2


@pytest.mark.slow
def test_first_step_on_a_terabyte_takes_less_than_a_gigabyte_of_memory(tmp_path: Path) -> None:
    with (tmp_path / "ids.bin").open("wb") as file:
        file.truncate(1 << 40)  # a sparse file
    settings = {
        "model.d_model": 32,
        "model.n_layers": 1,
        "model.n_heads": 2,
        "data.seq_length": 256,
        "data.source.type": "tokens",
        "data.source.format": "nanogpt",
        "data.source.path": tmp_path / "ids.bin",
        "train.total_steps": 1,
        "train.batch_size": 64,
        "train.micro_bs": 16,
        "train.device": "cpu",
        "train.threads": 1,
        "run.dir": tmp_path / "runs",
        "run.id": "terabyte",
        "node.id": "a",
    }
    flags = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "zeroband.train", *flags]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert made.returncode == 0, made.stderr
    (row,) = JsonlTail(tmp_path / "runs" / "terabyte" / "a" / "metrics.jsonl").read()
    assert row["train/tokens"] == 64 * 256 and row["data/pass"] == 0
    assert 0 < row["node/rss_bytes"] < 1e9
