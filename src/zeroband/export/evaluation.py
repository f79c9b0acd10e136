"""Loss and bits per byte of a model on the samples that its run held out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zeroband.config import load_config
from zeroband.config.data import DataConfig
from zeroband.data.dataset import Dataset, open_dataset
from zeroband.data.loader import IGNORED, Loader, MicroBatch
from zeroband.data.tokenizer import Tokenizer, tokenizer_of
from zeroband.errors import ConfigError
from zeroband.export.opened import OpenedModel, open_trained
from zeroband.model.generate import evaluating

_ALONE = ("--outer=none", "--store.url=none")
"""Overrides for a configuration that joins no run."""
_BATCH_SIZE = 8


@dataclass(frozen=True)
class Evaluation:
    """Sums over held-out samples."""

    samples: int
    targets: int
    """Predicted tokens, including ends of documents."""
    text_bytes: int
    """UTF-8 bytes of the targets' text."""
    nats: float
    """Total cross entropy."""

    @property
    def loss(self) -> float:
        """Mean cross entropy in nats per token; NaN without targets."""
        return self.nats / self.targets if self.targets else math.nan

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of the text, comparable between tokenizers."""
        return self.nats / math.log(2) / self.text_bytes if self.text_bytes else math.inf


def sum_of(evaluations: Iterable[Evaluation]) -> Evaluation:
    """Sum up evaluations."""
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

    `tokenizer`: counts the bytes of the text; None: leave them 0.
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


@dataclass(frozen=True)
class HeldOut:
    """A corpus, its held-out samples, and how to read it."""

    dataset: Dataset
    config: DataConfig


def evaluate_checkpoint(where: str, device: torch.device, *, samples: int) -> Evaluation:
    """Evaluate a checkpoint's outer parameters on the samples that its run held out.

    Raises ConfigError, CheckpointDamaged, RecoveryFailed as `open_trained` does.
    """
    opened = open_trained(where)
    by_source = losses_of(opened, open_held_out(opened, ()), device, samples=samples, batch_size=_BATCH_SIZE)
    return sum_of(by_source.values())


def losses_of(
    opened: OpenedModel, held_out: HeldOut, device: torch.device, *, samples: int, batch_size: int, first: int = 0
) -> dict[str, Evaluation]:
    """Evaluate a model on at most `samples` held-out samples of each source; returns losses by source.

    `first`: index of the first sample. Raises ConfigError if they have no targets.
    """
    loader = Loader(
        held_out.dataset,
        batch_size=batch_size,
        micro_bs=batch_size,
        local_rank=0,
        local_world_size=1,
        document_mask=held_out.config.document_mask,
    )
    model = opened.model.build(device)
    results: dict[str, Evaluation] = {}
    for number, source in enumerate(held_out.dataset.sources):
        batches = loader.held_out_batches(samples, batch_size, number, first=first)
        results[source.name] = evaluate(model, batches, opened.model.tokenizer, device)
    loader.close()
    if not sum_of(results.values()).targets:
        raise ConfigError(
            f"the assistant says nothing in {samples} samples that were held out; evaluate more of them (--samples), "
            "or hold out more (data.hold_out)"
        )
    return results


def open_held_out(opened: OpenedModel, rest: Sequence[str]) -> HeldOut:
    """Open the corpus and find its held-out samples. Raises ConfigError if they are not those of the training."""
    recorded = opened.corpus
    if rest and not any(argument.startswith("@") for argument in rest):
        raise ConfigError(f"{' '.join(rest)} changes a configuration, and none is named; add @config.toml")
    if rest:
        config = load_config([*rest, *_ALONE])
        data, seed = config.data, config.run.seed
    elif recorded is not None and recorded.data.private:
        raise ConfigError(
            f"{opened.what} was trained on documents of its nodes' own, of which it records nothing; choose the data "
            "with @config.toml, a node's own for what that node held out"
        )
    elif recorded is not None:
        data, seed = recorded.data, recorded.seed
    else:
        raise ConfigError(f"{opened.what} does not record its data; add the run's @config.toml")
    if recorded is None:
        data = data.model_copy(update={"tokenizer": opened.tokenizer})
    if tokenizer_of(data).fingerprint != opened.model.tokenizer.fingerprint:
        raise ConfigError(
            f"data.tokenizer={data.tokenizer!r} and data.source.type={data.source.type!r} do not give the ids that "
            f"{opened.what} was trained with"
        )
    dataset = open_dataset(data, seed)
    if not rest and recorded is not None and dataset.fingerprint != recorded.fingerprint:
        raise ConfigError(
            f"data.source holds another text now than when {opened.what} was trained, so what it held out then may "
            "have been trained; bring the text back, or choose the data with @config.toml"
        )
    if not all(source.index.n_held_out for source in dataset.sources):
        raise ConfigError(f"data.hold_out={data.hold_out:g} keeps no sample back; evaluate on other data")
    return HeldOut(dataset, data)
