"""Checks that a run's inputs exist: data, tokenizer, initial weights, a custom algorithm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from zeroband.checks.finding import Finding
from zeroband.checks.needs import Needs
from zeroband.config.data import (
    ChatSource,
    DataConfig,
    FilesSource,
    Source,
    SyntheticTokensSource,
    TextSource,
    TokensSource,
)
from zeroband.config.model import LlamaConfig
from zeroband.config.outer import CustomConfig
from zeroband.config.schema import RunConfig
from zeroband.data.chat import ChatEncoder
from zeroband.data.files import find_files
from zeroband.data.readers import require_beginning_of_text
from zeroband.data.sources import conversations, documents
from zeroband.data.token_files import require_set
from zeroband.data.tokenizer import Tokenizer, tokenizer_of
from zeroband.data.tokens import prepare
from zeroband.errors import ConfigError, StorageLost

_RETRY_S = 10.0
"""Short, since a person waits for the check."""

_LOOKED_INTO = 64
"""Number of text files to sample for invalid UTF-8; tokenisation reads all."""


def local_inputs(config: RunConfig) -> Iterator[Finding]:
    """Check local inputs without reading them; yields only problems."""
    for data in config.data.parts.values():
        try:
            _require_here(data.source)
        except (ConfigError, StorageLost) as error:
            yield Finding("data", "cannot be read", str(error), stops="start")
    for name, data in ({} if config.eval is None else config.eval.data_of(config.data)).items():
        try:
            _require_here(data.source, looks_into=0)
        except (ConfigError, StorageLost) as error:
            yield Finding("evaluation", f"{name} of eval.sources cannot be read", str(error), stops="start")
    if config.train.init_from is not None and not (config.train.init_from / "config.json").is_file():
        seen = f"train.init_from={str(config.train.init_from)!r} has no config.json"
        advice = "name a directory in Hugging Face's layout, such as `zeroband export` makes"
        yield Finding("weights", seen, advice, stops="start")
    if isinstance(config.outer, CustomConfig) and not Path(config.outer.algorithm).is_file():
        seen = f"outer.algorithm={config.outer.algorithm!r} cannot be read"
        yield Finding("outer algorithm", seen, "name the file of the algorithm", stops="start")


def _require_here(source: Source, looks_into: int = _LOOKED_INTO) -> None:
    """Raise ConfigError if a source names missing local files; StorageLost."""
    if isinstance(source, TokensSource) and not _is_elsewhere(source.path):
        require_set(source)
    elif isinstance(source, FilesSource):
        files = find_files([path for path in source.paths if not _is_elsewhere(path)])
        if isinstance(source, TextSource) and not source.binary:
            for file in files[:looks_into]:
                require_beginning_of_text(file)


def _is_elsewhere(path: str) -> bool:
    return "://" in path.removeprefix("file://")


def open_inputs(config: RunConfig) -> tuple[list[Finding], Needs]:
    """Open what training would open: the tokenizer, the first document, weights, an algorithm. May load torch.

    Returns the findings, and the run's needs as far as known from what was opened.
    """
    findings: list[Finding] = []
    needs = Needs(config)
    tokenizer: Tokenizer | None = None
    parts = config.data.parts
    try:
        opened = [tokenizer_of(data) for data in parts.values()]
        tokenizer = opened[0]
        needs = replace(needs, vocab_size=tokenizer.padded_vocab_size)
        is_none = any(isinstance(data.source, SyntheticTokensSource) for data in parts.values())
        name = "none" if is_none else config.data.tokenizer
        findings.append(Finding("tokenizer", f"{name}, {tokenizer.vocab_size} ids"))
    except (ConfigError, OSError) as error:
        findings.append(Finding("tokenizer", "cannot be opened", str(error), stops="start"))
    findings += [_data_finding(name, data, config.run.seed) for name, data in parts.items()]
    if isinstance(config.model, LlamaConfig):
        if config.train.init_from is not None:
            findings += _weights(config.model, config.train.init_from)
    elif tokenizer is not None:
        found, built_params = _built(config, tokenizer)
        findings.append(found)
        needs = replace(needs, built_params=built_params)
    if isinstance(config.outer, CustomConfig):
        from zeroband.outer.custom import load_algorithm

        try:
            needs = replace(needs, sections=len(load_algorithm(config.outer).sections))
        except ConfigError as error:
            findings.append(Finding("outer algorithm", "not found", str(error), stops="start"))
    return findings, needs


def _data_finding(name: str, data: DataConfig, seed: int) -> Finding:
    """Report the beginning of a source. `name`: in data.sources."""
    where = f"{name}: " if name else ""
    try:
        if seen := _first_of(data, seed):
            return Finding("data", f"{where}{seen}")
        return Finding("data", "no document", f"{where}name a source with some", stops="start")
    except (ConfigError, StorageLost, OSError) as error:
        return Finding("data", "cannot be read", f"{where}{error}", stops="start")


def _built(config: RunConfig, tokenizer: Tokenizer) -> tuple[Finding, int]:
    """Build a model that is not this package's; returns its number of trained values."""
    from zeroband.model.registry import blueprint_of, require_answers

    try:
        model = blueprint_of(config.model, tokenizer, config.data.seq_length).on_meta()
        require_answers(config, model)
    except ConfigError as error:
        return Finding("model", "cannot be built", str(error), stops="start"), 0
    numel = model.trained().numel
    return Finding("model", f"{config.model.type}, {numel} values to train in {len(model.blocks)} layers"), numel


def _first_of(data: DataConfig, seed: int) -> str | None:
    """Return the beginning of the data, if any.

    Raises ConfigError, StorageLost, OSError.
    """
    retry_s = min(data.retry_s, _RETRY_S)
    match data.source:
        case SyntheticTokensSource(tokens=tokens):
            return f"{tokens} made-up tokens"
        case TokensSource() as source:
            tokens = prepare(data.model_copy(update={"retry_s": retry_s}), seed)
            try:
                documents_text = "" if tokens.documents is None else f", {tokens.documents} documents"
                return f"{len(tokens)} tokens{documents_text} in {len(tokens.shards)} shards of {source.path}"
            finally:
                tokens.close()
        case ChatSource() as source:
            chat = next(conversations(source, retry_s), None)
            if chat is None:
                return None
            ids = sum(len(part.ids) for part in ChatEncoder(tokenizer_of(data)).encode(chat))
            return f"first conversation: {ids} tokens of {chat.where}"
        case source:
            first = next(documents(source, seed, retry_s), None)
            return first and f"first document: {len(first.text)} characters of {first.where}"


def _weights(config: LlamaConfig, folder: Path) -> Iterator[Finding]:
    from zeroband.export.hub_files import WeightFiles, require_model

    try:
        require_model(folder, config)
        names = WeightFiles(folder).names
    except ConfigError as error:
        yield Finding("weights", "unusable", str(error), stops="start")
    else:
        yield Finding("weights", f"{len(names)} tensors in {folder}")
