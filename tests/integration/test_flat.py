"""The canonical flat state against what FSDP2 really gives to the ranks of a node: two and three gloo processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

WORKER = Path(__file__).with_name("flat_worker.py")
RANKS = 3

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of three ranks found."""
    folder = tmp_path_factory.mktemp("flat")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # as under torchrun: the store is there already
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
    }
    command = [sys.executable, str(WORKER), str(folder)]
    ranks = [
        subprocess.Popen(
            command, env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(RANKS)
    ]
    try:
        said = [rank.communicate(timeout=200)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * RANKS, "\n".join(said)[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("world", ["two", "three"])
def test_shards_of_fsdp2_are_the_ranges_of_the_flat_state(seen: list[dict[str, Any]], world: str) -> None:
    found = [rank[world] for rank in seen if world in rank]
    assert len(found) == {"two": 2, "three": 3}[world]
    assert all(len(rank) == 10 for rank in found)
    assert [name for rank in found for name, holds in rank.items() if not holds] == []


def test_memory_that_is_too_small_ends_all_ranks_with_one_reason(seen: list[dict[str, Any]]) -> None:
    assert len({rank["refusal"] for rank in seen}) == 1
    assert "shared memory is too small" in seen[0]["refusal"]
