"""Chunks: every parameter is cut into small tiles by its full shape, independent of how a node's ranks shard it.

A chunk is a tile of the whole parameter, not of a rank's shard. Ranks of a node read it from their shared flat buffer,
so a node with eight sharded ranks and a node with one make the same payload. Work is divided at multiples of
`bits.ALIGNMENT` chunks, where every part of a payload ends at a whole byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from zeroband.config.outer import Uneven
from zeroband.outer.sparse.sizes import ALIGNMENT
from zeroband.state.flat import FlatLayout
from zeroband.state.slot import Slot


def chunk_length(length: int, most: int, uneven: Uneven) -> int:
    """Length of the chunks of a dimension, at most `most`. With `pad` the last chunk may reach beyond the end."""
    if length <= most:
        return max(length, 1)
    if uneven == "pad":
        return -(-length // -(-length // most))
    return max(d for d in range(1, most + 1) if length % d == 0)


@dataclass(frozen=True)
class ChunkedParameter:
    """One parameter as a matrix of chunks."""

    name: str
    start: int
    """Its offset in the flat buffer."""
    rows: int
    columns: int
    first_chunk: int
    """Number of its first chunk in its group."""
    chunk_rows: int
    chunk_columns: int

    @property
    def across(self) -> int:
        """Number of chunks in a row."""
        return -(-self.columns // self.chunk_columns)

    @property
    def chunks(self) -> int:
        return -(-self.rows // self.chunk_rows) * self.across

    def rectangles(self, first: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """A range of its chunks as rectangles (first row, last row + 1, first column, last column + 1) in chunks."""
        while first < stop:
            row, column = divmod(first, self.across)
            if column or stop - first < self.across:
                until = min(stop, (row + 1) * self.across)
                yield row, row + 1, column, column + until - first
            else:
                until = stop - stop % self.across
                yield row, until // self.across, 0, self.across
            first = until


@dataclass(frozen=True)
class ChunkGroup:
    """All chunks of one shape, in the order of the parameters. Any device that holds the buffer."""

    chunk_rows: int
    chunk_columns: int
    pieces: tuple[ChunkedParameter, ...]

    @property
    def numel(self) -> int:
        """Values of one chunk."""
        return self.chunk_rows * self.chunk_columns

    @property
    def chunks(self) -> int:
        return self.pieces[-1].first_chunk + self.pieces[-1].chunks

    def name_of(self, chunk: int) -> str:
        """The parameter that a chunk belongs to."""
        return next(piece.name for piece in reversed(self.pieces) if piece.first_chunk <= chunk)

    def read(self, buffer: Tensor, first: int, stop: int) -> Tensor:
        """A range of chunks, (stop - first, chunk_rows, chunk_columns) float32. `buffer`: the flat one."""
        chunks = buffer.new_zeros(stop - first, self.chunk_rows, self.chunk_columns)
        for outside, inside in self._tiles(buffer, chunks, first, stop):
            inside.copy_(outside)
        return chunks

    def write(self, chunks: Tensor, buffer: Tensor, first: int, stop: int) -> None:
        """Invert `read`, without the padding."""
        for outside, inside in self._tiles(buffer, chunks.view(-1, self.chunk_rows, self.chunk_columns), first, stop):
            outside.copy_(inside)

    def add(self, chunks: Tensor, buffer: Tensor, first: int, stop: int) -> None:
        """Add chunks to the flat buffer's values."""
        for outside, inside in self._tiles(buffer, chunks.view(-1, self.chunk_rows, self.chunk_columns), first, stop):
            outside.add_(inside)

    def _tiles(self, buffer: Tensor, chunks: Tensor, first: int, stop: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of views of equal shape: into the flat buffer, and into the chunks."""
        height, width = self.chunk_rows, self.chunk_columns
        for piece in self.pieces:
            begin, end = max(first, piece.first_chunk), min(stop, piece.first_chunk + piece.chunks)
            if begin >= end:
                continue
            matrix = buffer[piece.start : piece.start + piece.rows * piece.columns].view(piece.rows, piece.columns)
            at = begin - first
            for top, bottom, left, right in piece.rectangles(begin - piece.first_chunk, end - piece.first_chunk):
                count = (bottom - top) * (right - left)
                grid = chunks[at : at + count].view(bottom - top, right - left, height, width)
                at += count
                yield from _cut(matrix, grid, top * height, left * width)


def _cut(matrix: Tensor, grid: Tensor, top: int, left: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The part of a matrix that begins at (top, left), and the chunks (rows, columns, height, width) that lie on it.

    Chunks that reach beyond the matrix are the last of their row or column, and come as separate pairs.
    """
    height, width = grid.shape[2:]
    for y0, y1, h in _whole_and_rest(len(matrix) - top, len(grid), height):
        for x0, x1, w in _whole_and_rest(matrix.shape[1] - left, grid.shape[1], width):
            block = matrix[top + y0 * height :, left + x0 * width :][: (y1 - y0) * h, : (x1 - x0) * w]
            yield (
                block.unflatten(1, (x1 - x0, w)).unflatten(0, (y1 - y0, h)).transpose(1, 2),
                grid[y0:y1, x0:x1, :h, :w],
            )


def _whole_and_rest(length: int, chunks: int, size: int) -> Iterator[tuple[int, int, int]]:
    """(first chunk, last + 1, values of each that exist) of `chunks` chunks on a dimension that is `length` long."""
    whole = min(chunks, length // size)
    if whole:
        yield 0, whole, size
    if whole < chunks:
        yield whole, chunks, length - whole * size


@dataclass(frozen=True)
class ChunkLayout:
    """The chunks of all parameters, those of one shape together."""

    groups: tuple[ChunkGroup, ...]
    numel: int
    """Values of the flat buffer."""

    @staticmethod
    def of(layout: FlatLayout, chunk: int, *, flat_chunk: int | None = None, uneven: Uneven = "pad") -> ChunkLayout:
        """Cut matrices into tiles of at most chunk x chunk, vectors into pieces of at most `flat_chunk` (None: chunk).

        A parameter of more than two dimensions is a matrix whose rows are its first dimension.
        """
        pieces: dict[tuple[int, int], list[ChunkedParameter]] = {}
        for slot in layout.slots:
            rows, columns = _as_matrix(slot)
            if rows * columns == 0:
                continue
            most = chunk if len(slot.shape) > 1 else flat_chunk or chunk
            shape = chunk_length(rows, chunk, uneven), chunk_length(columns, most, uneven)
            same = pieces.setdefault(shape, [])
            before = same[-1].first_chunk + same[-1].chunks if same else 0
            same.append(ChunkedParameter(slot.name, slot.start, rows, columns, before, *shape))
        groups = (ChunkGroup(*shape, tuple(same)) for shape, same in sorted(pieces.items(), reverse=True))
        return ChunkLayout(tuple(groups), layout.numel)


def _as_matrix(slot: Slot) -> tuple[int, int]:
    if len(slot.shape) < 2:
        return 1, slot.numel
    return slot.shape[0], math.prod(slot.shape[1:])


def share_of(chunks: int, rank: int, world_size: int) -> tuple[int, int]:
    """First and last + 1 of the chunks of a group that fall to a rank of the node, at whole bytes of the payload."""
    runs = -(-chunks // ALIGNMENT)
    first, stop = (min(ALIGNMENT * (runs * r // world_size), chunks) for r in (rank, rank + 1))
    return first, stop
