"""Documents of every kind of source, one at a time and in a fixed order. Reads files; knows no tokens."""

from __future__ import annotations

import codecs
import functools
import importlib
import itertools
import json
import random
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

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
from zeroband.data.retries import Retries
from zeroband.errors import ConfigError, StorageLost, ZerobandError, way_to_extra

_ROWS_AT_ONCE = 1024
_SYNTHETIC_WORDS = 512
_BEGINNING_BYTES = 1 << 13
_LIBRARY_ERRORS = (ValueError, LookupError, RuntimeError, TypeError, AttributeError, ArithmeticError, EOFError)
"""What datasets raises, besides its own errors, for files that it cannot read."""
_SAVED = ("dataset_dict.json", "state.json")
"""What `save_to_disk` of datasets leaves in a folder."""
_MOST_DIGITS = 640
"""Digits that Python always converts to an integer, whatever its limit."""
_ROLES = {"human": "user", "gpt": "assistant"}
"""What messages with `from` call the roles; others are called alike."""


class BadRow(ConfigError):
    """One row, line or file of text that cannot be used; the others can."""


class OnBad(Protocol):
    """Told of a row that cannot be used: raises the error, or lets the row be left out."""

    def __call__(self, error: BadRow, /) -> None: ...


def refuse(error: BadRow) -> None:
    """Raise the error: the first bad row ends the reading."""
    raise BadRow(f"{error}; data.skip_bad_rows has such rows left out and counted") from error


class BadRows:
    """Counts the rows that are left out."""

    def __init__(self) -> None:
        self.count = 0
        self.first = ""
        """What is wrong with the first one."""

    def __str__(self) -> str:
        """What is said of them behind other counts; nothing where there are none."""
        return f", {self.count} that cannot be used, the first: {self.first}" if self.count else ""

    def __call__(self, error: BadRow, /) -> None:
        self.first = self.first or str(error).removeprefix("data.source: ")
        self.count += 1


class Document(NamedTuple):
    """One document, and where it came from for messages."""

    text: str | bytes
    """Bytes as they lie in a text file, else a string; empty where the source holds an empty or null value."""
    where: str


class Conversation(NamedTuple):
    """The messages of one conversation, at least one of them the assistant's, and where they came from."""

    messages: list[dict[str, Any]]
    """Each has a `role`, and a `content` unless it calls tools; a template may know other keys."""
    tools: list[dict[str, Any]] | None
    """JSON schemas of the tools that the assistant may call."""
    where: str


class Dataset(Protocol):
    """The part of datasets.Dataset that is used here."""

    column_names: list[str]
    data: Any
    """Its table of Arrow."""
    _fingerprint: str
    """A hash of its name, its configuration, the revisions of its files and the split, or of what it was made by."""

    def __len__(self) -> int: ...
    def __getitem__(self, key: slice) -> dict[str, list[Any]]: ...
    def select_columns(self, column_names: list[str]) -> Dataset: ...
    def iter(self, batch_size: int) -> Iterator[dict[str, list[Any]]]: ...


def documents(source: DocumentSource, seed: int, retry_s: float = 0.0, on_bad: OnBad = refuse) -> Iterator[Document]:
    """Yield the documents of a source in an order that every call repeats; the seed matters to synthetic text only.

    retry_s: how long a storage that fails is asked again. on_bad: told of rows that cannot be used.
    Raises: ConfigError naming the path, the line or row, and the field that is wrong; StorageLost.
    """
    match source:
        case TextSource():
            return _text(source_files(source, retry_s), on_bad, takes_bytes=source.binary or not source.paths)
        case JsonlSource():
            return _jsonl(source_files(source, retry_s), source.field, on_bad)
        case ParquetSource():
            return _parquet(source_files(source, retry_s), source, on_bad)
        case HuggingFaceSource():
            return _huggingface(load_dataset(source, retry_s), source, on_bad)
        case SyntheticSource():
            return _synthetic(source, seed)


def conversations(source: ChatSource, retry_s: float = 0.0, on_bad: OnBad = refuse) -> Iterator[Conversation]:
    """Yield the conversations of a source in an order that every call repeats.

    retry_s: how long a storage that fails is asked again. on_bad: told of lines that cannot be used.
    Raises: ConfigError naming the file, the line, and what is wrong with the conversation; StorageLost.
    """

    def conversation(line: bytes, where: str) -> Conversation:
        row = row_of_json(line, source.field, where)
        tools: Any = row.get("tools")
        return Conversation(_messages(row[source.field], where), tools or None, where)

    return _lines(source_files(source, retry_s), conversation, on_bad)


