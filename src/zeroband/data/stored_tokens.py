"""Stored token ids as a token store: a prepared set, or files written by another trainer.

Maps positions to blocks and files, and reads local files; `fetching` reads remote ones.
"""

from __future__ import annotations

import bisect
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from zeroband.data.retries import Damaged
from zeroband.data.shard_set import blocks_of
from zeroband.data.token_storage import StoredInts, TokenStorage
from zeroband.data.token_store import TokenStore
from zeroband.errors import StorageLost

Ids = npt.NDArray[np.unsignedinteger]


class BlockOrder(NamedTuple):
    """Distinct blocks in the order of their first use. Shapes: both (n,) int64."""

    blocks: npt.NDArray[np.int64]
    last_use: npt.NDArray[np.int64]
    """Position in this order that reading has reached when a block is used for the last time."""

    def live(self) -> npt.NDArray[np.int64]:
        """Count, for each position, the blocks first used by then and still needed. Shapes: (n,) int64."""
        done = np.cumsum(np.bincount(self.last_use, minlength=len(self.blocks)))
        return np.arange(1, len(self.blocks) + 1) - np.concatenate([[0], done[:-1]])


EMPTY_ORDER = BlockOrder(np.empty(0, np.int64), np.empty(0, np.int64))


@dataclass(frozen=True)
class TokenFile:
    """A contiguous run of token ids in a file."""

    path: str
    offset: int
    """Offset of the first id in bytes."""
    tokens: int


class DocumentStarts:
    """Sorted start positions of the documents of several files, offset by each file's first position."""

    def __init__(self, parts: Sequence[Any], offsets: Sequence[int]) -> None:
        self._parts, self._offsets = parts, offsets
        self._counts = np.cumsum([0, *map(len, parts)]).tolist()

    def __len__(self) -> int:
        return self._counts[-1]

    def __getitem__(self, document: int) -> int:
        part = bisect.bisect_right(self._counts, document) - 1
        return self._offsets[part] + self._parts[part][document - self._counts[part]]


