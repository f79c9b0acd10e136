"""Streams the documents or conversations of any source in a fixed order."""

from __future__ import annotations

import importlib
import itertools
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from zeroband.config.data import (
    ChatSource,
    DocumentSource,
    FilesSource,
    HuggingFaceSource,
    JsonlSource,
    ParquetSource,
    SyntheticSource,
    TextSource,
)
from zeroband.data.files import SourceFile, find_files, pause, stdlib_files
from zeroband.data.hub import hub_problem, is_hub_name
from zeroband.data.listing import log_empty
from zeroband.data.readers import (
    BadRow,
    Dataset,
    Document,
    OnBad,
    read_json,
    read_lines,
    read_row_groups,
    read_rows,
    read_text,
    refuse,
)
from zeroband.data.retries import Retries
from zeroband.errors import ConfigError, StorageLost, way_to_extra

_SYNTHETIC_WORDS = 512
_LIBRARY_ERRORS = (ValueError, LookupError, RuntimeError, TypeError, AttributeError, ArithmeticError, EOFError)
"""Raised by datasets, in addition to its own errors, for unreadable files."""
_SAVED = ("dataset_dict.json", "state.json")
"""Files written by datasets' `save_to_disk`."""
_ROLES = {"human": "user", "gpt": "assistant"}
"""Role names of the ShareGPT format (key `from`); others are unchanged."""


class Conversation(NamedTuple):
    """A conversation with at least one message of the assistant, and its origin."""

    messages: list[dict[str, Any]]
    """Each has a `role`, and `content` unless it calls tools; templates may use other keys."""
    tools: list[dict[str, Any]] | None
    """JSON schemas of the assistant's tools."""
    where: str


def documents(source: DocumentSource, seed: int, retry_s: float = 0.0, on_bad: OnBad = refuse) -> Iterator[Document]:
    """Yield the documents of a source in a reproducible order; only synthetic text depends on the seed.

    retry_s: how long failing storage is retried. on_bad: called with unusable rows.
    Raises: ConfigError naming the path, line or row, and field; StorageLost.
    """
    match source:
        case HuggingFaceSource():
            return read_rows(load_dataset(source, retry_s), source, on_bad=on_bad)
        case SyntheticSource():
            return _synthetic(source, seed)
        case TextSource():
            read = partial(read_text, on_bad=on_bad, allow_binary=source.binary or not source.paths)
        case JsonlSource():
            read = partial(read_lines, field=source.field, on_bad=on_bad)
        case ParquetSource():
            read = partial(read_row_groups, column=source.column, on_bad=on_bad, allow_binary=source.binary)
    return itertools.chain.from_iterable(map(read, source_files(source, retry_s)))


def conversations(source: ChatSource, retry_s: float = 0.0, on_bad: OnBad = refuse) -> Iterator[Conversation]:
    """Yield the conversations of a source in a reproducible order. Arguments and errors as for `documents`."""

    def conversation(row: dict[str, Any], where: str) -> Conversation:
        tools: Any = row.get("tools")
        return Conversation(_messages(row[source.field], where), tools or None, where)

    files = source_files(source, retry_s)
    return itertools.chain.from_iterable(read_json(file, source.field, conversation, on_bad=on_bad) for file in files)


def source_identity(source: DocumentSource | ChatSource, seed: int, retry_s: float = 0.0) -> list[Any]:
    """Return plain JSON that changes when the documents of a source change: its settings and file stamps."""
    settings = source.model_dump(mode="json")
    match source:
        case TextSource() | JsonlSource() | ParquetSource() | ChatSource():
            stamps = [file.stamp() for file in source_files(source, retry_s, logs_skipped=True)]
            log_empty(stamps)
            return [settings, stamps]
        case HuggingFaceSource():
            return [settings, *dataset_stamp(load_dataset(source, retry_s))]
        case SyntheticSource():
            return [settings, seed]


def dataset_stamp(dataset: Dataset) -> tuple[str, ...]:
    """Return a stamp of a data set that is equal on every machine that reads it from the same place."""
    return str(len(dataset)), dataset._fingerprint


def source_files(source: FilesSource, retry_s: float = 0.0, *, logs_skipped: bool = False) -> list[SourceFile]:
    """Find the files of a source. Arguments and errors as for `find_files`."""
    return find_files(source.paths, retry_s, logs_skipped=logs_skipped) if source.paths else stdlib_files()


def _messages(found: Any, where: str) -> list[dict[str, Any]]:
    items = cast("list[Any]", found) if isinstance(found, list) else []
    messages = [_message(item, number, where) for number, item in enumerate(items, start=1)]
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRow(
            f"data.source: {where}: no message of the assistant, so nothing to learn; drop the line, or set "
            "data.source.field to the key of the messages"
        )
    return messages