def source_identity(source: DocumentSource | ChatSource, seed: int, retry_s: float = 0.0) -> list[Any]:
    """What changes when the documents of a source change: its settings, and the stamps of its files. Plain JSON."""
    settings = source.model_dump(mode="json")
    match source:
        case TextSource() | JsonlSource() | ParquetSource() | ChatSource():
            return [settings, [file.stamp() for file in source_files(source, retry_s, says=True)]]
        case HuggingFaceSource():
            return [settings, *dataset_stamp(load_dataset(source, retry_s))]
        case SyntheticSource():
            return [settings, seed]


def dataset_stamp(dataset: Dataset) -> tuple[str, ...]:
    """What changes when a data set does, and is the same on every machine that reads it from the same place."""
    return str(len(dataset)), dataset._fingerprint  # pyright: ignore[reportPrivateUsage]


def source_files(source: FilesSource, retry_s: float = 0.0, *, says: bool = False) -> list[SourceFile]:
    """The files of a source; `says`: what its paths name and is left out is logged.

    Raises: ConfigError where one of its paths names none; StorageLost.
    """
    return find_files(source.paths, retry_s, says=says) if source.paths else stdlib_files()


def require_beginning_of_text(file: SourceFile) -> None:
    """Raise ConfigError where the first bytes of a file are no text."""
    with file.open() as stream:
        require_text(stream.read(_BEGINNING_BYTES), file.name, is_whole=False)


_R = TypeVar("_R")


def usable(read: Callable[[], _R], on_bad: OnBad) -> Iterator[_R]:
    """What a row gives: one value, or none where it cannot be used and may be left out."""
    try:
        value = read()
    except BadRow as error:
        on_bad(error)
        return
    yield value


def _text(files: list[SourceFile], on_bad: OnBad, *, takes_bytes: bool) -> Iterator[Document]:
    for file in files:
        yield from read_text(file, on_bad, takes_bytes=takes_bytes)


def read_text(file: SourceFile, on_bad: OnBad = refuse, *, takes_bytes: bool) -> Iterator[Document]:
    """A text file, which is one document; a bad one where it is no UTF-8 and not taken as bytes."""
    with file.open() as stream:
        content = stream.read()
    yield from usable(lambda: document_of(content, file.name, takes_bytes=takes_bytes), on_bad)


def document_of(text: str | bytes, where: str, *, takes_bytes: bool) -> Document:
    """A document; BadRow where it is bytes that are no text, and these are not asked for."""
    if isinstance(text, bytes) and not takes_bytes:
        require_text(text, where)
    return Document(text, where)


def require_text(content: bytes, where: str, *, is_whole: bool = True) -> None:
    """Raise BadRow for what is no text in UTF-8. `is_whole`: more may follow, and complete a cut character."""
    offset = content.find(b"\0")
    try:
        codecs.getincrementaldecoder("utf-8")().decode(content, is_whole)
    except UnicodeDecodeError as error:
        offset = error.start if offset < 0 else min(offset, error.start)
    if offset >= 0:
        raise BadRow(
            f"data.source: {where} is no text: byte {offset} is 0x{content[offset]:02x}, which UTF-8 does not have "
            "there; leave it out, convert it (iconv -t utf-8), or set data.source.binary = true to train on its bytes"
        )


def _jsonl(files: list[SourceFile], field: str, on_bad: OnBad) -> Iterator[Document]:
    def document(line: bytes, where: str) -> Document:
        return Document(as_text(row_of_json(line, field, where)[field], field, where), where)

    return _lines(files, document, on_bad)


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


def _lines(files: list[SourceFile], read: Callable[[bytes, str], _R], on_bad: OnBad) -> Iterator[_R]:
    """What is made of the lines of files that are not blank; `read` is told where each of them lies."""
    for file in files:
        with file.open() as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield from usable(functools.partial(read, line, f"{file.name}:{number}"), on_bad)


