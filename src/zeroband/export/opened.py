"""Opens a trained model: a checkpoint, a run's newest one, or a folder in Hugging Face's layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zeroband.checkpoint.layout import hub_name, step_of
from zeroband.checkpoint.loading import Checkpoint, open_checkpoint, steps_in_order
from zeroband.checkpoint.manifest import ANYBODY, Trust
from zeroband.checkpoint.storage import open_storage, reason_of
from zeroband.config.model import TransformersConfig
from zeroband.data.tokenizer import described, open_tokenizer, tokenizer_of
from zeroband.data.tokens import Corpus
from zeroband.errors import CheckpointDamaged, ConfigError, RecoveryFailed
from zeroband.export.directory import TrainedModel
from zeroband.export.hf import FAMILIES, UnsupportedArchitecture, model_config_of
from zeroband.export.hub_files import CONFIG_FILE, WeightFiles, read_config
from zeroband.model.blueprint import LlamaBlueprint
from zeroband.model.registry import blueprint_of_record
from zeroband.observe.log import get_logger
from zeroband.state.flat import FlatLayout

_USUAL_LENGTH = 1024
"""Sequence length of a model without one in its configuration."""

_log = get_logger(__name__)


@dataclass(frozen=True)
class OpenedModel:
    """A trained model and its origin."""

    model: TrainedModel
    what: str
    """Description of what was opened."""
    corpus: Corpus | None
    """Training data; None if only the model is known."""
    tokenizer: str
    """The `data.tokenizer` of the model."""
    remark: str | None = None
    """Warning about the origin."""


def open_trained(where: str, trust: Trust = ANYBODY) -> OpenedModel:
    """Open a checkpoint, the newest verified one of a run, or a model folder, by folder or URL.

    `trust`: rule for accepting checkpoints. Raises ConfigError without any, CheckpointDamaged or RecoveryFailed if none
    verifies.
    """
    if "://" in where:
        return _open_run(*_split_location(where), trust)
    path = Path(where).expanduser().resolve()
    if (path / CONFIG_FILE).is_file():
        return _open_directory(path)
    if not path.is_dir():
        raise ConfigError(f"{where} is no folder; give a checkpoint, the root of a run's checkpoints or an export")
    return _open_run(*_split_location(str(path)), trust)


def _split_location(where: str) -> tuple[str, str, int | None]:
    """Split a location into the root of all runs, the run, and the step if given."""
    run, _, name = where.rstrip("/").rpartition("/")
    step = step_of(name)
    if step is None:
        return run, name, None
    root, _, name = run.rpartition("/")
    return root, name, step


def _open_run(root: str, run_id: str, step: int | None, trust: Trust) -> OpenedModel:
    storage = open_storage(root, run_id)
    if step is not None:
        return _read(open_checkpoint(storage, step, trust=trust), trust)
    try:
        steps = steps_in_order(storage)
    except OSError as error:
        raise RecoveryFailed(f"cannot look for checkpoints in {storage.url}: {reason_of(error)}") from error
    if not steps:
        raise ConfigError(f"no checkpoint in {storage.url}; its folders are called step_ and a number")
    reasons: list[str] = []
    for candidate in steps:
        try:
            return _read(open_checkpoint(storage, candidate, trust=trust), trust)
        except CheckpointDamaged as error:
            reasons.append(str(error))
            _log.warning("checkpoint skipped", extra={"fields": {"step": candidate, "why": str(error)}})
    raise RecoveryFailed(f"no checkpoint in {storage.url} verifies: {'; '.join(reasons)}")


def _read(checkpoint: Checkpoint, trust: Trust) -> OpenedModel:
    """Read a checkpoint's parameters into memory, 4 bytes each, with verification."""
    stamp = checkpoint.manifest.stamp
    what = f"step {stamp.inner_step} of run {stamp.run_id}"
    if not stamp.model:
        raise ConfigError(
            f"{what} was trained in a custom loop, which has the model; {checkpoint.folder}/outer has "
            "its parameters as safetensors"
        )
    try:
        corpus = Corpus.of_record(stamp.data)
        blueprint = blueprint_of_record(stamp.model, seq_length=corpus.data.seq_length)
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{checkpoint.folder}/manifest.json: another version's [model] or [data]: {error}") from error
    tokenizer = tokenizer_of(corpus.data)
    if not tokenizer.matches(corpus.tokenizer_fingerprint):
        before, now = corpus.tokenizer_release, tokenizer.release
        raise ConfigError(
            f"data.tokenizer={described(corpus.data.tokenizer, now)} does not give the ids of when {what} was saved"
            f"{f' by {before}' if before else ''}; bring that tokenizer back, or that release"
        )
    layout = FlatLayout.of(blueprint.on_meta().trained())
    flat = torch.empty(layout.numel)
    checkpoint.read_parameters(layout.slots, flat)
    held = {slot.name: flat[slot.start : slot.start + slot.numel].view(slot.shape) for slot in layout.slots}
    model = TrainedModel(blueprint, tokenizer, corpus.data.seq_length, held.__getitem__)
    return OpenedModel(model, what, corpus, corpus.data.tokenizer, trust.remark(checkpoint.manifest))


def _open_directory(folder: Path) -> OpenedModel:
    """Open a model in Hugging Face's layout, ours or another Llama, with mapped weights."""
    record, where = read_config(folder), str(folder / CONFIG_FILE)
    if record.get("model_type") not in FAMILIES:
        return _open_of_transformers(folder)
    try:
        config = model_config_of(record, where)
    except UnsupportedArchitecture:
        return _open_of_transformers(folder)
    try:
        vocab_size, seq_length = int(record["vocab_size"]), int(record["max_position_embeddings"])
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{where}: not the configuration of a model: {error!r}") from error
    files = WeightFiles(folder)

    def read(name: str) -> Tensor:
        return files.rows(hub_name(name), slice(None)).float()

    model = TrainedModel(LlamaBlueprint(config, vocab_size), open_tokenizer(str(folder)), seq_length, read)
    return OpenedModel(model, str(folder), None, str(folder))


def _open_of_transformers(folder: Path) -> OpenedModel:
    """Load any causal language model of transformers into memory. Raises ConfigError."""
    from zeroband.model.hub_model import TransformersBlueprint  # which loads transformers

    tokenizer = open_tokenizer(str(folder))
    config = TransformersConfig(type="transformers", name=str(folder))
    blueprint = TransformersBlueprint(config, ids=tokenizer.vocab_size, seq_length=1)
    longest = getattr(blueprint.hub_config, "max_position_embeddings", None) or _USUAL_LENGTH
    model = TrainedModel(blueprint, tokenizer, longest, blueprint.pretrained_values().__getitem__)
    return OpenedModel(model, str(folder), None, str(folder))
