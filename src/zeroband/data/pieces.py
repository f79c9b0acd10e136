"""Documents of one file or data set, or of a part of it: a range of lines, of row groups or of rows.

What cannot be used is a BadRow, which is refused or left out. Reads files; knows no tokens.
"""

from __future__ import annotations

import codecs
import functools
import importlib
import itertools
import json
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
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
"""Digits that Python always converts to an integer, whatever its limit."""

_R = TypeVar("_R")

Dataset: TypeAlias = Any
"""datasets.Dataset, which has no types here."""


class BadRow(ConfigError):
    """One row, line or file of text that cannot be used; the others can."""


OnBad = Callable[[BadRow], None]
"""Told of a row that cannot be used: raises the error, or lets the row be left out."""


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

    def __call__(self, error: BadRow) -> None:
        self.first = self.first or str(error).removeprefix("data.source: ")
        self.count += 1


class Document(NamedTuple):
    """One document, and where it came from for messages."""

    text: str | bytes
    """Bytes as they lie in a text file, else a string; empty where the source holds an empty or null value."""
    where: str

    @property
    def size(self) -> int:
        return len(self.text)


class IdsRow(NamedTuple):
    """Ids that were made before, and where they came from for messages. Shapes: ids (n,) of any integers."""

    ids: npt.NDArray[np.integer]
    where: str

    @property
    def size(self) -> int:
        return len(self.ids)


class RowGroup(NamedTuple):
    """What a Parquet file says of one of its row groups."""

    rows: int
    size_bytes: int
    """Size of the column's values, uncompressed."""


class ParquetShape(NamedTuple):
    """What a Parquet file holds of a column."""

    groups: Sequence[RowGroup]
    holds_ids: bool
    """Whether the column holds lists of integers."""


def usable(read: Callable[[], _R], on_bad: OnBad) -> Iterator[_R]:
    """What a row gives: one value, or none where it cannot be used and may be left out."""
    try:
        value = read()
    except BadRow as error:
        on_bad(error)
        return
    yield value


def read_text(file: SourceFile, on_bad: OnBad = refuse, *, takes_bytes: bool) -> Iterator[Document]:
    """A text file, which is one document; a bad one where it is no UTF-8 and not taken as bytes."""
    with file.open() as stream:
        content = stream.read()
    yield from usable(lambda: _document_of(content, file.name, takes_bytes=takes_bytes), on_bad)


def _document_of(text: str | bytes, where: str, *, takes_bytes: bool) -> Document:
    """A document; BadRow where it is bytes that are no text, and these are not asked for."""
    if isinstance(text, bytes) and not takes_bytes:
        _require_text(text, where)
    return Document(text, where)


def _require_text(content: bytes, where: str, *, is_whole: bool = True) -> None:
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


def require_beginning_of_text(file: SourceFile) -> None:
    """Raise ConfigError where the first bytes of a file are no text."""
    with file.open() as stream:
        _require_text(stream.read(_BEGINNING_BYTES), file.name, is_whole=False)


