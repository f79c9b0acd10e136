"""Loss and bits per byte of a model on the samples that its run kept back from training."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from zeroband.data.loader import IGNORED, MicroBatch
from zeroband.data.tokenizer import Tokenizer
from zeroband.model.generate import evaluating


@dataclass(frozen=True)
class Evaluation:
    """Sums over held-out samples."""

    samples: int
    targets: int
    """Tokens predicted, ends of documents among them."""
    text_bytes: int
    """UTF-8 bytes of the text that the targets stand for."""
    nats: float
    """Cross entropy of all targets."""

    @property
    def loss(self) -> float:
        """Mean cross entropy in nats per token; NaN where nothing was predicted."""
        return self.nats / self.targets if self.targets else math.nan

    @property
    def bits_per_byte(self) -> float:
        """Bits that the model needs for a byte of the text: comparable between tokenizers."""
        return self.nats / math.log(2) / self.text_bytes if self.text_bytes else math.inf


def sum_of(evaluations: Iterable[Evaluation]) -> Evaluation:
    """Several evaluations as one."""
    parts = list(evaluations)
    return Evaluation(
        samples=sum(part.samples for part in parts),
        targets=sum(part.targets for part in parts),
        text_bytes=sum(part.text_bytes for part in parts),
        nats=sum(part.nats for part in parts),
    )


def evaluate(
    model: nn.Module, batches: Iterable[MicroBatch], tokenizer: Tokenizer | None, device: torch.device
) -> Evaluation:
    """Run the model over this rank's batches of held-out samples, one forward pass each.

    `tokenizer`: counts the bytes of the text; None: they are known, and stay 0.
    """
    samples = targets = text_bytes = 0
    nats = 0.0
    with evaluating(model):
        for batch in batches:
            placed = batch.to(device)
            loss = model(placed.tokens, placed.cu_seqlens, placed.targets)
            nats += loss.cross_entropy.item()
            targets += int(loss.targets.item())
            rows = [row[row != IGNORED] for row in batch.targets]
            samples += sum(row.numel() > 0 for row in rows)
            if tokenizer is not None:
                text_bytes += sum(tokenizer.count_bytes(row.tolist()) for row in rows)
    return Evaluation(samples, targets, text_bytes, nats)