def row_of_json(line: bytes, field: str, where: str) -> dict[str, Any]:
    """The object of a line, which has the field. Raises BadRow naming where the line lies."""
    try:
        row: Any = _json_of(line)
    except (ValueError, RecursionError) as e:
        raise BadRow(f"data.source: {where}: not a line of JSON: {e}") from e
    if not isinstance(row, dict):
        raise BadRow(f"data.source: {where}: a {type(row).__name__}, where an object with {field!r} is needed")
    keys = cast("dict[str, Any]", row)
    if field not in keys:
        raise BadRow(f"data.source: {where}: no field {field!r} (data.source.field); it has {_listed(list(keys))}")
    return keys


def _json_of(line: bytes) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        raise
    except ValueError:  # Python makes no integers of thousands of digits, or it is no text
        return json.loads(line, parse_int=lambda digits: int(digits) if len(digits) < _MOST_DIGITS else Decimal(digits))


def _parquet(files: list[SourceFile], source: ParquetSource, on_bad: OnBad) -> Iterator[Document]:
    for file in files:
        with open_parquet(file) as table:
            require_column(source.column, list(table.schema_arrow.names), file.name)
            batches = table.iter_batches(batch_size=_ROWS_AT_ONCE, columns=[source.column])
            values = itertools.chain.from_iterable(batch.column(0).to_pylist() for batch in batches)
            yield from rows_of(values, source.column, file.name, 0, on_bad, takes_bytes=source.binary)


@contextmanager
def open_parquet(file: SourceFile) -> Generator[Any]:
    """A file as pyarrow's ParquetFile. Raises ConfigError for whatever that raises inside the block."""
    parquet: Any = importlib.import_module("pyarrow.parquet")  # has no types
    with file.open() as stream:
        try:
            yield parquet.ParquetFile(stream)
        except ZerobandError:
            raise
        except Exception as error:
            raise ConfigError(f"data.source: cannot read {file.name} as Parquet: {error}") from error


def _huggingface(dataset: Dataset, source: HuggingFaceSource, on_bad: OnBad) -> Iterator[Document]:
    require_column(source.column, dataset.column_names, source.name)
    batches = dataset.select_columns([source.column]).iter(_ROWS_AT_ONCE)
    values = itertools.chain.from_iterable(batch[source.column] for batch in batches)
    where = f"{source.name}[{source.split}]"
    yield from rows_of(values, source.column, where, 0, on_bad, takes_bytes=source.binary)


class Announced(NamedTuple):
    """What a data set says of itself before it is fetched."""

    rows: int
    size_bytes: int
    """All its columns together."""
    column_names: list[str]


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

    return cast(Dataset, _from_datasets(source, load, retry_s))


def announced(source: HuggingFaceSource, retry_s: float = 0.0) -> Announced | None:
    """What a data set of a name says of itself; None where it says nothing, or is a folder that `save_to_disk` wrote.

    Raises: ConfigError, StorageLost.
    """
    if _is_saved(source):
        return None
    builder = _from_datasets(source, lambda lib: lib.load_dataset_builder(source.name, source.subset), retry_s)
    split = (builder.info.splits or {}).get(source.split)
    if split is None or not split.num_examples or not builder.info.features:
        return None
    return Announced(split.num_examples, split.num_bytes, list(builder.info.features))


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


def rows_of(
    values: Iterable[Any], column: str, name: str, first: int, on_bad: OnBad, *, takes_bytes: bool
) -> Iterator[Document]:
    """The documents of rows, whose numbers begin with `first`."""

    def document(value: Any, where: str) -> Document:
        return document_of(as_text(value, column, where), where, takes_bytes=takes_bytes)

    for number, value in enumerate(values, start=first):
        yield from usable(functools.partial(document, value, f"{name}, row {number}"), on_bad)


def as_text(value: Any, field: str, where: str) -> Any:
    """What a field holds, as a string or bytes, empty for null. Raises BadRow where it is something else."""
    if value is None:
        return ""
    if not isinstance(value, str | bytes):
        raise BadRow(f"data.source: {where}: {field!r} holds a {type(value).__name__}, where text is needed")
    return value


def require_column(column: str, present: list[str], name: str) -> None:
    """Raise ConfigError where a table has no such column."""
    if column not in present:
        raise ConfigError(f"data.source: {name}: no column {column!r} (data.source.column); it has {_listed(present)}")


def _listed(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names[:12]) + (", ..." if len(names) > 12 else "") if names else "none"
