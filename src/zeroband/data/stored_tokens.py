"""Token ids that were made before, as a token store: a prepared set, or files of another trainer.

Knows which block and file an id lies in, and reads files of this machine; `fetching` reads those that lie elsewhere.
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
from zeroband.data.token_storage import StoredNumbers, TokenStorage
from zeroband.data.token_store import TokenStore
from zeroband.errors import StorageLost

Ids = npt.NDArray[np.unsignedinteger]


class BlockOrder(NamedTuple):
    """Blocks in the order in which they are needed first: their turns. Shapes: both (n,) int64."""

    blocks: npt.NDArray[np.int64]
    until: npt.NDArray[np.int64]
    """The turn of the block that was new last when each of them is needed for the last time."""

    def in_use(self) -> npt.NDArray[np.int64]:
        """How many are needed, or will be again, when it is the turn of each. Shapes: (n,) int64."""
        done = np.cumsum(np.bincount(self.until, minlength=len(self.blocks)))
        return np.arange(1, len(self.blocks) + 1) - np.concatenate([[0], done[:-1]])


NOTHING_EXPECTED = BlockOrder(np.empty(0, np.int64), np.empty(0, np.int64))


@dataclass(frozen=True)
class TokenFile:
    """Ids of one type, one after the other."""

    path: str
    offset: int
    """First byte of the ids."""
    tokens: int


class Borders:
    """First ids of the documents of several files, by which they ascend, in the numbering of the set."""

    def __init__(self, parts: Sequence[Any], starts: Sequence[int]) -> None:
        self._parts, self._starts = parts, starts
        self._counts = np.cumsum([0, *map(len, parts)]).tolist()

    def __len__(self) -> int:
        return self._counts[-1]

    def __getitem__(self, document: int) -> int:
        part = bisect.bisect_right(self._counts, document) - 1
        return self._starts[part] + self._parts[part][document - self._counts[part]]


@dataclass(frozen=True)
class TokenFiles:
    """What a set consists of, and which block and bytes of which file an id is in."""

    files: tuple[TokenFile, ...]
    dtype: np.dtype[np.integer[Any]]
    """As the ids lie there; none is negative."""
    block_tokens: int
    end_of_document: int
    fingerprint: str
    vocab_size: int
    """Every id is below it."""
    documents: int | None = None
    """How many there are, where the format says it."""
    tokenizer: str | None = None
    tokenizer_fingerprint: str | None = None
    tokenizer_release: str | None = None
    packed_length: int | None = None
    hashes: StoredNumbers | None = None
    """A hash for each block, where the format has them."""
    borders: Borders | None = None
    """Where documents begin, if the ids do not tell."""

    @cached_property
    def _unsigned(self) -> np.dtype[np.unsignedinteger]:
        return np.dtype(self.dtype.str.replace("i", "u"))

    @cached_property
    def ids_dtype(self) -> np.dtype[np.unsignedinteger]:
        """Type of ids as they are read."""
        return np.dtype("<u4") if self.dtype.itemsize == 8 else self._unsigned

    @cached_property
    def shards(self) -> list[int]:
        """How many ids each file holds."""
        return [file.tokens for file in self.files]

    @cached_property
    def starts(self) -> list[int]:
        """First id of each file, and how many there are in all."""
        return [0, *np.cumsum(self.shards, dtype=np.int64).tolist()]

    @cached_property
    def first_blocks(self) -> list[int]:
        """First block of each file, and how many there are in all."""
        counts = [blocks_of(tokens, self.block_tokens) for tokens in self.shards]
        return [0, *np.cumsum(counts, dtype=np.int64).tolist()]

    def shard_of(self, position: int) -> int:
        """The file that an id lies in."""
        return bisect.bisect_right(self.starts, position) - 1

    def in_files(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """The parts of a span in their files: the file, and the first id and the one behind the last in it."""
        parts: list[tuple[int, int, int]] = []
        while start < stop or not parts:
            shard = min(self.shard_of(start), len(self.shards) - 1)
            begin, end = self.starts[shard], min(stop, self.starts[shard + 1])
            parts.append((shard, start - begin, end - begin))
            start = end
        return parts

    def block_of(self, position: int) -> tuple[int, int]:
        """The block of an id, and its place in it."""
        shard = self.shard_of(position)
        within, place = divmod(position - self.starts[shard], self.block_tokens)
        return self.first_blocks[shard] + within, place

    def place_of(self, block: int) -> tuple[int, int, int]:
        """A block's file, the first of its ids in there, and their number."""
        shard = bisect.bisect_right(self.first_blocks, block) - 1
        start = (block - self.first_blocks[shard]) * self.block_tokens
        return shard, start, min(self.block_tokens, self.shards[shard] - start)

    def bytes_of(self, block: int) -> tuple[str, int, int]:
        """A block's file, and its first byte and the one behind its last there."""
        shard, start, tokens = self.place_of(block)
        file, size = self.files[shard], self.dtype.itemsize
        return file.path, file.offset + start * size, file.offset + (start + tokens) * size

    def in_order(self, spans: Sequence[tuple[int, int]]) -> BlockOrder:
        """The blocks of spans of ids, each once, in the order in which they are needed first."""
        if not len(spans):
            return NOTHING_EXPECTED
        edges = np.asarray(spans, dtype=np.int64)
        first, last = (self._blocks_of(edges[:, 0]), self._blocks_of(edges[:, 1] - 1))
        counts = last - first + 1
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        needed = np.repeat(first, counts) + within
        blocks, at = np.unique(needed, return_index=True)
        _, from_end = np.unique(needed[::-1], return_index=True)
        is_new = np.zeros(len(needed), dtype=np.int64)
        is_new[at] = 1
        turns = np.cumsum(is_new) - 1
        in_turn = np.argsort(at)
        return BlockOrder(blocks[in_turn], turns[len(needed) - 1 - from_end][in_turn])

    def check(self, block: int, name: str) -> Callable[[bytes], None]:
        """What to verify a block's bytes with. It raises Damaged, or StorageLost for ids without room in the model."""
        expected = None if self.hashes is None else self.hashes[block]

        def look(content: bytes) -> None:
            if expected is not None:
                if xxhash.xxh3_64_intdigest(content) != expected:
                    raise Damaged(f"block {block} of the set has another hash than hashes.npy says")
            elif problem := room_problem(np.frombuffer(content, self.dtype), self.vocab_size, name):
                raise StorageLost(problem)

        return look

    def ids_of(self, content: bytes) -> Ids:
        """Bytes of a file as ids, not writable."""
        ids = np.frombuffer(content, self._unsigned)
        return ids.astype(self.ids_dtype, copy=False)

    def _blocks_of(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        shards = np.searchsorted(self.starts, positions, "right") - 1
        within = (positions - np.asarray(self.starts)[shards]) // self.block_tokens
        return np.asarray(self.first_blocks)[shards] + within


def room_problem(ids: npt.NDArray[np.integer[Any]], vocab_size: int, name: str) -> str | None:
    """What is wrong with ids of a file of which one is negative or too large; None: nothing. Shapes: (n,), n > 0."""
    low, high = int(ids.min()), int(ids.max())
    if low >= 0 and high < vocab_size:
        return None
    return (
        f"{name} holds the id {low if low < 0 else high}, and there is room for {vocab_size} ids; name the tokenizer "
        "that made it in data.tokenizer, or another data.source.dtype"
    )


class StoredTokens(TokenStore):
    """The ids of a set of files, in one numbering.

    A span is best read within one shard; all of it costs no more than the blocks that it touches. `read` raises
    StorageLost where the ids cannot be had.
    """

    def __init__(self, files: TokenFiles, storage: TokenStorage) -> None:
        self.files = files
        self._storage = storage
        self._borders = files.borders
        self.end_of_document, self.fingerprint = files.end_of_document, files.fingerprint
        self.shards: Sequence[int] = files.shards
        self.block_tokens: int | None = files.block_tokens
        self.packed_length = files.packed_length
        self.dtype = files.ids_dtype
        self.is_plain = files.packed_length is None and files.borders is None
        self.documents = files.documents

    def __len__(self) -> int:
        return self.files.starts[-1]

    @abstractmethod
    def read(self, start: int, stop: int) -> Ids:
        """Tokens start..stop-1. Shapes: (stop - start,) uint16 or uint32, not writable. Raises StorageLost."""

    def begins(self, start: int, ids: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.bool_]:
        """Whether each of these tokens begins a document: the end of the one before, or else its first token."""
        borders = self._borders
        if borders is None:
            return super().begins(start, ids)
        found = np.zeros(len(ids), dtype=np.bool_)
        document, stop = bisect.bisect_left(borders, start), start + len(ids)
        while document < len(borders) and (first := borders[document]) <= stop:
            place = first - start
            if place < 0:
                raise StorageLost(f"the index of documents is damaged: {first} stands behind {start}; copy it anew")
            if place > 0 and ids[place - 1] == self.end_of_document:
                found[place - 1] = True
            elif first < stop:
                found[place] = True
            document += 1
        return found

    def shard_start(self, position: int) -> int:
        return self.files.starts[self.files.shard_of(position)]

    def close(self) -> None:
        self._storage.close()

    def _check(self, block: int) -> Callable[[bytes], None]:
        return self.files.check(block, self._storage.name(self.files.bytes_of(block)[0]))

    def _read_block(self, block: int) -> bytes:
        """The bytes of a block where they lie, verified. Raises StorageLost."""
        return self._storage.read(*self.files.bytes_of(block), self._check(block))


class LocalTokens(StoredTokens):
    """Ids in files of this machine: each block is read whole and verified once, then as far as it is needed."""

    def __init__(self, files: TokenFiles, storage: TokenStorage) -> None:
        super().__init__(files, storage)
        self._is_verified = bytearray(files.first_blocks[-1])
        self._first_bytes = [(file.path, file.offset) for file in files.files]
        self._stored_dtype, self._block_tokens = files.dtype, files.block_tokens

    def read(self, start: int, stop: int) -> Ids:
        assert 0 <= start <= stop <= len(self), (start, stop, len(self))
        shard = self.files.shard_of(start)
        if start < stop <= self.files.starts[shard + 1]:  # as nearly always
            begin = self.files.starts[shard]
            return self._read_file(shard, start - begin, stop - begin)
        parts = [self._read_file(*part) for part in self.files.in_files(start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def read_into(self, start: int, stop: int, out: Ids) -> None:
        shard = self.files.shard_of(start)
        begin = self.files.starts[shard]
        if out.dtype == self._stored_dtype and start < stop <= self.files.starts[shard + 1]:
            path, first_byte = self._verified(shard, start - begin, stop - begin)
            if self._storage.read_into(path, first_byte, out):
                return
        super().read_into(start, stop, out)

    def _read_file(self, shard: int, start: int, stop: int) -> Ids:
        """Ids start..stop-1 of one file."""
        path, first_byte = self._verified(shard, start, stop)
        size = (stop - start) * self._stored_dtype.itemsize
        return self.files.ids_of(self._storage.read(path, first_byte, first_byte + size))

    def _verified(self, shard: int, start: int, stop: int) -> tuple[str, int]:
        """Path and first byte of the ids start..stop-1 of a file, when all their blocks have been verified."""
        block = self.files.first_blocks[shard]
        first, behind = block + start // self._block_tokens, block - (-stop // self._block_tokens)
        if self._is_verified.find(False, first, behind) >= 0:
            for number in range(first, behind):
                if not self._is_verified[number]:
                    self._read_block(number)
                    self._is_verified[number] = True
        path, offset = self._first_bytes[shard]
        return path, offset + start * self._stored_dtype.itemsize
