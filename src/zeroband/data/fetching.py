"""Blocks of ids: from files of this machine as they are read, from elsewhere by threads that fetch ahead of reading.

Owns the threads that fetch. The cache on disk is shared with the other ranks; what is fetched ahead is dealt out among
them, and what is read and not there yet is fetched at once by whoever reads it.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from zeroband.data.block_cache import BlockCache, Claim
from zeroband.data.retries import Damaged
from zeroband.data.shard_set import blocks_of
from zeroband.data.token_files import TokenFiles, id_without_room
from zeroband.data.token_storage import TokenStorage
from zeroband.errors import StorageLost
from zeroband.observe.log import get_logger

Ids = npt.NDArray[np.unsignedinteger]

_AT_ONCE = 32
"""Requests under way of a node: at 128 KiB each they fill 10 Gbit/s at 3 ms, or 300 Mbit/s at 100 ms."""
_LEAST_AT_ONCE = 4
_KEPT = 0.8
"""Share of the cache for blocks that are read again, and then for those that are not read yet."""
_MEMORY_BYTES = 64 << 20
"""Blocks that were read last."""
_POLL_S = 0.02
_CLOSE_S = 2.0
_WINDOW_S = 60.0
_WINDOW_READS = 20
_SLOW_SHARE = 0.05

_log = get_logger(__name__)


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

    def blocks_of_file(self, shard: int) -> range:
        """The blocks of a file."""
        return range(self._first_blocks[shard], self._first_blocks[shard + 1])

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
            elif wrong := id_without_room(np.frombuffer(content, self.files.dtype), self.files.vocab_size):
                raise StorageLost(
                    f"{name} holds the id {wrong[0]}, and there is room for {self.files.vocab_size} ids; name the "
                    "tokenizer that made it in data.tokenizer, or another data.source.dtype"
                )

        return look

    def ids_of(self, content: bytes) -> Ids:
        """Bytes of a file as ids, not writable."""
        ids = np.frombuffer(content, self._read_as)
        return ids.astype(self.dtype, copy=False)

    def _blocks_of(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        shards = np.searchsorted(self.starts, positions, "right") - 1
        within = (positions - np.asarray(self.starts)[shards]) // self.files.block_tokens
        return np.asarray(self._first_blocks)[shards] + within


class Blocks(Protocol):
    """Where the ids of a set are read."""

    waited_s: float
    fetched_bytes: int

    def read(self, start: int, stop: int) -> Ids:
        """Ids start..stop-1 of the set. Shapes: (stop - start,), not writable. Raises StorageLost."""
        ...

    def read_into(self, start: int, stop: int, out: Ids) -> bool:
        """Write the ids where they are wanted if that is faster than to read them; whether it was done."""
        return False

    def expect(self, order: BlockOrder) -> None:
        """Take note of which blocks are read next, in this order."""
        ...

    def close(self) -> None:
        """End what runs in the background."""
        ...


class LocalBlocks(Blocks):
    """Blocks of files of this machine: each is read whole and verified once, then as far as it is needed."""

    def __init__(self, layout: BlockMap, storage: TokenStorage) -> None:
        self._layout, self._storage = layout, storage
        self._dtype = layout.files.dtype
        self._block_tokens, self._size = layout.files.block_tokens, layout.files.dtype.itemsize
        self._files = [(f.path, f.offset, layout.blocks_of_file(n).start) for n, f in enumerate(layout.files.files)]
        """Path, first byte of the ids and first block of each file."""
        self._is_verified = bytearray(layout.n_blocks)
        self.waited_s, self.fetched_bytes = 0.0, 0

    def read(self, start: int, stop: int) -> Ids:
        shard = self._layout.shard_of(start)
        if start < stop <= self._layout.starts[shard + 1]:
            begin = self._layout.starts[shard]
            return self._read_file(shard, start - begin, stop - begin)
        parts = [self._read_file(*part) for part in self._layout.in_files(start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read_file(self, shard: int, start: int, stop: int) -> Ids:
        """Ids start..stop-1 of one file."""
        path, offset, block = self._files[shard]
        first, behind = block + start // self._block_tokens, block - (-stop // self._block_tokens)
        if self._is_verified.find(False, first, behind) >= 0:
            self._verify(range(first, behind))
        size = self._size
        return self._layout.ids_of(self._storage.read(path, offset + start * size, offset + stop * size))

    def read_into(self, start: int, stop: int, out: Ids) -> bool:
        shard = self._layout.shard_of(start)
        begin = self._layout.starts[shard]
        if out.dtype != self._dtype or not start < stop <= self._layout.starts[shard + 1]:
            return False
        path, offset, block = self._files[shard]
        first, behind = block + (start - begin) // self._block_tokens, block - (begin - stop) // self._block_tokens
        if self._is_verified.find(False, first, behind) >= 0:
            self._verify(range(first, behind))
        return self._storage.read_into(path, offset + (start - begin) * self._size, out)

    def _verify(self, blocks: range) -> None:
        for block in blocks:
            if not self._is_verified[block]:
                path, begin, end = self._layout.bytes_of(block)
                self._storage.read(path, begin, end, self._layout.check(block, path))
                self._is_verified[block] = True

    def expect(self, order: BlockOrder) -> None:
        """The system reads ahead by itself."""

    def close(self) -> None:
        self._storage.close()


class RemoteBlocks(Blocks):
    """Blocks that are fetched into a cache. `room_bytes`: of the cache."""

    def __init__(
        self,
        layout: BlockMap,
        storage: TokenStorage,
        cache: BlockCache,
        room_bytes: float,
        *,
        local_rank: int,
        local_world_size: int,
    ) -> None:
        self._layout, self._storage, self._cache = layout, storage, cache
        self._local_rank, self._local_world_size = local_rank, local_world_size
        block_bytes = layout.files.block_tokens * layout.files.dtype.itemsize
        self._most_kept = max(2 * _LEAST_AT_ONCE, int(_KEPT * room_bytes) // block_bytes)
        self._is_said_small = False
        self._most_in_memory = max(_LEAST_AT_ONCE, _MEMORY_BYTES // block_bytes)
        self._memory: OrderedDict[int, Ids] = OrderedDict()
        self._threads: list[threading.Thread] = []
        self._stops = False
        self.waited_s, self.fetched_bytes = 0.0, 0
        self._supply = SupplyLog(local_world_size)
        self._changed = threading.Condition()
        """Guards all below."""
        self._order = NOTHING_EXPECTED
        self._in_use = NOTHING_EXPECTED.in_use()
        self._turn_of = dict[int, int]()
        """Where a block stands in the order."""
        self._next = self._reached = 0
        """Turns of the next block to fetch ahead, and of the furthest one that was read."""
        self._urgent = deque[int]()
        self._under_way = set[int]()
        self._wanted = dict[int, int]()
        """Readers that wait for a block."""
        self._came = dict[int, bytes | Exception | None]()
        """What they get; None: it is in the cache."""
        self._failed = dict[int, Exception]()
        """Why a block cannot be had, found while it was fetched ahead; raised when it is read."""

    def read(self, start: int, stop: int) -> Ids:
        parts: list[Ids] = []
        while start < stop or not parts:
            block, place = self._layout.block_of(min(start, self._layout.starts[-1] - 1))
            end = min(place + stop - start, self._layout.place_of(block)[2])
            parts.append(self._block(block)[place:end])
            start += end - place
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _block(self, block: int) -> Ids:
        with self._changed:
            ids = self._memory.get(block)
            if ids is not None:
                self._memory.move_to_end(block)
            turn = self._turn_of.get(block, -1)
            if turn > self._reached:
                self._reached = turn
                self._changed.notify_all()
        if ids is None:
            ids = self._layout.ids_of(self._content(block))
            with self._changed:
                self._memory[block] = ids
                while len(self._memory) > self._most_in_memory:
                    self._memory.popitem(last=False)
        return ids

    def expect(self, order: BlockOrder) -> None:
        in_use = order.in_use()
        if len(in_use) and (most := int(in_use.max())) > self._most_kept:
            self._say_small(most)
        with self._changed:
            self._order, self._in_use = order, in_use
            self._turn_of = {block: turn for turn, block in enumerate(order.blocks.tolist())}
            self._next = self._reached = 0
            self._start_threads()
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._stops = True
            self._changed.notify_all()
        self._storage.close()
        end_s = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        self._cache.close()

    # -- reading ---------------------------------------------------------------------------------------------------

    def _content(self, block: int) -> bytes:
        """The bytes of a block, verified; from the cache, or as soon as they come."""
        from_s = time.monotonic()
        path, _, _ = self._layout.bytes_of(block)
        check = self._layout.check(block, self._storage.name(path))
        content = self._cached(block, check)
        is_waiting = content is None
        while content is None:
            content = self._await(block) or self._cached(block, check)
        waited_s = time.monotonic() - from_s if is_waiting else 0.0
        with self._changed:
            self.waited_s += waited_s
            self._supply.read(waited_s, len(content))
        return content

    def _cached(self, block: int, check: Callable[[bytes], None]) -> bytes | None:
        content = self._cache.read(block)
        if content is None:
            return None
        try:
            check(content)
        except Damaged:
            self._cache.drop(block)
            return None
        return content

    def _await(self, block: int) -> bytes | None:
        """Have a block fetched before all others, and wait for it; None: it is in the cache. Raises what was raised."""
        with self._changed:
            self._start_threads()
            if block in self._failed:
                raise self._failed.pop(block)
            if block not in self._under_way and block not in self._wanted:
                self._urgent.append(block)
                self._changed.notify_all()
            self._wanted[block] = self._wanted.get(block, 0) + 1
            while block not in self._came:
                if self._stops:
                    raise StorageLost("ids are read no more, as this node ends", can_pass=True)
                self._changed.wait()
            came = self._came[block]
            self._wanted[block] -= 1
            if not self._wanted[block]:
                del self._wanted[block], self._came[block]
        if isinstance(came, Exception):
            raise came
        return came

    # -- fetching --------------------------------------------------------------------------------------------------

    def _start_threads(self) -> None:
        if not self._threads:
            count = max(_LEAST_AT_ONCE, _AT_ONCE // self._local_world_size)
            self._threads = [
                threading.Thread(target=self._work, name=f"tokens-{number}", daemon=True) for number in range(count)
            ]
            for thread in self._threads:
                thread.start()

    def _work(self) -> None:
        while (block := self._take()) is not None:
            came: bytes | Exception | None
            try:
                came = self._bring(block)
                self._cache.make_room(self._needed)
            except Exception as error:  # noqa: BLE001 - raised where the block is read
                came = error
            with self._changed:
                self._under_way.discard(block)
                if block in self._wanted:
                    self._came[block] = came
                    self._changed.notify_all()
                elif isinstance(came, Exception) and not (isinstance(came, StorageLost) and came.can_pass):
                    self._failed[block] = came

    def _take(self) -> int | None:
        """The block to fetch now: one that is waited for, else the next of this rank's; None at the end."""
        with self._changed:
            while not self._stops:
                block = self._urgent.popleft() if self._urgent else self._take_ahead()
                if block is not None:
                    self._under_way.add(block)
                    return block
                self._changed.wait()
            return None

    def _take_ahead(self) -> int | None:
        while self._next < self._furthest():
            block = int(self._order.blocks[self._next])
            self._next += 1
            is_ours = block % self._local_world_size == self._local_rank
            if is_ours and block not in self._under_way and block not in self._wanted and block not in self._memory:
                return block
        return None

    def _furthest(self) -> int:
        """The turn up to which blocks may be fetched: what is read again has the room first."""
        count = len(self._order.blocks)
        in_use = int(self._in_use[self._reached]) if self._reached < count else 0
        return min(count, self._reached + 1 + max(_LEAST_AT_ONCE, self._most_kept - in_use))

    def _needed(self) -> Collection[int]:
        """Blocks that are read next or again, and must stay."""
        with self._changed:
            blocks, until = (turns[: self._furthest()] for turns in self._order)
            return blocks[until >= self._reached][-self._most_kept :].tolist()

    def _say_small(self, blocks: int) -> None:
        if not self._is_said_small:
            self._is_said_small = True
            fields = {"blocks": blocks, "room_for": self._most_kept}
            _log.warning(
                "the cache holds fewer blocks than are read in turns, so each comes again and again; raise "
                "data.cache_gb, or lower data.shuffle_blocks",
                extra={"fields": fields},
            )

    def _bring(self, block: int) -> bytes | None:
        """Fetch a block into the cache; None where it is there, or another process has fetched it."""
        while not self._stops and not self._cache.use(block):
            if not self._storage.sends_ranges:
                self._bring_file(block)
                continue
            with self._cache.claim(block) as claim:
                if claim is not None:
                    return None if self._cache.use(block) else self._fetch(block, claim)
            time.sleep(_POLL_S)
        return None

    def _fetch(self, block: int, claim: Claim) -> bytes:
        path, start, stop = self._layout.bytes_of(block)
        content = self._storage.read(path, start, stop, self._layout.check(block, self._storage.name(path)))
        claim.put(content)
        with self._changed:
            self.fetched_bytes += len(content)
        return content

    def _bring_file(self, block: int) -> None:
        """Fetch all of the file of a block, where less cannot be had; one thread of all processes does."""
        shard, _, _ = self._layout.place_of(block)
        path = self._layout.files.files[shard].path
        with self._cache.claim_file(shard) as is_ours:
            if is_ours and not self._cache.use(block):
                self._storage.retry(lambda: self._store_file(shard), path)
                if not (self._stops or self._cache.use(block)):
                    raise StorageLost(
                        f"data.cache_dir has no room for {self._storage.name(path)}, which its server sends whole; "
                        "make room there, or put the files on a server that knows byte ranges"
                    )
        if not is_ours:
            time.sleep(_POLL_S)

    def _store_file(self, shard: int) -> None:
        file, size = self._layout.files.files[shard], self._layout.files.dtype.itemsize
        blocks = iter(self._layout.blocks_of_file(shard))
        buffer, skip, block = bytearray(), file.offset, next(blocks, None)
        for piece in self._storage.whole(file.path):
            with self._changed:
                self.fetched_bytes += len(piece)
            buffer += piece
            dropped = min(skip, len(buffer))
            del buffer[:dropped]
            skip -= dropped
            while block is not None and not skip and len(buffer) >= (length := self._layout.place_of(block)[2] * size):
                self._store(block, bytes(buffer[:length]), file.path)
                del buffer[:length]
                block = next(blocks, None)
            if self._stops:
                return
        if block is not None:
            raise Damaged(f"it ends before block {block} of the set does")

    def _store(self, block: int, content: bytes, path: str) -> None:
        with self._cache.claim(block) as claim:
            if claim is not None and not self._cache.use(block):
                self._layout.check(block, self._storage.name(path))(content)
                claim.put(content)
        self._cache.make_room(self._needed)


class SupplyLog:
    """Says when ids come more slowly than they are read. `ranks`: each fetches its part of what the node reads."""

    def __init__(self, ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._ranks, self._clock = ranks, clock
        self._from_s = clock()
        self._waited_s, self._bytes, self._reads = 0.0, 0, 0

    def read(self, waited_s: float, size: int) -> None:
        """Take note of a block that was read, and how long it took to come."""
        self._waited_s += waited_s
        self._bytes += size
        self._reads += 1
        elapsed_s = self._clock() - self._from_s
        if elapsed_s < _WINDOW_S or self._reads < _WINDOW_READS:
            return
        share = self._waited_s / elapsed_s
        if share > _SLOW_SHARE:
            rate = self._ranks * self._bytes / 1e6
            fields: dict[str, Any] = {
                "waited": f"{100 * share:.0f}%",
                "came_mb_s": round(rate / elapsed_s, 3),
                "needed_mb_s": round(rate / max(elapsed_s - self._waited_s, 1e-9), 3),
            }
            _log.warning("ids come more slowly than they are needed", extra={"fields": fields})
        self._from_s = self._clock()
        self._waited_s, self._bytes, self._reads = 0.0, 0, 0
