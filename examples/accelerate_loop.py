"""A loop with Hugging Face's accelerate, trained by peers that come and go.

Needs `pip install accelerate`. In two terminals, the second one a while later:

    python examples/accelerate_loop.py
    ZERO_BAND_STORE__URL=unix:///tmp/zeroband-redis-XXXX/redis.sock python examples/accelerate_loop.py    # as it says

What `# zeroband` marks makes it a peer; the rest is the loop as it was. The text is Python's argparse.
"""

from __future__ import annotations

import argparse
import os  # zeroband
from itertools import chain, repeat
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import zeroband  # zeroband

try:
    from accelerate import Accelerator
except ImportError:
    raise SystemExit("this example needs accelerate: pip install accelerate") from None


class ByteModel(nn.Module):
    """Predicts the next byte: (b, t) int64 bytes give (b, t, 256) logits."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.recurrent(self.embedding(text))
        return self.head(hidden)


def warm_up(step: int) -> float:
    """Share of the learning rate at an inner step."""
    return min(1.0, (step + 1) / 20)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a byte-level model with accelerate, together with other peers.")
    parser.add_argument("--steps", type=int, default=2000, help="of the run, each of several micro-batches")
    parser.add_argument("--inner-steps", type=int, default=50, help="between two outer steps")
    asked = parser.parse_args()

    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = ByteModel().to(accelerator.device)
    samples = torch.tensor(list(Path(argparse.__file__).read_bytes())).unfold(0, 65, 16)  # (n, 65)
    torch.manual_seed(os.getpid())  # zeroband
    loader = DataLoader(samples, batch_size=4, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    diloco = optimizer = zeroband.DiLoCoOptimizer(  # zeroband
        inner_optimizer=optimizer,
        batch_size=2 * 4 * accelerator.num_processes,
        inner_steps=asked.inner_steps,
        total_steps=asked.steps,
    )
    # zeroband, before: schedule = LambdaLR(optimizer, warm_up)
    schedule = LambdaLR(optimizer, lambda _: warm_up(diloco.inner_step))
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    batches = chain.from_iterable(repeat(loader))
    # zeroband, before: for _ in range(asked.steps * 2):
    while not diloco.is_done:
        batch = next(batches)
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        print(f"loss {loss.item():.3f}", flush=True)
    diloco.close()  # zeroband


if __name__ == "__main__":
    main()
