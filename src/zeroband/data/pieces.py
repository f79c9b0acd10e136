"""Documents of a part of a source: a range of lines, of row groups or of rows. Reads files; knows no tokens."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zeroband.config.data import HuggingFaceSource
from zeroband.data.files import SourceFile
from zeroband.data.sources import (
    BadRow,
    Dataset,
    Document,
    OnBad,
    as_text,
    open_parquet,
    refuse,
    require_column,
    row_of_json,
    rows_of,
    usable,
)
from zeroband.errors import ConfigError

_ROWS_AT_ONCE = 1024


class IdsRow(NamedTuple):
    """Ids that were made before, and where they came from for messages. Shapes: ids (n,) of any integers."""

    ids: npt.NDArray[np.integer]
    where: str


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


def read_lines(
    file: SourceFile, field: str, start: int = 0, stop: float = math.inf, on_bad: OnBad = refuse
) -> Iterator[Document]:
    """The documents of the lines of JSON that begin at the bytes start..stop-1 of a file, decompressed.

    Ranges that adjoin give each line of a file once. Only a file that is not compressed can be read from its middle.
    Raises: ConfigError naming the file and the line.
    """
    with file.open() as stream:
        at = start
        if start:
            stream.seek(start - 1)
            at += len(stream.readline()) - 1
        while at < stop and (line := stream.readline()):
            if line.strip():
                yield from usable(functools.partial(_document_of, line, field, file, at), on_bad)
            at += len(line)


def _document_of(line: bytes, field: str, file: SourceFile, at: int) -> Document:
    try:
        return Document(as_text(row_of_json(line, field, "")[field], field, ""), f"{file.name}, byte {at}")
    except BadRow:  # only now is it worth while to know which line it is
        where = f"{file.name}:{_line_number(file, at)}"
        as_text(row_of_json(line, field, where)[field], field, where)
        raise


def _line_number(file: SourceFile, at: int) -> int:
    """Number of the line that begins at a byte, from 1."""
    number = 1
    with file.open() as stream:
        while at > 0 and (piece := stream.read(min(at, 1 << 20))):
            number += piece.count(b"\n")
            at -= len(piece)
    return number


def parquet_shape(file: SourceFile, column: str) -> ParquetShape:
    """What the footer of a Parquet file says. Raises ConfigError where it is none, or has no such column."""
    pa: Any = importlib.import_module("pyarrow")  # has no types
    with open_parquet(file) as opened:
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


def _batches(file: SourceFile, column: str, start: int, stop: int) -> Iterator[tuple[int, Any]]:
    """Values of the row groups start..stop-1, as arrays of Arrow, and the number of the first row of each."""
    with open_parquet(file) as opened:
        row = sum(opened.metadata.row_group(i).num_rows for i in range(start))
        groups = list(range(start, stop))
        for batch in opened.iter_batches(batch_size=_ROWS_AT_ONCE, row_groups=groups, columns=[column]):
            yield row, batch.column(0)
            row += len(batch)


def read_row_groups(
    file: SourceFile, column: str, start: int, stop: int, on_bad: OnBad = refuse, *, takes_bytes: bool = False
) -> Iterator[Document]:
    """The documents in the row groups start..stop-1 of a Parquet file. Raises ConfigError naming file and row."""
    for first, values in _batches(file, column, start, stop):
        yield from rows_of(_plain(values, file), column, file.name, first, on_bad, takes_bytes=takes_bytes)


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
    dataset: Dataset, source: HuggingFaceSource, start: int, stop: int, on_bad: OnBad = refuse
) -> Iterator[Document]:
    """The documents of the rows start..stop-1 of a data set of Hugging Face, which is the source's."""
    require_column(source.column, dataset.column_names, source.name)
    rows = dataset.select_columns([source.column])
    for first in range(start, stop, _ROWS_AT_ONCE):
        values = rows[first : min(first + _ROWS_AT_ONCE, stop)][source.column]
        where = f"{source.name}[{source.split}]"
        yield from rows_of(values, source.column, where, first, on_bad, takes_bytes=source.binary)
