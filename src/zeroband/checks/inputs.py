"""Whether what a run reads is there: data, tokenizer, weights to start from, an algorithm of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zeroband.checks.finding import Finding
from zeroband.config.data import ChatSource, DataConfig, FilesSource, SyntheticTokensSource, TextSource
from zeroband.config.model import LlamaConfig
from zeroband.config.outer import CustomConfig
from zeroband.config.schema import RunConfig
from zeroband.data.chat import ChatEncoder
from zeroband.data.files import find_files
from zeroband.data.sources import conversations, documents, require_beginning_of_text
from zeroband.data.tokenizer import Tokenizer, tokenizer_of
from zeroband.errors import ConfigError

_LOOKED_INTO = 64
"""Number of text files that are looked into for what is no text; when they are made into tokens, all are."""


def local_inputs(config: RunConfig) -> Iterator[Finding]:
    """What lies on this machine, as far as a look at it tells; says nothing where all is there."""
    source = config.data.source
    if isinstance(source, FilesSource):
        try:
            local = [path for path in source.paths if "://" not in path.removeprefix("file://")]
            files = find_files(local)
            if isinstance(source, TextSource) and not source.binary:
                for file in files[:_LOOKED_INTO]:
                    require_beginning_of_text(file)
        except ConfigError as error:
            yield Finding("data", "cannot be read", str(error), stops="start")
    for name, data in ({} if config.eval is None else config.eval.data_of(config.data)).items():
        try:
            if isinstance(data.source, FilesSource):
                find_files([path for path in data.source.paths if "://" not in path.removeprefix("file://")])
        except ConfigError as error:
            yield Finding("evaluation", f"{name} of eval.sources cannot be read", str(error), stops="start")
    if config.train.init_from is not None and not (config.train.init_from / "config.json").is_file():
        seen = f"train.init_from={str(config.train.init_from)!r} has no config.json"
        advice = "name a directory in Hugging Face's layout, such as `zeroband export` makes"
        yield Finding("weights", seen, advice, stops="start")
    if isinstance(config.outer, CustomConfig) and not Path(config.outer.algorithm).is_file():
        seen = f"outer.algorithm={config.outer.algorithm!r} cannot be read"
        yield Finding("outer algorithm", seen, "name the file of the algorithm", stops="start")


@dataclass(frozen=True)
class OpenedInputs:
    """What was opened: the findings, and what the memory that a run needs follows from."""

    findings: tuple[Finding, ...]
    vocab_size: int = 0
    sections: int = 1
    built_params: int = 0


def open_inputs(config: RunConfig) -> OpenedInputs:
    """Open what training would: the tokenizer, the first document, weights, an algorithm. Loads torch where they do."""
    findings: list[Finding] = []
    vocab_size, sections, built_params = 0, 1, 0
    tokenizer: Tokenizer | None = None
    source = config.data.source
    try:
        tokenizer = tokenizer_of(config.data)
        vocab_size = tokenizer.padded_vocab_size
        name = "none" if isinstance(source, SyntheticTokensSource) else config.data.tokenizer
        findings.append(Finding("tokenizer", f"{name}, {tokenizer.vocab_size} ids"))
    except (ConfigError, OSError) as error:
        findings.append(Finding("tokenizer", "cannot be opened", str(error), stops="start"))
    try:
        if seen := _first_of(config.data, config.run.seed):
            findings.append(Finding("data", seen))
        else:
            findings.append(Finding("data", "no document", "name a source that holds some", stops="start"))
    except (ConfigError, OSError) as error:
        findings.append(Finding("data", "cannot be read", str(error), stops="start"))
    if isinstance(config.model, LlamaConfig):
        if config.train.init_from is not None:
            findings += _weights(config.model, config.train.init_from)
    elif tokenizer is not None:
        found, built_params = _built(config, tokenizer)
        findings.append(found)
    if isinstance(config.outer, CustomConfig):
        from zeroband.outer.custom import load_algorithm

        try:
            sections = len(load_algorithm(config.outer).sections)
        except ConfigError as error:
            findings.append(Finding("outer algorithm", "cannot be had", str(error), stops="start"))
    return OpenedInputs(tuple(findings), vocab_size, sections, built_params)


def _built(config: RunConfig, tokenizer: Tokenizer) -> tuple[Finding, int]:
    """A model that is not this package's, and how many values of it are trained."""
    from zeroband.model.registry import blueprint_of, require_answers

    try:
        model = blueprint_of(config.model, tokenizer, config.data.seq_length).on_meta()
        require_answers(config, model)
    except ConfigError as error:
        return Finding("model", "cannot be built", str(error), stops="start"), 0
    numel = model.trained().numel
    return Finding("model", f"{config.model.type}, {numel} values to train in {len(model.blocks)} layers"), numel


def _first_of(data: DataConfig, seed: int) -> str | None:
    """What the data begin with; None where there are none. Raises: ConfigError, OSError."""
    match data.source:
        case SyntheticTokensSource(tokens=tokens):
            return f"{tokens} made-up tokens"
        case ChatSource() as source:
            chat = next(conversations(source), None)
            if chat is None:
                return None
            ids = sum(len(part.ids) for part in ChatEncoder(tokenizer_of(data)).encode(chat))
            return f"first conversation: {ids} tokens of {chat.where}"
        case source:
            first = next(documents(source, seed), None)
            return first and f"first document: {len(first.text)} characters of {first.where}"


def _weights(config: LlamaConfig, folder: Path) -> Iterator[Finding]:
    from zeroband.export.hub_files import WeightFiles, require_model

    try:
        require_model(folder, config)
        names = WeightFiles(folder).names
    except ConfigError as error:
        yield Finding("weights", "cannot be taken", str(error), stops="start")
    else:
        yield Finding("weights", f"{len(names)} tensors in {folder}")
