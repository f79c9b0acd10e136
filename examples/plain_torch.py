"""A small byte-level language model in a plain PyTorch loop, trained by peers that come and go.

In two terminals, the second one a while later:

    python examples/plain_torch.py
    python examples/plain_torch.py --store unix:///tmp/zeroband-redis-XXXX/redis.sock    # as the first one says

On several machines they share a Redis: `--store redis://HOST:6379` on each. One peer of two
ranks: `torchrun --nproc_per_node=2 examples/plain_torch.py --store ...`. Ctrl-C ends a peer at once; SIGTERM has it
hand over what it learned. Two peers by one command: `zeroband simulate 2 1 examples/plain_torch.py`.

The text is Python's standard library, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import zeroband


class ByteModel(nn.Module):
    """Predicts the next byte: (b, t) int64 bytes give (b, t, 256) logits."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.embedding(text))
        return self.head(hidden)


def standard_library() -> Tensor:
    """(n,) uint8: the sources beside the `os` module."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def next_batch(text: Tensor, generator: torch.Generator, samples: int, length: int = 64) -> Tensor:
    """(samples, length + 1) int64 from random places."""
    starts = torch.randint(len(text) - length - 1, (samples,), generator=generator)
    return torch.stack([text[start : start + length + 1] for start in starts.tolist()]).long()


def warmup_and_decay(step: int) -> float:
    """Of the learning rate: linear to its peak at step 100, then as 1 / sqrt(step)."""
    return min((step + 1) / 100, (100 / (step + 1)) ** 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a byte-level model together with other peers.")
    parser.add_argument("--store", help="address of the run's Redis; without it this peer starts one for this machine")
    parser.add_argument("--total-steps", type=int, help="inner steps of the run; without it, until it is ended")
    parser.add_argument("--inner-steps", type=int, default=50, help="between two outer steps")
    parser.add_argument("--batch-size", type=int, default=16, help="samples of this peer in a step, over all its ranks")
    parser.add_argument("--pause-s", type=float, default=0.0, help="after each step, to watch it slowly")
    asked = parser.parse_args()

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)  # peers that begin the run together hold one model; later ones fetch it
    model = ByteModel()
    trained = DistributedDataParallel(model) if ranks > 1 else model
    text, generator = standard_library(), torch.Generator().manual_seed(os.getpid())  # each peer reads elsewhere

    with zeroband.DiLoCoOptimizer(
        params=model.named_parameters(),
        batch_size=asked.batch_size,
        inner_steps=asked.inner_steps,
        store=asked.store,
        inner_optimizer=partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.01),
        outer_optimizer=partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
        lr_scheduler=partial(LambdaLR, lr_lambda=warmup_and_decay),
        total_steps=asked.total_steps,
    ) as optimizer:
        signal.signal(signal.SIGTERM, lambda *_: optimizer.leave())
        print(f"in the run at step {optimizer.inner_step}; others join with --store {optimizer.store_url}", flush=True)
        while not optimizer.is_done:
            batch = next_batch(text, generator, asked.batch_size // ranks)
            logits = trained(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            round = optimizer.last_round  # None until a node that joined has contributed
            if round is not None and optimizer.inner_step % asked.inner_steps == 0:
                peers, digest = len(round.members), round.state_digest
                print(f"step {optimizer.inner_step}  loss {loss.item():.3f}  peers {peers}  {digest}", flush=True)
            time.sleep(asked.pause_s)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
