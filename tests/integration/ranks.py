"""The ranks of one node as processes that run a worker's `main(folder)`, with the variables that torchrun would give.

They are forked from one process that has loaded the worker: loading torch and FSDP2 takes longer than most of its work.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

DEADLINE_S = 240


def run_ranks(worker: str, *nodes: tuple[Path, int]) -> None:
    """Run a worker of this folder on each node's ranks, one node after the other; `nodes`: folder and count of ranks.

    Raises AssertionError with what the ranks said where one fails.
    """
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    asked = json.dumps([(str(folder), count) for folder, count in nodes])
    command = [sys.executable, "-m", __name__, f"{__package__}.{worker}", asked]
    done = subprocess.run(command, env=environ, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S + 30)
    assert done.returncode == 0, done.stderr[-4000:]


def main(worker: str, asked: str) -> int:
    """Fork the ranks, and wait for them. Returns 1 where one fails, which ends the others."""
    import torch.distributed as dist

    from zeroband.node.process_start import load_uncollected

    work = load_uncollected(worker).main
    for module in ("torch.distributed.fsdp", "torch._dynamo"):  # which ranks would load when they first shard
        load_uncollected(module)
    fork = multiprocessing.get_context("fork")
    for folder, count in json.loads(asked):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # as under torchrun: the store is there already
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
        }
        ranks = [fork.Process(target=run_rank, args=(work, Path(folder), rank)) for rank in range(count)]
        for rank in ranks:
            rank.start()
        # asked once in a turn: a rank may end at any moment, and of no sentinels `wait` waits for all of its deadline
        while running := [rank.sentinel for rank in ranks if rank.exitcode is None]:
            if any(rank.exitcode for rank in ranks) or not multiprocessing.connection.wait(running, DEADLINE_S):
                break
        failed = any(rank.exitcode != 0 for rank in ranks)
        for rank in ranks:
            rank.kill()
        if failed:
            return 1
    return 0


def run_rank(work: Callable[[Path], None], folder: Path, rank: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    work(folder)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
