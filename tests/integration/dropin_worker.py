"""One rank of a node whose loop is its own: `dropin_worker FORM OUT`, FORM ddp or fsdp. Rank 0 writes how it ended.

All ranks read one batch and take its rows in turn, so both forms learn the same.
"""

from __future__ import annotations

import json
import sys
import threading
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import zeroband


def gloo_threads() -> int:
    """Threads that move bytes for the groups of gloo that are open in this process, or that something still holds."""
    return sum("gloo_tcp_loop" in (task / "comm").read_text() for task in Path("/proc/self/task").iterdir())


def whole(model: nn.Module) -> list[float]:
    """All parameters in order."""
    parts = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return nn.utils.parameters_to_vector(parts).tolist()


def main() -> None:
    form, out = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))  # rows that two ranks do not divide
    trained: nn.Module = fully_shard(model) if form == "fsdp" else DistributedDataParallel(model)
    dist.barrier()
    before = gloo_threads()
    with zeroband.DiLoCoOptimizer(
        params=model.named_parameters(),
        batch_size=8,
        inner_steps=2,
        inner_optimizer=partial(torch.optim.AdamW, lr=0.05),
        total_steps=6,
        settings={"comm.codec": "fp32", "run.dir": out, "run.id": "-".join((form, *out.parts[-2:])), "node.id": "n"},
    ) as optimizer:
        during = gloo_threads()
        while not optimizer.is_done:
            torch.manual_seed(optimizer.inner_step)
            trained(torch.randn(8, 5)[rank::ranks]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        rounds = optimizer.last_round.round
    found = {"params": whole(model), "rounds": rounds, "gloo": [before, during, gloo_threads()]}
    found["threads"] = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if rank == 0:
        (out / f"{form}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
