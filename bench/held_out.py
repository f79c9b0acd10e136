"""What measurements of small runs with real nodes have in common: their task, and the held-out loss as they learn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch

from zeroband.checkpoint.layout import folder_of
from zeroband.checkpoint.loading import open_checkpoint, steps_in_order
from zeroband.checkpoint.storage import open_storage
from zeroband.export.evaluation import evaluate_checkpoint
from zeroband.tools.cluster import LocalCluster

Curve = Sequence[tuple[int, float]]
"""Committed tokens and held-out loss, in order."""


def task(checkpoints: Path, *, d_model: int, length: int, batch: int, inner_steps: int, steps: int) -> tuple[str, ...]:
    """Arguments of nodes that train a small model with DiLoCo, with a checkpoint every four rounds."""
    return (
        *(f"--model.d-model={d_model}", "--model.n-layers=2", "--model.n-heads=4", "--model.tie-embeddings"),
        *(f"--data.seq-length={length}", f"--train.batch-size={batch}", f"--train.micro-bs={batch}"),
        *("--train.dtype=float32", "--train.threads=1", "--optim.adamw.lr=2e-3", "--optim.warmup-steps=40"),
        *("--outer.type=diloco", f"--outer.inner-steps={inner_steps}", f"--train.total-steps={steps}"),
        *(f"--ckpt.path={checkpoints}", "--ckpt.every-rounds=4", "--ckpt.keep-last=1000", "--log-level=WARNING"),
    )


def trained_tokens(cluster: LocalCluster, *, length: int, batch: int) -> int:
    """Tokens that nodes trained on, counted or lost."""
    return sum(batch * length * len(node.metrics()) for node in cluster.nodes.values())


def curve_of(checkpoints: Path, run_id: str) -> list[tuple[int, float]]:
    """The loss at each checkpoint of a run."""
    storage = open_storage(str(checkpoints), run_id)
    curve: list[tuple[int, float]] = []
    for step in sorted(steps_in_order(storage)):
        tokens = int(open_checkpoint(storage, step).manifest.stamp.record["progress"]["tokens"])
        where = str(checkpoints / run_id / folder_of(step))
        curve.append((tokens, evaluate_checkpoint(where, torch.device("cpu"), samples=512).loss))
    return curve


def loss_at(curve: Curve, tokens: int) -> float:
    """Between two measured places by a straight line; nan outside."""
    for (low, first), (high, second) in pairwise(curve):
        if low <= tokens <= high:
            return first + (second - first) * (tokens - low) / (high - low)
    return math.nan
