"""Documents of every kind of source, one at a time and in a fixed order. Reads files; knows no tokens."""

from __future__ import annotations

import importlib
import itertools
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator
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
from zeroband.data.listing import tell_empty
from zeroband.data.pieces import (
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
"""What datasets raises, besides its own errors, for files that it cannot read."""
_SAVED = ("dataset_dict.json", "state.json")
"""What `save_to_disk` of datasets leaves in a folder."""
_ROLES = {"human": "user", "gpt": "assistant"}
"""What messages with `from` call the roles; others are called alike."""


class Conversation(NamedTuple):
    """The messages of one conversation, at least one of them the assistant's, and where they came from."""

    messages: list[dict[str, Any]]
    """Each has a `role`, and a `content` unless it calls tools; a template may know other keys."""
    tools: list[dict[str, Any]] | None
    """JSON schemas of the tools that the assistant may call."""
    where: str


def documents(source: DocumentSource, seed: int, retry_s: float = 0.0, on_bad: OnBad = refuse) -> Iterator[Document]:
    """Yield the documents of a source in an order that every call repeats; the seed matters to synthetic text only.

    retry_s: how long a storage that fails is asked again. on_bad: told of rows that cannot be used.
    Raises: ConfigError naming the path, the line or row, and the field that is wrong; StorageLost.
    """
    match source:
        case HuggingFaceSource():
            return read_rows(load_dataset(source, retry_s), source, on_bad=on_bad)
        case SyntheticSource():
            return _synthetic(source, seed)
        case _:
            files = source_files(source, retry_s)
            return itertools.chain.from_iterable(_documents_of(file, source, on_bad) for file in files)


def _documents_of(
    file: SourceFile, source: TextSource | JsonlSource | ParquetSource, on_bad: OnBad
) -> Iterator[Document]:
    match source:
        case TextSource():
            return read_text(file, on_bad, takes_bytes=source.binary or not source.paths)
        case JsonlSource():
            return read_lines(file, source.field, on_bad=on_bad)
        case ParquetSource():
            return read_row_groups(file, source.column, on_bad=on_bad, takes_bytes=source.binary)


def conversations(source: ChatSource, retry_s: float = 0.0, on_bad: OnBad = refuse) -> Iterator[Conversation]:
    """Yield the conversations of a source in an order that every call repeats.

    retry_s: how long a storage that fails is asked again. on_bad: told of lines that cannot be used.
    Raises: ConfigError naming the file, the line, and what is wrong with the conversation; StorageLost.
    """

    def conversation(row: dict[str, Any], where: str) -> Conversation:
        tools: Any = row.get("tools")
        return Conversation(_messages(row[source.field], where), tools or None, where)

    files = source_files(source, retry_s)
    return itertools.chain.from_iterable(read_json(file, source.field, conversation, on_bad=on_bad) for file in files)


def source_identity(source: DocumentSource | ChatSource, seed: int, retry_s: float = 0.0) -> list[Any]:
    """What changes when the documents of a source change: its settings, and the stamps of its files. Plain JSON."""
    settings = source.model_dump(mode="json")
    match source:
        case TextSource() | JsonlSource() | ParquetSource() | ChatSource():
            stamps = [file.stamp() for file in source_files(source, retry_s, says=True)]
            tell_empty(stamps)
            return [settings, stamps]
        case HuggingFaceSource():
            return [settings, *dataset_stamp(load_dataset(source, retry_s))]
        case SyntheticSource():
            return [settings, seed]


def dataset_stamp(dataset: Dataset) -> tuple[str, ...]:
    """What changes when a data set does, and is the same on every machine that reads it from the same place."""
    return str(len(dataset)), dataset._fingerprint


def source_files(source: FilesSource, retry_s: float = 0.0, *, says: bool = False) -> list[SourceFile]:
    """The files of a source; `says`: what its paths name and is left out is logged.

    Raises: ConfigError where one of its paths names none; StorageLost.
    """
    return find_files(source.paths, retry_s, says=says) if source.paths else stdlib_files()


def _messages(found: Any, where: str) -> list[dict[str, Any]]:
    """What a field holds, as messages with roles."""
    items = cast("list[Any]", found) if isinstance(found, list) else []
    messages = [_message(item, number, where) for number, item in enumerate(items, start=1)]
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRow(
            f"data.source: {where}: no message of the assistant, so there is nothing to learn; leave the line out, or "
            "name the key that holds the messages in data.source.field"
        )
    return messages


def _message(item: Any, number: int, where: str) -> dict[str, Any]:
    message = cast("dict[str, Any]", item) if isinstance(item, dict) else {}
    if isinstance(speaker := message.get("from"), str) and "role" not in message:
        message = {"role": _ROLES.get(speaker, speaker), "content": message.get("value")}
    said = message.get("content")
    if not isinstance(message.get("role"), str) or (said is None and not message.get("tool_calls")):
        raise BadRow(
            f"data.source: {where}: message {number} has no role, or nothing is said in it; a message is an object "
            'such as {"role": "user", "content": "..."}'
        )
    return message


def load_dataset(source: HuggingFaceSource, retry_s: float = 0.0, *, processes: int = 1) -> Dataset:
    """The data set of a name, or of a folder of its files or one that its `save_to_disk` wrote.

    processes: what fetches and converts it where this machine does not have it yet.
    Raises: ConfigError, StorageLost.
    """

    def load(datasets: Any) -> Any:
        if _is_saved(source):
            saved = datasets.load_from_disk(source.name)
            return saved[source.split] if isinstance(saved, dict) else saved
        several = processes if processes > 1 else None
        return datasets.load_dataset(source.name, source.subset, split=source.split, num_proc=several)

    return _from_datasets(source, load, retry_s)


def announced(source: HuggingFaceSource, retry_s: float = 0.0) -> tuple[int, int, list[str]] | None:
    """What a data set of a name says of itself before it is fetched: rows, bytes of all columns, names of columns.

    None where it says nothing, or is a folder that `save_to_disk` wrote. Raises: ConfigError, StorageLost.
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
    """What a call of the library gives, asked again while the hub fails; from its cache where it is away at first."""
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as e:
        raise ConfigError(f"data.source.type='huggingface' needs datasets: {way_to_extra('hf')}") from e
    what = f"name={source.name!r}, subset={source.subset!r}, split={source.split!r}"
    problem = hub_problem() if is_hub_name(source.name) else ""
    if problem:
        datasets.config.HF_HUB_OFFLINE = True  # else it tries for a minute before it looks into its cache

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
                f"data.source: this machine has no copy of the data set {what}, and {problem}; connect this machine to "
                "the Hugging Face Hub, or name a folder of the files in data.source.name"
            ) from lost
        if lost.can_pass:
            raise
        raise ConfigError(f"data.source: cannot load the data set {what}: {lost}") from lost


def _first_cause(error: Exception) -> str:
    """What an error was raised from, which is the text of a traceback where another process raised it."""
    skipped = (" ", '"', "Traceback", "The above exception", "During handling")
    lines = (line for line in str(error.__cause__ or "").splitlines() if line and not line.startswith(skipped))
    return next((f": {line}" for line in lines), "")


def _synthetic(source: SyntheticSource, seed: int) -> Iterator[Document]:
    """Made-up words by Zipf's law: the text has structure to learn, so a short run shows a falling loss.

    Uses only `Random.random`, whose sequence Python guarantees across versions.
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
    """Consonants and vowels in turn."""
    alphabets = ["aeiou" if i % 2 else "bdfgklmnprst" for i in range(length)]
    return "".join(letters[int(draw() * len(letters))] for letters in alphabets)
