"""The ranks of one node as processes that run a worker's file, with the variables that torchrun would give them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

DEADLINE_S = 240


def run_ranks(worker: Path, folder: Path, count: int) -> None:
    """Run `worker FOLDER` on so many ranks. Raises AssertionError with what they said where one fails."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # as under torchrun: the store is there already
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    command = [sys.executable, str(worker), str(folder)]
    ranks = [
        subprocess.Popen(
            command, env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(count)
    ]
    try:
        said = [rank.communicate(timeout=DEADLINE_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * count, "\n".join(said)[-4000:]