@dataclass(frozen=True)
class TokenFiles:
    """The files of a set and its metadata; maps positions to blocks, files and byte offsets."""

    files: tuple[TokenFile, ...]
    dtype: np.dtype[np.integer[Any]]
    """Stored type; never holds negative ids."""
    block_tokens: int
    end_of_document: int
    fingerprint: str
    vocab_size: int
    """Every id is below it."""
    documents: int | None = None
    """Number of documents, if the format records it."""
    tokenizer: str | None = None
    tokenizer_fingerprint: str | None = None
    tokenizer_release: str | None = None
    packed_length: int | None = None
    hashes: StoredInts | None = None
    """Hash of each block, if the format has them."""
    document_starts: DocumentStarts | None = None
    """Document index, for formats without end-of-document ids."""

    @cached_property
    def _unsigned(self) -> np.dtype[np.unsignedinteger]:
        return np.dtype(self.dtype.str.replace("i", "u"))

    @cached_property
    def ids_dtype(self) -> np.dtype[np.unsignedinteger]:
        """Type of the ids as they are read."""
        return np.dtype("<u4") if self.dtype.itemsize == 8 else self._unsigned

    @cached_property
    def shards(self) -> list[int]:
        """Number of tokens in each file."""
        return [file.tokens for file in self.files]

    @cached_property
    def starts(self) -> list[int]:
        """First position of each file, then the total."""
        return [0, *np.cumsum(self.shards, dtype=np.int64).tolist()]

    @cached_property
    def first_blocks(self) -> list[int]:
        """First block of each file, then the total."""
        counts = [blocks_of(tokens, self.block_tokens) for tokens in self.shards]
        return [0, *np.cumsum(counts, dtype=np.int64).tolist()]

    def shard_of(self, position: int) -> int:
        return bisect.bisect_right(self.starts, position) - 1

    def in_files(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Split a span by file. Returns (file, start, stop), relative to the file."""
        parts: list[tuple[int, int, int]] = []
        while start < stop or not parts:
            shard = min(self.shard_of(start), len(self.shards) - 1)
            begin, end = self.starts[shard], min(stop, self.starts[shard + 1])
            parts.append((shard, start - begin, end - begin))
            start = end
        return parts

    def block_of(self, position: int) -> tuple[int, int]:
        """Return the block that holds a position, and the offset in it."""
        shard = self.shard_of(position)
        within, offset = divmod(position - self.starts[shard], self.block_tokens)
        return self.first_blocks[shard] + within, offset

    def location_of(self, block: int) -> tuple[int, int, int]:
        """Return a block's file, its first token in that file, and its number of tokens."""
        shard = bisect.bisect_right(self.first_blocks, block) - 1
        start = (block - self.first_blocks[shard]) * self.block_tokens
        return shard, start, min(self.block_tokens, self.shards[shard] - start)

    def bytes_of(self, block: int) -> tuple[str, int, int]:
        """Return a block's path and byte range [start, stop)."""
        shard, start, tokens = self.location_of(block)
        file, size = self.files[shard], self.dtype.itemsize
        return file.path, file.offset + start * size, file.offset + (start + tokens) * size

    def block_order(self, spans: Sequence[tuple[int, int]]) -> BlockOrder:
        """Return the blocks of spans of positions in the order of their first use."""
        if not len(spans):
            return EMPTY_ORDER
        edges = np.asarray(spans, dtype=np.int64)
        first, last = (self._blocks_at(edges[:, 0]), self._blocks_at(edges[:, 1] - 1))
        counts = last - first + 1
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        needed = np.repeat(first, counts) + within
        blocks, at = np.unique(needed, return_index=True)
        _, from_end = np.unique(needed[::-1], return_index=True)
        is_new = np.zeros(len(needed), dtype=np.int64)
        is_new[at] = 1
        reached = np.cumsum(is_new) - 1
        by_first_use = np.argsort(at)
        return BlockOrder(blocks[by_first_use], reached[len(needed) - 1 - from_end][by_first_use])

    def check(self, block: int, name: str) -> Callable[[bytes], None]:
        """Return a function that verifies a block's bytes.

        It raises Damaged on a wrong hash; without hashes it raises StorageLost for ids outside the vocabulary.
        """
        expected = None if self.hashes is None else self.hashes[block]

        def verify(content: bytes) -> None:
            if expected is not None:
                if xxhash.xxh3_64_intdigest(content) != expected:
                    raise Damaged(f"the hash of block {block} differs from hashes.npy")
            elif problem := vocabulary_problem(np.frombuffer(content, self.dtype), self.vocab_size, name):
                raise StorageLost(problem)

        return verify

    def ids_of(self, content: bytes) -> Ids:
        """Convert stored bytes to ids; read-only."""
        return np.frombuffer(content, self._unsigned).astype(self.ids_dtype, copy=False)

    def _blocks_at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        shards = np.searchsorted(self.starts, positions, "right") - 1
        within = (positions - np.asarray(self.starts)[shards]) // self.block_tokens
        return np.asarray(self.first_blocks)[shards] + within


def vocabulary_problem(ids: npt.NDArray[np.integer[Any]], vocab_size: int, name: str) -> str | None:
    """Describe the first negative or too large id of a file; None if all are valid. Shapes: (n,), n > 0."""
    low, high = int(ids.min()), int(ids.max())
    if low >= 0 and high < vocab_size:
        return None
    return (
        f"{name} contains the id {low if low < 0 else high}, but the vocabulary has {vocab_size} ids; set "
        "data.tokenizer to the tokenizer that wrote the file, or correct data.source.dtype"
    )


class StoredTokens(TokenStore):
    """The token ids of a set of files.

    Reads within one shard are cheapest; each costs at most the blocks that it touches. `read` raises StorageLost if
    the ids cannot be read.
    """

    def __init__(self, files: TokenFiles, storage: TokenStorage) -> None:
        self.files = files
        self._storage = storage
        self._document_starts = files.document_starts
        self.end_of_document, self.fingerprint = files.end_of_document, files.fingerprint
        self.shards: Sequence[int] = files.shards
        self.block_tokens: int | None = files.block_tokens
        self.packed_length = files.packed_length
        self.dtype = files.ids_dtype
        self.is_plain = files.packed_length is None and files.document_starts is None
        self.documents = files.documents

    def __len__(self) -> int:
        return self.files.starts[-1]

    @abstractmethod
    def read(self, start: int, stop: int) -> Ids:
        """Return tokens start..stop-1. Shapes: (stop - start,) uint16 or uint32, read-only. Raises StorageLost."""

    def document_starts(self, start: int, ids: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.bool_]:
        """Mask the tokens that start a document: the end-of-document id before it, or else its first token."""
        starts = self._document_starts
        if starts is None:
            return super().document_starts(start, ids)
        found = np.zeros(len(ids), dtype=np.bool_)
        document, stop = bisect.bisect_left(starts, start), start + len(ids)
        while document < len(starts) and (first := starts[document]) <= stop:
            offset = first - start
            if offset < 0:
                raise StorageLost(f"the document index is damaged: {first} follows {start}; copy it again")
            if offset > 0 and ids[offset - 1] == self.end_of_document:
                found[offset - 1] = True
            elif first < stop:
                found[offset] = True
            document += 1
        return found

    def shard_start(self, position: int) -> int:
        return self.files.starts[self.files.shard_of(position)]

    def close(self) -> None:
        self._storage.close()

    def _check(self, block: int) -> Callable[[bytes], None]:
        return self.files.check(block, self._storage.name(self.files.bytes_of(block)[0]))

    def _read_block(self, block: int) -> bytes:
        """Read a block from storage and verify it. Raises StorageLost."""
        return self._storage.read(*self.files.bytes_of(block), self._check(block))


class LocalTokens(StoredTokens):
    """Token ids in local files: the first read of a block verifies all of it, later ones read only what they need."""

    def __init__(self, files: TokenFiles, storage: TokenStorage) -> None:
        super().__init__(files, storage)
        self._is_verified = bytearray(files.first_blocks[-1])
        self._offsets = [(file.path, file.offset) for file in files.files]
        self._stored_dtype, self._block_tokens = files.dtype, files.block_tokens

    def read(self, start: int, stop: int) -> Ids:
        assert 0 <= start <= stop <= len(self), (start, stop, len(self))
        shard = self.files.shard_of(start)
        if start < stop <= self.files.starts[shard + 1]:  # fast path
            begin = self.files.starts[shard]
            return self._read_file(shard, start - begin, stop - begin)
        parts = [self._read_file(*part) for part in self.files.in_files(start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def read_into(self, start: int, stop: int, out: Ids) -> None:
        shard = self.files.shard_of(start)
        begin = self.files.starts[shard]
        if out.dtype == self._stored_dtype and start < stop <= self.files.starts[shard + 1]:
            path, offset = self._verified(shard, start - begin, stop - begin)
            if self._storage.read_into(path, offset, out):
                return
        super().read_into(start, stop, out)

    def _read_file(self, shard: int, start: int, stop: int) -> Ids:
        path, offset = self._verified(shard, start, stop)
        size = (stop - start) * self._stored_dtype.itemsize
        return self.files.ids_of(self._storage.read(path, offset, offset + size))

    def _verified(self, shard: int, start: int, stop: int) -> tuple[str, int]:
        """Verify all blocks of tokens start..stop-1 of a file; return its path and the byte offset of `start`."""
        block = self.files.first_blocks[shard]
        first, end = block + start // self._block_tokens, block - (-stop // self._block_tokens)
        if self._is_verified.find(False, first, end) >= 0:
            for number in range(first, end):
                if not self._is_verified[number]:
                    self._read_block(number)
                    self._is_verified[number] = True
        path, offset = self._offsets[shard]
        return path, offset + start * self._stored_dtype.itemsize
