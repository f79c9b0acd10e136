"""Readers of documents: text, JSON Lines, Parquet and Hugging Face data sets, whole or by range.

An unusable row is a BadRow, which ends reading or is skipped.
"""

from __future__ import annotations

import codecs
import functools
import importlib
import itertools
import json
import math
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from zeroband.config.data import HuggingFaceSource
from zeroband.data.files import SourceFile
from zeroband.errors import ConfigError, ZerobandError

_ROWS_AT_ONCE = 1024
_BEGINNING_BYTES = 1 << 13
_MOST_DIGITS = 640
"""Python converts integers of this length at any setting of its limit."""

_R = TypeVar("_R")

Dataset: TypeAlias = Any
"""datasets.Dataset, which has no type hints here."""


class BadRow(ConfigError):
    """An unusable row, line or text file; reading can continue without it."""


OnBad = Callable[[BadRow], None]
"""Called with a bad row: raises the error, or returns to skip the row."""


def refuse(error: BadRow) -> None:
    """Raise the error."""
    raise BadRow(f"{error}; use data.skip_bad_rows to skip and count such rows") from error


class BadRows:
    """Counts skipped rows."""

    def __init__(self) -> None:
        self.count = 0
        self.first = ""
        """Message of the first one."""

    def __str__(self) -> str:
        """Format as a suffix to other counts; empty without bad rows."""
        return f", {self.count} unusable, the first: {self.first}" if self.count else ""

    def __call__(self, error: BadRow) -> None:
        self.first = self.first or str(error).removeprefix("data.source: ")
        self.count += 1


class Document(NamedTuple):
    """A document and its origin, for messages."""

    text: str | bytes
    """Raw bytes of a text file, else a string; empty for an empty or null value."""
    where: str

    @property
    def size(self) -> int:
        return len(self.text)


class IdsRow(NamedTuple):
    """Existing token ids and their origin, for messages. Shapes: ids (n,) of any integer type."""

    ids: npt.NDArray[np.integer]
    where: str

    @property
    def size(self) -> int:
        return len(self.ids)


class ParquetShape(NamedTuple):
    """Metadata of a column of a Parquet file."""

    group_bytes: list[int]
    """Uncompressed size of each row group, at least 1; 0 if it has no rows."""
    holds_ids: bool
    """Whether the values are lists of integers."""


def usable(read: Callable[[], _R], on_bad: OnBad) -> Iterator[_R]:
    """Yield the value of a row; nothing if it is bad and `on_bad` skips it."""
    try:
        value = read()
    except BadRow as error:
        on_bad(error)
        return
    yield value


def read_text(file: SourceFile, on_bad: OnBad = refuse, *, allow_binary: bool) -> Iterator[Document]:
    """Yield a text file as one document; unless `allow_binary`, it must be UTF-8."""
    with file.open() as stream:
        content = stream.read()
    yield from usable(lambda: _document_of(content, file.name, allow_binary=allow_binary), on_bad)


def _document_of(text: str | bytes, where: str, *, allow_binary: bool) -> Document:
    if isinstance(text, bytes) and not allow_binary:
        _require_text(text, where)
    return Document(text, where)


def _require_text(content: bytes, where: str, *, is_whole: bool = True) -> None:
    """Raise BadRow unless the bytes are UTF-8 without NUL. `is_whole`: if false, the last character may be cut off."""
    offset = content.find(b"\0")
    try:
        codecs.getincrementaldecoder("utf-8")().decode(content, is_whole)
    except UnicodeDecodeError as error:
        offset = error.start if offset < 0 else min(offset, error.start)
    if offset >= 0:
        raise BadRow(
            f"data.source: {where} is not text: byte {offset} is 0x{content[offset]:02x}, which is invalid in UTF-8; "
            "drop it, convert it (iconv -t utf-8), or set data.source.binary = true to train on its bytes"
        )


def require_beginning_of_text(file: SourceFile) -> None:
    """Raise ConfigError unless a file begins with text."""
    with file.open() as stream:
        _require_text(stream.read(_BEGINNING_BYTES), file.name, is_whole=False)