def read_lines(
    file: SourceFile, field: str, start: int = 0, stop: float = math.inf, on_bad: OnBad = refuse
) -> Iterator[Document]:
    """The documents of the lines of JSON that begin at the bytes start..stop-1 of a file, decompressed.

    Ranges that adjoin give each line of a file once. Only a file that is not compressed can be read from its middle.
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
    """What is made of each object that has a field, in the lines of `read_lines`; `read` is told where it lies."""

    def row(line: bytes, number: int, at: int) -> _R:
        where = f"{file.name}, byte {at}" if start else f"{file.name}:{number}"
        try:
            return read(_row_of_json(line, field, where), where)
        except BadRow:
            if not start:
                raise
        where = f"{file.name}:{_line_number(file, at)}"  # only now is it worth while to know which line it is
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
    """Number of the line that begins at a byte, from 1."""
    number = 1
    with file.open() as stream:
        while at > 0 and (piece := stream.read(min(at, 1 << 20))):
            number += piece.count(b"\n")
            at -= len(piece)
    return number


def _row_of_json(line: bytes, field: str, where: str) -> dict[str, Any]:
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


def parquet_shape(file: SourceFile, column: str) -> ParquetShape:
    """What the footer of a Parquet file says. Raises ConfigError where it is none, or has no such column."""
    pa: Any = importlib.import_module("pyarrow")  # has no types
    with _open_parquet(file) as opened:
        kind = _column_type(opened, column, file)
        groups = [_row_group(opened.metadata.row_group(i), column) for i in range(opened.metadata.num_row_groups)]
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return ParquetShape(groups, bool(is_list and pa.types.is_integer(kind.value_type)))


def _column_type(opened: Any, column: str, file: SourceFile) -> Any:
    require_column(column, list(opened.schema_arrow.names), file.name)
    return opened.schema_arrow.field(column).type


def _row_group(group: Any, column: str) -> RowGroup:
    chunks = (group.column(i) for i in range(group.num_columns))
    sizes = (chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] == column)
    return RowGroup(group.num_rows, sum(sizes))


def _batches(file: SourceFile, column: str, start: int, stop: int | None) -> Iterator[tuple[int, Any]]:
    """Values of the row groups start..stop-1, as arrays of Arrow, and the number of the first row of each."""
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
    takes_bytes: bool = False,
) -> Iterator[Document]:
    """The documents in the row groups start..stop-1 of a Parquet file. Raises ConfigError naming file and row."""
    for first, values in _batches(file, column, start, stop):
        yield from _rows_of(_plain(values, file), column, file.name, first, on_bad, takes_bytes=takes_bytes)


def _plain(values: Any, file: SourceFile) -> list[Any]:
    """Values of Arrow as those of Python. Raises ConfigError for strings that are no UTF-8."""
    try:
        return values.to_pylist()
    except ValueError as error:
        raise ConfigError(f"data.source: cannot read {file.name} as Parquet: {error}") from error


def read_ids(file: SourceFile, column: str, start: int, stop: int) -> Iterator[IdsRow]:
    """The ids in the row groups start..stop-1 of a Parquet file whose column holds lists of integers."""
    compute: Any = importlib.import_module("pyarrow.compute")  # has no types
    for first, values in _batches(file, column, start, stop):
        ends = np.cumsum([0, *(length or 0 for length in compute.list_value_length(values).to_pylist())])
        flat = values.flatten().to_numpy(zero_copy_only=False)
        if flat.dtype.kind == "f":
            raise ConfigError(f"data.source: {file.name}: {column!r} has ids that are null; write whole lists of ids")
        for number, (begin, end) in enumerate(itertools.pairwise(ends.tolist())):
            yield IdsRow(flat[begin:end], f"{file.name}, row {first + number}")


def read_rows(
    dataset: Dataset, source: HuggingFaceSource, start: int = 0, stop: int | None = None, on_bad: OnBad = refuse
) -> Iterator[Document]:
    """The documents of the rows start..stop-1 of a data set of Hugging Face, which is the source's."""
    require_column(source.column, dataset.column_names, source.name)
    rows = dataset.select_columns([source.column])
    stop = len(dataset) if stop is None else stop
    for first in range(start, stop, _ROWS_AT_ONCE):
        values = rows[first : min(first + _ROWS_AT_ONCE, stop)][source.column]
        where = f"{source.name}[{source.split}]"
        yield from _rows_of(values, source.column, where, first, on_bad, takes_bytes=source.binary)


@contextmanager
def _open_parquet(file: SourceFile) -> Generator[Any]:
    """A file as pyarrow's ParquetFile. Raises ConfigError for whatever that raises inside the block."""
    parquet: Any = importlib.import_module("pyarrow.parquet")  # has no types
    with file.open() as stream:
        try:
            yield parquet.ParquetFile(stream)
        except ZerobandError:
            raise
        except Exception as error:
            raise ConfigError(f"data.source: cannot read {file.name} as Parquet: {error}") from error


def _rows_of(
    values: Iterable[Any], column: str, name: str, first: int, on_bad: OnBad, *, takes_bytes: bool
) -> Iterator[Document]:
    """The documents of rows, whose numbers begin with `first`."""

    def document(value: Any, where: str) -> Document:
        return _document_of(_as_text(value, column, where), where, takes_bytes=takes_bytes)

    for number, value in enumerate(values, start=first):
        yield from usable(functools.partial(document, value, f"{name}, row {number}"), on_bad)


def _as_text(value: Any, field: str, where: str) -> Any:
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
