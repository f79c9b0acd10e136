"""Selects the model of a configuration, and checks that it supports what the run needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never

from pydantic import TypeAdapter

from zeroband.config.model import CustomModelConfig, LlamaConfig, Model, TransformersConfig
from zeroband.config.schema import RunConfig
from zeroband.data.tokenizer import Tokenizer
from zeroband.errors import ConfigError
from zeroband.model.blueprint import FIRST, VOCAB_SIZE, Blueprint, LlamaBlueprint
from zeroband.model.language_model import LanguageModel


def blueprint_of(config: Model, tokenizer: Tokenizer, seq_length: int) -> Blueprint:
    """Return the blueprint of a [model] section for a tokenizer and sample length.

    Raises ConfigError if the model cannot be built or does not fit them.
    """
    return _blueprint(config, tokenizer.vocab_size, tokenizer.padded_vocab_size, seq_length)


def _blueprint(
    config: Model, ids: int, vocab_size: int, seq_length: int, recorded: Mapping[str, Any] | None = None
) -> Blueprint:
    """`ids`: size of the tokenizer. `vocab_size`: width of a new head. `recorded`: untrained values in a checkpoint."""
    match config:
        case LlamaConfig():
            return LlamaBlueprint(config, vocab_size)
        case TransformersConfig():
            from zeroband.model.hub_model import TransformersBlueprint

            return TransformersBlueprint(config, ids=ids, seq_length=seq_length, recorded=recorded)
        case CustomModelConfig():
            from zeroband.model.custom_model import CustomBlueprint

            return CustomBlueprint(config, vocab_size=vocab_size, seq_length=seq_length, recorded=recorded)
        case _:
            assert_never(config)


def blueprint_of_record(record: Mapping[str, Any], *, seq_length: int) -> Blueprint:
    """Restore a blueprint from its record. Raises ConfigError as `blueprint_of` does.

    Raises ValueError, LookupError or TypeError for a record of another version.
    """
    described = dict(record)
    vocab_size = int(described.pop(VOCAB_SIZE))
    described.setdefault("type", LlamaConfig().type)
    first = described.pop(FIRST, None)
    config: Model = TypeAdapter[Model](Model).validate_python(described)
    return _blueprint(config, vocab_size, vocab_size, seq_length, first)


def require_answers(config: RunConfig, model: LanguageModel) -> None:
    """Raise ConfigError if a run uses a feature that the model lacks."""
    if config.data.document_mask and not model.knows_documents:
        raise ConfigError(
            "the model does not isolate the documents of a row; set data.document_mask=false, or let the forward pass "
            "of your module take positions or cu_seqlens"
        )
    if config.observe.sample_prompt is not None and not model.gives_logits:
        raise ConfigError("observe.sample_prompt needs logits, but the model returns only a loss; drop one of them")
    if config.optim.z_loss and model.has_own_loss:
        raise ConfigError(
            f"optim.z_loss={config.optim.z_loss:g} needs logits, but the model computes its own loss; set it to 0"
        )
