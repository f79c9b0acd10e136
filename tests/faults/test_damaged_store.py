"""A run of real processes whose store somebody damages, key by key, while it trains: `bench/fuzz_store.py` in small."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zeroband.elastic.store.keys import Keys

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(600)]

FUZZ = Path(__file__).parents[2] / "bench" / "fuzz_store.py"
KINDS = ("deleted", "made a list", "forged")
NAMES = sorted({*Keys.names(), "ready", "ready_rev", "facts"})


def fuzz(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FUZZ), *arguments]
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": ":".join(sys.path)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900, check=False)


@pytest.mark.soak
def test_training_goes_on_while_every_key_of_its_store_is_damaged(tmp_path: Path) -> None:
    """No node ends, no round has two results, no sample is lost, all are members in the end."""
    run = fuzz(tmp_path, "--nodes", "2", "--minutes", "0", "--each-key", "--pause-s", "0.2", "--kinds", *KINDS)
    assert run.returncode == 0, f"{run.stdout[-2000:]}\n{run.stderr[-6000:]}"
    found = re.search(r"all held: (\d+) damages of (\d+) keys \((.*)\), (\d+) rounds", run.stdout)
    assert found is not None, run.stdout
    assert int(found[1]) == len(NAMES) * len(KINDS) and found[3].split(", ") == NAMES and int(found[4]) > 5


@pytest.mark.soak
def test_fuzz_without_a_damage_is_a_failure(tmp_path: Path) -> None:
    run = fuzz(tmp_path, "--nodes", "1", "--minutes", "0")
    assert run.returncode == 1 and "nothing was damaged, so nothing was shown" in run.stderr


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_training_goes_on_for_minutes_of_damages_at_random(tmp_path: Path) -> None:
    run = fuzz(tmp_path, "--nodes", "4", "--minutes", "5", "--seed", "2", "--each-key")
    assert run.returncode == 0, f"{run.stdout[-2000:]}\n{run.stderr[-6000:]}"
