"""A real run on ids that were made before: a terabyte of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zeroband.observe.jsonl import JsonlTail


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