def read_lines(
    file: SourceFile, field: str, start: int = 0, stop: float = math.inf, on_bad: OnBad = refuse
) -> Iterator[Document]:
    """Yield the documents of the JSON lines that begin within bytes start..stop-1 of a file.

    Adjacent ranges yield each line once. A compressed file must be read from its start.
    Raises: ConfigError naming the file and the line.
    """

    def document(row: dict[str, Any], where: str) -> Document:
        return Document(_as_text(row[field], field, where), where)

    return read_json(file, field, document, start, stop, on_bad)


def read_json(
    file: SourceFile,
    field: str,
    read: Callable[[dict[str, Any], str], _R],
    start: int = 0,
    stop: float = math.inf,
    on_bad: OnBad = refuse,
) -> Iterator[_R]:
    """Apply `read` to each object and its origin, in the lines of `read_lines`; each must have `field`."""

    def row(line: bytes, number: int, at: int) -> _R:
        where = f"{file.name}, byte {at}" if start else f"{file.name}:{number}"
        try:
            return read(_row_of_json(line, field, where), where)
        except BadRow:
            if not start:
                raise
        where = f"{file.name}:{_line_number(file, at)}"  # costs a read of the file, so only for an error
        return read(_row_of_json(line, field, where), where)

    with file.open() as stream:
        at = start
        if start:
            stream.seek(start - 1)
            at += len(stream.readline()) - 1
        for number in itertools.count(1):
            if at >= stop or not (line := stream.readline()):
                return
            if line.strip():
                yield from usable(functools.partial(row, line, number, at), on_bad)
            at += len(line)


def _line_number(file: SourceFile, at: int) -> int:
    """Return the 1-based number of the line that begins at a byte."""
    number = 1
    with file.open() as stream:
        while at > 0 and (piece := stream.read(min(at, 1 << 20))):
            number += piece.count(b"\n")
            at -= len(piece)
    return number


def _row_of_json(line: bytes, field: str, where: str) -> dict[str, Any]:
    """Parse a line as an object with this field. Raises BadRow."""
    try:
        row: Any = _json_of(line)
    except (ValueError, RecursionError) as e:
        raise BadRow(f"data.source: {where}: not a line of JSON: {e}") from e
    if not isinstance(row, dict):
        raise BadRow(f"data.source: {where}: a {type(row).__name__} instead of an object with {field!r}")
    keys = cast("dict[str, Any]", row)
    if field not in keys:
        raise BadRow(f"data.source: {where}: no field {field!r} (data.source.field); it has {_listed(list(keys))}")
    return keys


def _json_of(line: bytes) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        raise
    except ValueError:  # an integer above Python's limit of digits; or invalid text, which raises again
        return json.loads(line, parse_int=lambda digits: int(digits) if len(digits) < _MOST_DIGITS else Decimal(digits))


def parquet_shape(file: SourceFile, column: str) -> ParquetShape:
    """Read the footer of a Parquet file. Raises ConfigError for another format or a missing column."""
    pa: Any = importlib.import_module("pyarrow")  # has no type hints
    with _open_parquet(file) as opened:
        require_column(column, list(opened.schema_arrow.names), file.name)
        kind = opened.schema_arrow.field(column).type
        sizes = [_size_of_group(opened.metadata.row_group(i), column) for i in range(opened.metadata.num_row_groups)]
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return ParquetShape(sizes, bool(is_list and pa.types.is_integer(kind.value_type)))


def _size_of_group(group: Any, column: str) -> int:
    chunks = (group.column(i) for i in range(group.num_columns))
    sizes = (chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] == column)
    return max(1, sum(sizes)) if group.num_rows else 0


def _batches(file: SourceFile, column: str, start: int, stop: int | None) -> Iterator[tuple[int, Any]]:
    """Yield the first row number and the values (an Arrow array) of each batch of the row groups start..stop-1."""
    with _open_parquet(file) as opened:
        require_column(column, list(opened.schema_arrow.names), file.name)
        row = sum(opened.metadata.row_group(i).num_rows for i in range(start))
        groups = list(range(start, opened.metadata.num_row_groups if stop is None else stop))
        for batch in opened.iter_batches(batch_size=_ROWS_AT_ONCE, row_groups=groups, columns=[column]):
            yield row, batch.column(0)
            row += len(batch)


