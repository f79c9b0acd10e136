"""A real run on ids that were prepared before: a terabyte of them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.unit.data.prepared import write_sparse_set

from zeroband.observe.jsonl import JsonlTail

MEASURED = """
import json, resource, subprocess, sys
code = subprocess.call(sys.argv[1:], stdout=sys.stderr)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([code, used.ru_utime + used.ru_stime, 1024 * used.ru_maxrss]))
"""
"""Runs a command from a small process; one that a test starts itself has at least the peak of the tests so far."""


@pytest.mark.slow
def test_first_step_on_a_terabyte_comes_within_a_minute_and_a_gigabyte_of_memory(tmp_path: Path) -> None:
    settings = {
        "model.d_model": 32,
        "model.n_layers": 1,
        "model.n_heads": 2,
        "data.seq_length": 256,
        "data.source.type": "tokens",
        "data.source.path": write_sparse_set(tmp_path / "set", 1 << 39),
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
    command = [sys.executable, "-c", MEASURED, sys.executable, "-m", "zeroband.train", *flags]
    from_s = time.monotonic()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    took_s = time.monotonic() - from_s
    code, processor_s, peak_bytes = json.loads(done.stdout)
    assert code == 0, done.stderr
    (row,) = JsonlTail(tmp_path / "runs" / "terabyte" / "a" / "metrics.jsonl").read()
    print(f"{took_s:.1f} s from the start to the end of the run, {peak_bytes / 1e6:.0f} MB at most")
    assert row["train/tokens"] == 64 * 256 and row["data/pass"] == 0
    assert processor_s < 60 and peak_bytes < 1e9  # the machine may have other work than this