def _message(item: Any, number: int, where: str) -> dict[str, Any]:
    message = cast("dict[str, Any]", item) if isinstance(item, dict) else {}
    if isinstance(speaker := message.get("from"), str) and "role" not in message:
        message = {"role": _ROLES.get(speaker, speaker), "content": message.get("value")}
    content = message.get("content")
    if not isinstance(message.get("role"), str) or (content is None and not message.get("tool_calls")):
        raise BadRow(
            f"data.source: {where}: message {number} has no role or no content; a message is an object such as "
            '{"role": "user", "content": "..."}'
        )
    return message


def load_dataset(source: HuggingFaceSource, retry_s: float = 0.0, *, processes: int = 1) -> Dataset:
    """Load a data set by name, from a folder of its files, or from a folder of `save_to_disk`.

    processes: workers that download and convert it. Raises: ConfigError, StorageLost.
    """

    def load(datasets: Any) -> Any:
        if _is_saved(source):
            saved = datasets.load_from_disk(source.name)
            return saved[source.split] if isinstance(saved, dict) else saved
        workers = processes if processes > 1 else None
        return datasets.load_dataset(source.name, source.subset, split=source.split, num_proc=workers)

    return _from_datasets(source, load, retry_s)


def announced(source: HuggingFaceSource, retry_s: float = 0.0) -> tuple[int, int, list[str]] | None:
    """Return the rows, total bytes and column names that a data set declares, without downloading it.

    None if it declares nothing, or is a folder of `save_to_disk`. Raises: ConfigError, StorageLost.
    """
    if _is_saved(source):
        return None
    builder = _from_datasets(source, lambda lib: lib.load_dataset_builder(source.name, source.subset), retry_s)
    split = (builder.info.splits or {}).get(source.split)
    if split is None or not split.num_examples or not builder.info.features:
        return None
    return split.num_examples, split.num_bytes, list(builder.info.features)


def _is_saved(source: HuggingFaceSource) -> bool:
    return any(Path(source.name, file).is_file() for file in _SAVED)


def _from_datasets(source: HuggingFaceSource, load: Callable[[Any], Any], retry_s: float) -> Any:
    """Call datasets, with retries while the hub fails; use its cache only if the hub is unreachable at first."""
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as e:
        raise ConfigError(f"data.source.type='huggingface' needs datasets: {way_to_extra('hf')}") from e
    what = f"name={source.name!r}, subset={source.subset!r}, split={source.split!r}"
    problem = hub_problem() if is_hub_name(source.name) else ""
    if problem:
        datasets.config.HF_HUB_OFFLINE = True  # otherwise it retries for a minute before it uses its cache

    def call() -> Any:
        try:
            return load(datasets)
        except (*_LIBRARY_ERRORS, datasets.exceptions.DatasetsError) as e:
            if isinstance(e, OSError):
                raise
            raise ConfigError(f"data.source: cannot load the data set {what}: {e}{_first_cause(e)}") from e

    try:
        return Retries(0.0 if problem else retry_s, renew=lambda: None, pause=pause).run(call, source.name)
    except StorageLost as lost:
        if problem:
            raise ConfigError(
                f"data.source: the data set {what} is not cached here, and {problem}; connect this machine to the "
                "Hugging Face Hub, or set data.source.name to a folder of the files"
            ) from lost
        if lost.is_transient:
            raise
        raise ConfigError(f"data.source: cannot load the data set {what}: {lost}") from lost


def _first_cause(error: Exception) -> str:
    """Format an error's cause: from another process it is the text of a traceback."""
    skipped = (" ", '"', "Traceback", "The above exception", "During handling")
    lines = (line for line in str(error.__cause__ or "").splitlines() if line and not line.startswith(skipped))
    return next((f": {line}" for line in lines), "")


def _synthetic(source: SyntheticSource, seed: int) -> Iterator[Document]:
    """Yield documents of random words with Zipf frequencies, whose loss falls even in a short run.

    Uses only `Random.random`, whose sequence is stable across Python versions.
    """
    draw = random.Random(seed).random
    words = [_made_up_word(2 + n % 7, draw) for n in range(_SYNTHETIC_WORDS)]
    cumulative = list(itertools.accumulate(1 / (rank + 1) for rank in range(_SYNTHETIC_WORDS)))
    for number in range(source.documents):
        length = max(1, round(source.mean_length * (0.5 + draw())))
        parts: list[str] = []
        size = 0
        while size < length:
            parts.append(words[bisect_left(cumulative, draw() * cumulative[-1])])
            size += len(parts[-1]) + 1
        yield Document(" ".join(parts)[:length], f"synthetic document {number}")


def _made_up_word(length: int, draw: Callable[[], float]) -> str:
    alphabets = ["aeiou" if i % 2 else "bdfgklmnprst" for i in range(length)]
    return "".join(letters[int(draw() * len(letters))] for letters in alphabets)
