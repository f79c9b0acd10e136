"""How the ranks of a node wait for one another before they can talk: whom they name, when they stop, what ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest

from zeroband.errors import ConfigError
from zeroband.node import mesh
from zeroband.node.launched import RANKS_FILE
from zeroband.node.mesh import RankWait, rendezvous

ENVIRON = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


def test_a_rank_names_those_that_are_missing_and_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    call = RankWait(2, "at its launcher", said.append, timeout_s=0.0)
    with pytest.raises(ConfigError, match=r"rank 2 waited 0 s for ranks 0, 1 of this node at its launcher; start all"):
        call.wait([0, 1], speaks=True)
    monkeypatch.setattr(mesh, "_SAID_FIRST_S", 0.0)
    call = RankWait(2, "at its launcher", said.append)
    call.wait([1], speaks=False)
    call.wait([1], speaks=True)
    call.wait([1], speaks=True)
    assert said == ["rank 2 waits for rank 1 of this node at its launcher"]


def test_ranks_meet_in_a_file(tmp_path: Path) -> None:
    environ = {RANKS_FILE: str(tmp_path / "ranks")}
    stores = [Thread(target=rendezvous, args=(environ, rank, 3, 60.0), daemon=True) for rank in range(3)]
    for store in stores:
        store.start()
    for store in stores:
        store.join(timeout=60)
    assert not any(store.is_alive() for store in stores)


def test_a_rank_that_waits_for_rank_0_says_so_and_obeys(tmp_path: Path) -> None:
    """Nobody listens at its MASTER_PORT, as where the variables of another launcher were left behind."""
    probe = (
        "import sys; from zeroband.node import mesh; from zeroband.train import main; "
        "mesh._SAID_FIRST_S = 0; "
        "sys.exit(main(['@debug/normal', '--run.dir', sys.argv[1], '--data.cache_dir', sys.argv[1], '--run.id', 'x']))"
    )
    environ = {**os.environ, **ENVIRON, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", probe, str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ) as rank:
        assert rank.stderr is not None
        assert any(
            "zeroband: rank 1 waits for rank 0 of this node at 127.0.0.1:1 (MASTER_ADDR" in line for line in rank.stderr
        )
        rank.send_signal(signal.SIGTERM)
        assert rank.wait(timeout=60) == 0