def read_row_groups(
    file: SourceFile,
    column: str,
    start: int = 0,
    stop: int | None = None,
    on_bad: OnBad = refuse,
    *,
    allow_binary: bool = False,
) -> Iterator[Document]:
    """Yield the documents in the row groups start..stop-1 of a Parquet file. Raises ConfigError naming file and row."""
    for first, values in _batches(file, column, start, stop):
        try:
            rows = values.to_pylist()
        except ValueError as error:  # invalid UTF-8
            raise ConfigError(f"data.source: cannot read {file.name} as Parquet: {error}") from error
        yield from _rows_of(rows, column, file.name, first, on_bad, allow_binary=allow_binary)


def read_ids(file: SourceFile, column: str, start: int, stop: int) -> Iterator[IdsRow]:
    """Yield the lists of token ids in the row groups start..stop-1 of a Parquet file."""
    compute: Any = importlib.import_module("pyarrow.compute")  # has no type hints
    for first, values in _batches(file, column, start, stop):
        ends = np.cumsum([0, *(length or 0 for length in compute.list_value_length(values).to_pylist())])
        flat = values.flatten().to_numpy(zero_copy_only=False)
        if flat.dtype.kind == "f":
            raise ConfigError(f"data.source: {file.name}: {column!r} contains null ids; write complete lists of ids")
        for number, (begin, end) in enumerate(itertools.pairwise(ends.tolist())):
            yield IdsRow(flat[begin:end], f"{file.name}, row {first + number}")


def read_rows(
    dataset: Dataset, source: HuggingFaceSource, start: int = 0, stop: int | None = None, on_bad: OnBad = refuse
) -> Iterator[Document]:
    """Yield the documents of rows start..stop-1 of the source's Hugging Face data set."""
    require_column(source.column, dataset.column_names, source.name)
    rows = dataset.select_columns([source.column])
    stop = len(dataset) if stop is None else stop
    for first in range(start, stop, _ROWS_AT_ONCE):
        values = rows[first : min(first + _ROWS_AT_ONCE, stop)][source.column]
        where = f"{source.name}[{source.split}]"
        yield from _rows_of(values, source.column, where, first, on_bad, allow_binary=source.binary)


@contextmanager
def _open_parquet(file: SourceFile) -> Generator[Any]:
    """Open a file as pyarrow's ParquetFile. Raises ConfigError for any of its errors inside the block."""
    parquet: Any = importlib.import_module("pyarrow.parquet")  # has no type hints
    with file.open() as stream:
        try:
            yield parquet.ParquetFile(stream)
        except ZerobandError:
            raise
        except Exception as error:
            raise ConfigError(f"data.source: cannot read {file.name} as Parquet: {error}") from error


def _rows_of(
    values: Iterable[Any], column: str, name: str, first: int, on_bad: OnBad, *, allow_binary: bool
) -> Iterator[Document]:
    """Yield the documents of rows numbered from `first`."""

    def document(value: Any, where: str) -> Document:
        return _document_of(_as_text(value, column, where), where, allow_binary=allow_binary)

    for number, value in enumerate(values, start=first):
        yield from usable(functools.partial(document, value, f"{name}, row {number}"), on_bad)


def _as_text(value: Any, field: str, where: str) -> Any:
    """Return a value as text, empty for null. Raises BadRow for other types."""
    if value is None:
        return ""
    if not isinstance(value, str | bytes):
        raise BadRow(f"data.source: {where}: {field!r} holds a {type(value).__name__} instead of text")
    return value


def require_column(column: str, present: list[str], name: str) -> None:
    """Raise ConfigError if a table lacks the column."""
    if column not in present:
        raise ConfigError(f"data.source: {name}: no column {column!r} (data.source.column); it has {_listed(present)}")


def _listed(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names[:12]) + (", ..." if len(names) > 12 else "") if names else "none"
