"""A loop as nanoGPT has it, trained by peers that come and go: rate set by hand, accumulated gradients, autocast.

In two terminals, the second one a while later:

    python examples/nano_gpt.py
    ZERO_BAND_STORE__URL=unix:///tmp/zeroband-redis-XXXX/redis.sock python examples/nano_gpt.py    # as the first says

What `# zeroband` marks makes it a peer; the rest is the loop as it was. The text is Python's argparse.
"""

from __future__ import annotations

import argparse
import math
import os  # zeroband
from pathlib import Path

import torch
from torch import Tensor, nn

import zeroband  # zeroband

BATCH, LENGTH, ACCUMULATE = 4, 64, 2
LEARNING_RATE, LEAST, WARMUP = 3e-3, 3e-4, 20


class GPT(nn.Module):
    """Predicts the next byte: (b, t) int64 bytes give (b, t, 256) logits."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        embedded = self.bytes(text) + self.places.weight[:length]
        return self.head(self.blocks(embedded, mask=mask, is_causal=True))


def learning_rate(iteration: int, iterations: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if iteration < WARMUP:
        return LEARNING_RATE * (iteration + 1) / WARMUP
    return LEAST + (LEARNING_RATE - LEAST) * (1 + math.cos(math.pi * iteration / iterations)) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT together with other peers.")
    parser.add_argument("--steps", type=int, default=2000, help="of the run, each of several micro-batches")
    parser.add_argument("--inner-steps", type=int, default=50, help="between two outer steps")
    asked = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    # zeroband, before: order = torch.Generator().manual_seed(0)
    order = torch.Generator().manual_seed(os.getpid())
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer = zeroband.DiLoCoOptimizer(  # zeroband
        inner_optimizer=optimizer, batch_size=BATCH * ACCUMULATE, inner_steps=asked.inner_steps, total_steps=asked.steps
    )
    scaler = torch.amp.GradScaler(device, enabled=False)  # True with float16

    # zeroband, before: iteration = 0
    iteration = optimizer.inner_step
    # zeroband, before: while iteration < asked.steps:
    while not optimizer.is_done:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(iteration, asked.steps)
        for _ in range(ACCUMULATE):
            starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=order)
            batch = text[starts + torch.arange(LENGTH + 1)].to(device)
            with torch.autocast(device, torch.bfloat16):
                loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            scaler.scale(loss / ACCUMULATE).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        # zeroband, before: iteration += 1
        iteration = optimizer.inner_step
        print(f"step {iteration}  loss {loss.item():.3f}", flush=True)
    optimizer.close()  # zeroband


if __name__ == "__main__":
    main()
