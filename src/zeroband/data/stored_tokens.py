"""Stored token ids as a token store: a prepared set, or files written by another trainer.

Maps positions to blocks and files, and reads local files; `fetching` reads remote ones.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from zeroband.data.retries import Damaged
from zeroband.data.shard_set import blocks_of
from zeroband.data.token_storage import TokenStorage
from zeroband.data.token_store import TokenStore
from zeroband.errors import StorageLost

_PAGE = 1024
"""Integers per page (8 KiB); the last steps of a binary search stay within one page."""
_PAGES = 512

Ids = npt.NDArray[np.unsignedinteger]


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
    packed_length: int | None = None
    hashes: Integers | None = None
    """Hash of each block, if the format has them."""
    document_starts: DocumentStarts | None = None
    """Document index, for formats without end-of-document ids."""

    @cached_property
    def _unsigned(self) -> np.dtype[np.unsignedinteger]:
        return np.dtype(self.dtype.str.replace("i", "u"))

    @cached_property
    def ids_dtype(self) -> np.dtype[np.unsignedinteger]:
        """Type of the ids as they are read."""
        is_wider = self.dtype.itemsize == 8 and self.vocab_size <= 1 << 32
        return np.dtype("<u4") if is_wider else self._unsigned

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

    def in_blocks(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Split a span by block. Returns (block, start, stop), relative to the block; one empty part of no span."""
        parts: list[tuple[int, int, int]] = []
        while start < stop or not parts:
            block, offset = self.block_of(min(start, self.starts[-1] - 1))
            end = min(offset + stop - start, self.location_of(block)[2])
            parts.append((block, offset, end))
            start += end - offset
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
        """Return the path and byte range [start, stop) of a block."""
        shard, first, tokens = self.location_of(block)
        file, size = self.files[shard], self.dtype.itemsize
        begin = file.offset + first * size
        return file.path, begin, begin + tokens * size

    def last_uses(self, spans: Sequence[tuple[int, int]]) -> dict[int, int]:
        """Return the blocks of spans of positions in the order of their first use, each with its last use.

        A last use is the position in this order that reading has reached when the block is used for the last time.
        """
        edges = np.asarray(spans, dtype=np.int64).reshape(-1, 2)
        firsts, lasts = self._blocks_at(edges[:, 0]), self._blocks_at(edges[:, 1] - 1)
        found = dict[int, int]()
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            for block in range(first, last + 1):
                found.setdefault(block, 0)
                found[block] = len(found) - 1
        return found

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

    Reads within one shard are cheapest; each costs at most the blocks that it touches. `read` returns the tokens start
    to stop - 1, shapes (stop - start,) uint16 or uint32, read-only; it raises StorageLost if they cannot be read.
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

    def forget(self) -> None:
        """Discard cached copies."""

    def close(self) -> None:
        self._storage.close()

    def _read_block(self, block: int) -> bytes:
        """Read a block from storage and verify it. Raises StorageLost."""
        path, start, stop = self.files.bytes_of(block)
        return self._storage.read(path, start, stop, self.files.check(block, self._storage.name(path)))


class LocalTokens(StoredTokens):
    """Token ids in local files: the first read of a block verifies all of it, later ones read only what they need."""

    def __init__(self, files: TokenFiles, storage: TokenStorage) -> None:
        super().__init__(files, storage)
        self._is_verified = bytearray(files.first_blocks[-1])

    def read(self, start: int, stop: int) -> Ids:
        assert 0 <= start <= stop <= len(self), (start, stop, len(self))
        files, shard = self.files, self.files.shard_of(min(start, len(self) - 1))
        first_of_file, end_of_file = files.starts[shard], files.starts[shard + 1]
        if stop > end_of_file:
            return np.concatenate([self.read(start, end_of_file), self.read(end_of_file, stop)])
        begin, end = start - first_of_file, stop - first_of_file
        first_block = files.first_blocks[shard]
        blocks = first_block + begin // files.block_tokens, first_block + blocks_of(end, files.block_tokens)
        while (block := self._is_verified.find(0, *blocks)) >= 0:
            self._read_block(block)
            self._is_verified[block] = True
        file, size = files.files[shard], files.dtype.itemsize
        return files.ids_of(self._storage.read(file.path, file.offset + begin * size, file.offset + end * size))


class Integers:
    """A sequence of 8-byte integers: the values first..first+count-1 of a store, with an LRU cache of pages.

    Block hashes and document indices may be gigabytes, so they are not loaded into memory. They are read rather than
    mapped: with a mapping, a failing disk or mount would kill the process with SIGBUS.
    """

    def __init__(self, store: StoredTokens, first: int, count: int) -> None:
        self._count = count

        def read_page(number: int) -> Ids:
            return store.read(first + number * _PAGE, first + min((number + 1) * _PAGE, count))

        self._page = functools.lru_cache(_PAGES)(read_page)  # a closure: a cached method would create a cycle with self

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        number, within = divmod(index, _PAGE)
        return int(self._page(number)[within])
