"""What membership and rounds cost 64 real members on a real Redis: `bench/control_plane.py`, held to bounds."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from zeroband.elastic.store.local_server import RedisServer

BENCH = Path(__file__).resolve().parents[2] / "bench"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_store_of_64_members_sends_little_and_members_compute_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setenv("PYTHONPATH", ":".join([str(BENCH), *sys.path]))  # the members' processes are made anew
    control_plane = importlib.import_module("control_plane")
    with RedisServer() as server:
        crowd = control_plane.Crowd(server, range(64))
        try:
            found = control_plane.figures(crowd, 64, rounds=2, train_s=2.0, transfer_s=0.5)
        finally:
            crowd.close()
    assert 0 < found.training_mbit < 10
    assert 0 < found.round_bytes < 500_000
    assert 0 < found.round_cpu_s < 0.020
    assert 4 <= found.round_commands < 10
