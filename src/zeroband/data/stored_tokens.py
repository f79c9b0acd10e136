"""Token ids that were made before, as a token store: a prepared set, or files of another trainer.

Knows which block and file an id lies in, and reads files of this machine; `fetching` reads those that lie elsewhere.
"""

from __future__ import annotations

import bisect
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from zeroband.data.retries import Damaged
from zeroband.data.shard_set import blocks_of
from zeroband.data.token_files import TokenFiles, room_problem
from zeroband.data.token_storage import TokenStorage
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


class BlockMap:
    """Which block an id lies in, and which bytes of which file a block is."""

    def __init__(self, files: TokenFiles) -> None:
        self.files = files
        self._read_as: np.dtype[np.unsignedinteger] = np.dtype(files.dtype.str.replace("i", "u"))
        self.dtype: np.dtype[np.unsignedinteger] = self._read_as if self._read_as.itemsize < 8 else np.dtype("<u4")
        """Type of ids as they are read."""
        self.shards = [file.tokens for file in files.files]
        self.starts: list[int] = [0, *np.cumsum(self.shards, dtype=np.int64).tolist()]
        self._first_blocks: list[int] = [
            0,
            *np.cumsum([blocks_of(tokens, files.block_tokens) for tokens in self.shards], dtype=np.int64).tolist(),
        ]

    @property
    def n_blocks(self) -> int:
        return self._first_blocks[-1]

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
        within, place = divmod(position - self.starts[shard], self.files.block_tokens)
        return self._first_blocks[shard] + within, place

    def place_of(self, block: int) -> tuple[int, int, int]:
        """A block's file, the first of its ids in there, and their number."""
        shard = bisect.bisect_right(self._first_blocks, block) - 1
        start = (block - self._first_blocks[shard]) * self.files.block_tokens
        return shard, start, min(self.files.block_tokens, self.shards[shard] - start)

    def first_block_of(self, shard: int) -> int:
        """The first block of a file."""
        return self._first_blocks[shard]

    def bytes_of(self, block: int) -> tuple[str, int, int]:
        """A block's file, and its first byte and the one behind its last there."""
        shard, start, tokens = self.place_of(block)
        file, size = self.files.files[shard], self.files.dtype.itemsize
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
        expected = None if self.files.hashes is None else self.files.hashes[block]

        def look(content: bytes) -> None:
            if expected is not None:
                if xxhash.xxh3_64_intdigest(content) != expected:
                    raise Damaged(f"block {block} of the set has another hash than hashes.npy says")
            elif problem := room_problem(np.frombuffer(content, self.files.dtype), self.files.vocab_size, name):
                raise StorageLost(problem)

        return look

    def ids_of(self, content: bytes) -> Ids:
        """Bytes of a file as ids, not writable."""
        ids = np.frombuffer(content, self._read_as)
        return ids.astype(self.dtype, copy=False)

    def _blocks_of(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        shards = np.searchsorted(self.starts, positions, "right") - 1
        within = (positions - np.asarray(self.starts)[shards]) // self.files.block_tokens
        return np.asarray(self._first_blocks)[shards] + within


class StoredTokens(TokenStore):
    """The ids of a set of files, in one numbering.

    A span is best read within one shard; all of it costs no more than the blocks that it touches. `read` raises
    StorageLost where the ids cannot be had.
    """

    def __init__(self, files: TokenFiles, storage: TokenStorage) -> None:
        self.layout = layout = BlockMap(files)
        self._storage = storage
        self._borders = files.borders
        self.end_of_document, self.fingerprint = files.end_of_document, files.fingerprint
        self.shards: Sequence[int] = layout.shards
        self.block_tokens: int | None = files.block_tokens
        self.packed_length = files.packed_length
        self.dtype = layout.dtype
        self.is_plain = files.packed_length is None and files.borders is None
        self.documents = files.documents

    def __len__(self) -> int:
        return self.layout.starts[-1]

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
        return self.layout.starts[self.layout.shard_of(position)]

    def close(self) -> None:
        self._storage.close()

    def _check(self, block: int) -> Callable[[bytes], None]:
        return self.layout.check(block, self._storage.name(self.layout.bytes_of(block)[0]))

    def _read_block(self, block: int) -> bytes:
        """The bytes of a block where they lie, verified. Raises StorageLost."""
        return self._storage.read(*self.layout.bytes_of(block), self._check(block))


class LocalTokens(StoredTokens):
    """Ids in files of this machine: each block is read whole and verified once, then as far as it is needed."""

    def __init__(self, files: TokenFiles, storage: TokenStorage) -> None:
        super().__init__(files, storage)
        self._is_verified = bytearray(self.layout.n_blocks)
        self._first_bytes = [(file.path, file.offset) for file in files.files]
        self._stored_dtype, self._block_tokens = files.dtype, files.block_tokens

    def read(self, start: int, stop: int) -> Ids:
        assert 0 <= start <= stop <= len(self), (start, stop, len(self))
        shard = self.layout.shard_of(start)
        if start < stop <= self.layout.starts[shard + 1]:  # as nearly always
            begin = self.layout.starts[shard]
            return self._read_file(shard, start - begin, stop - begin)
        parts = [self._read_file(*part) for part in self.layout.in_files(start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def read_into(self, start: int, stop: int, out: Ids) -> None:
        shard = self.layout.shard_of(start)
        begin = self.layout.starts[shard]
        if out.dtype == self._stored_dtype and start < stop <= self.layout.starts[shard + 1]:
            path, first_byte = self._verified(shard, start - begin, stop - begin)
            if self._storage.read_into(path, first_byte, out):
                return
        super().read_into(start, stop, out)

    def _read_file(self, shard: int, start: int, stop: int) -> Ids:
        """Ids start..stop-1 of one file."""
        path, first_byte = self._verified(shard, start, stop)
        size = (stop - start) * self._stored_dtype.itemsize
        return self.layout.ids_of(self._storage.read(path, first_byte, first_byte + size))

    def _verified(self, shard: int, start: int, stop: int) -> tuple[str, int]:
        """Path and first byte of the ids start..stop-1 of a file, when all their blocks have been verified."""
        block = self.layout.first_block_of(shard)
        first, behind = block + start // self._block_tokens, block - (-stop // self._block_tokens)
        if self._is_verified.find(False, first, behind) >= 0:
            for number in range(first, behind):
                if not self._is_verified[number]:
                    self._read_block(number)
                    self._is_verified[number] = True
        path, offset = self._first_bytes[shard]
        return path, offset + start * self._stored_dtype.itemsize
