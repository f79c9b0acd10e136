"""What a run held out of its training, and the loss of a trained model on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zeroband.config import load_config
from zeroband.config.data import DataConfig
from zeroband.data.dataset import Dataset, open_dataset
from zeroband.data.loader import Loader
from zeroband.data.tokenizer import tokenizer_of
from zeroband.errors import ConfigError
from zeroband.export.evaluation import Evaluation, evaluate, sum_of
from zeroband.export.opened import Opened, open_trained

_ALONE = ("--outer=none", "--store.url=none")
"""Nobody is joined here, whatever the configuration says."""
_BATCH_SIZE = 8


@dataclass(frozen=True)
class HeldOut:
    """A corpus, which samples of it were held out, and how it is read."""

    dataset: Dataset
    config: DataConfig


def evaluate_checkpoint(where: str, device: torch.device, *, samples: int) -> Evaluation:
    """The loss of a checkpoint, of its outer parameters where nodes trained together, on what its run held out.

    Raises: ConfigError, CheckpointDamaged, RecoveryFailed as `open_trained` does.
    """
    opened = open_trained(where)
    by_source = losses_of(opened, open_held_out(opened, ()), device, samples=samples, batch_size=_BATCH_SIZE)
    return sum_of(by_source.values())


def losses_of(
    opened: Opened, held_out: HeldOut, device: torch.device, *, samples: int, batch_size: int, first: int = 0
) -> dict[str, Evaluation]:
    """The loss of a model on at most so many samples that were held out of each source, by the source's name.

    `first`: number of the first one that counts.

    Raises: ConfigError where nothing in them is learned.
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


def open_held_out(opened: Opened, rest: Sequence[str]) -> HeldOut:
    """The corpus and which samples of it were held out. Raises ConfigError where they are not what was asked for."""
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
