"""What the two-level shuffle costs in loss beside a full shuffle, on text that lies sorted by its files.

The standard library's sources as bytes, one file after the other, so that what lies side by side is alike; every
fiftieth file is held out. A decoder of 0.5 M parameters trains on one pass's beginning in each order, with equal seeds:

full          one shuffle of all samples
two levels    blocks from anywhere, and the samples of so many blocks at a time: 256, 16 and 1 of them
as it lies    no shuffle

A batch of 32 samples from 256 blocks is mixed as one of 256 is from the 2048 blocks of data.shuffle_blocks.

    python bench/shuffle.py [--steps 1200] [--seeds 0 1]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from evidence import count, finite, require
from torch import Tensor

from zeroband.config.model import LlamaConfig
from zeroband.data.files import stdlib_files
from zeroband.data.index import BlockLayout, SampleIndex
from zeroband.model import Transformer, init_weights

LENGTH, BATCH, BLOCK = 128, 32, 32 * 128
END = 256
ORDERS: dict[str, int | None] = {
    "full": None, "two levels, 256 blocks": 256, "two levels, 16 blocks": 16, "two levels, 1 block": 1, "as it lies": 0,
}  # fmt: skip
EVALUATED = 512

Order = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]


def corpus() -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
    """Bytes to train on, in the order of the files, and those of the files that are held out."""
    parts: tuple[list[npt.NDArray[np.uint16]], ...] = ([], [])
    for number, file in enumerate(stdlib_files()):
        with file.open() as stream:
            ids = np.frombuffer(stream.read(), dtype=np.uint8).astype(np.uint16)
        parts[number % 50 == 0].append(np.append(ids, np.uint16(END)))
    return np.concatenate(parts[0]), np.concatenate(parts[1])


def order_of(places: BlockLayout, window: int | None, seed: int) -> Order:
    return (lambda numbers: numbers) if window == 0 else SampleIndex(places, seed, 0.0, window=window).positions


def batch_of(ids: npt.NDArray[np.uint16], places: BlockLayout, positions: npt.NDArray[np.int64]) -> Tensor:
    """(b, t + 1) int64; the sample at the end of a block is a target short, and repeats its last id."""
    rows = [ids[start:stop] for start, stop in places.spans(positions).tolist()]
    return torch.as_tensor(np.stack([np.pad(row, (0, LENGTH + 1 - len(row)), "edge") for row in rows]).astype(np.int64))


def loss_after(
    trained: npt.NDArray[np.uint16], held_out: npt.NDArray[np.uint16], window: int | None, steps: int, seed: int
) -> float:
    """Nats per byte on the held-out files."""
    torch.manual_seed(seed)
    model = Transformer(LlamaConfig(d_model=128, n_layers=2, n_heads=4), 320)
    init_weights(model, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    places = BlockLayout([len(trained)], BLOCK, LENGTH)
    order = order_of(places, window, seed)
    require(steps * BATCH <= places.n_samples, f"{places.n_samples} samples are less than {steps} steps need")
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 50, 1.1 - step / steps)
        tokens = batch_of(trained, places, order(np.arange(step * BATCH, (step + 1) * BATCH)))
        loss = model(tokens[:, :-1], None, tokens[:, 1:])
        (loss.objective / loss.targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    theirs = BlockLayout([len(held_out)], BLOCK, LENGTH)
    positions = SampleIndex(theirs, 0, 0.0, evaluation_only=True).held_out_positions(EVALUATED)
    with torch.no_grad():
        losses = [
            loss.cross_entropy.item() / loss.targets.item()
            for part in np.split(positions, len(positions) // BATCH)
            for tokens in [batch_of(held_out, theirs, part)]
            for loss in [model(tokens[:, :-1], None, tokens[:, 1:])]
        ]
    return finite(statistics.mean(losses), "the loss on the held-out files")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=count, default=1200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    arguments = parser.parse_args()
    trained, held_out = corpus()
    print("| seed | order | loss on held-out files | over the full shuffle |\n|---|---|---|---|")
    for seed in arguments.seeds:
        losses = {name: loss_after(trained, held_out, window, arguments.steps, seed) for name, window in ORDERS.items()}
        for name, loss in losses.items():
            print(f"| {seed} | {name} | {loss:.4f} | {100 * (loss / losses['full'] - 1):+.2f} % |", flush=True)


if __name__ == "__main__":
    main()
