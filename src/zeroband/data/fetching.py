"""Ids that lie elsewhere: blocks are fetched before they are read, by threads, and what is not there yet by its reader.

Owns the threads that fetch. The cache on disk is shared with the other ranks of the node, among whom the blocks that
are fetched ahead are dealt out. A block is fetched by one thread of one process at a time: who claims it in the cache.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from zeroband.data.block_cache import BlockCache
from zeroband.data.retries import Damaged
from zeroband.data.stored_tokens import NOTHING_EXPECTED, Ids, StoredTokens, TokenFiles
from zeroband.data.token_storage import TokenStorage
from zeroband.errors import StorageLost
from zeroband.observe.log import get_logger

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


class FetchedTokens(StoredTokens):
    """Ids that are fetched into a cache, block by block. `room_bytes`: of the cache. Any thread may read.

    `clock`: by which waits for blocks are measured.
    """

    is_fetched = True

    def __init__(
        self,
        files: TokenFiles,
        storage: TokenStorage,
        cache: BlockCache,
        room_bytes: float,
        *,
        local_rank: int,
        local_world_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(files, storage)
        self._cache = cache
        self._local_rank, self._local_world_size = local_rank, local_world_size
        block_bytes = files.block_tokens * files.dtype.itemsize
        self._most_kept = max(2 * _LEAST_AT_ONCE, int(_KEPT * room_bytes) // block_bytes)
        self._is_said_small = False
        self._most_in_memory = max(_LEAST_AT_ONCE, _MEMORY_BYTES // block_bytes)
        self._memory: OrderedDict[int, Ids] = OrderedDict()
        self._threads: list[threading.Thread] = []
        self._stops = False
        self._waited_s, self._fetched_bytes = 0.0, 0
        self._clock, self._supply = clock, SupplyLog(local_world_size, clock)
        self._changed = threading.Condition()
        """Guards all that changes; notified when a block has come, or the order is another one."""
        self._order = NOTHING_EXPECTED
        self._in_use = NOTHING_EXPECTED.in_use()
        self._turn_of = dict[int, int]()
        """Where a block stands in the order."""
        self._next = self._reached = 0
        """Turns of the next block to fetch ahead, and of the furthest one that was read."""

    @property
    def waited_s(self) -> float:
        return self._waited_s

    @property
    def fetched_bytes(self) -> int:
        return self._fetched_bytes

    def read(self, start: int, stop: int) -> Ids:
        assert 0 <= start <= stop <= len(self), (start, stop, len(self))
        parts: list[Ids] = []
        while start < stop or not parts:
            block, place = self.files.block_of(min(start, len(self) - 1))
            end = min(place + stop - start, self.files.place_of(block)[2])
            parts.append(self._block(block)[place:end])
            start += end - place
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def expect(self, spans: Sequence[tuple[int, int]]) -> None:
        order = self.files.in_order(spans)
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
        super().close()
        end_s = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        self._cache.close()

    # -- reading ---------------------------------------------------------------------------------------------------

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
            ids = self.files.ids_of(self._content(block))
            with self._changed:
                self._memory[block] = ids
                while len(self._memory) > self._most_in_memory:
                    self._memory.popitem(last=False)
        return ids

    def _content(self, block: int) -> bytes:
        """The bytes of a block, verified: from the cache, or fetched now, or when who fetches it already has it."""
        from_s, waited_s = self._clock(), 0.0
        content = self._cached(block)
        while content is None:
            if self._stops:
                raise StorageLost("ids are read no more, as this node ends", can_pass=True)
            content = self._fetch(block) or self._cached(block)
            if content is None:
                with self._changed:
                    self._changed.wait(_POLL_S)
            waited_s = self._clock() - from_s
        with self._changed:
            self._waited_s += waited_s
            self._supply.read(waited_s, len(content))
        return content

    def _cached(self, block: int) -> bytes | None:
        content = self._cache.read(block)
        if content is None:
            return None
        try:
            self._check(block)(content)
        except Damaged:
            self._cache.drop(block)
            return None
        return content

    # -- fetching --------------------------------------------------------------------------------------------------

    def _fetch(self, block: int) -> bytes | None:
        """Fetch a block into the cache; None where it is there, or another thread or process brings it."""
        with self._cache.claim(block) as put:
            if put is None or self._cache.use(block):
                return None
            content = self._read_block(block)
            put(content)
        self._cache.allocate(self._needed)
        with self._changed:
            self._fetched_bytes += len(content)
            self._changed.notify_all()
        return content

    # -- ahead of reading ------------------------------------------------------------------------------------------

    def _start_threads(self) -> None:
        if not self._threads:
            count = max(_LEAST_AT_ONCE, _AT_ONCE // self._local_world_size)
            self._threads = [
                threading.Thread(target=self._fetch_ahead, name=f"tokens-{number}", daemon=True)
                for number in range(count)
            ]
            for thread in self._threads:
                thread.start()

    def _fetch_ahead(self) -> None:
        """Fetch what is read next, block after block, until the store is closed."""
        while (block := self._take()) is not None:
            with contextlib.suppress(Exception):  # who reads the block fetches it again, and is told what is wrong
                if not self._cache.use(block):
                    self._fetch(block)

    def _take(self) -> int | None:
        """The next block that this rank fetches ahead, when its time has come; None at the end."""
        with self._changed:
            while not self._stops:
                while self._next < self._furthest():
                    block = int(self._order.blocks[self._next])
                    self._next += 1
                    if block % self._local_world_size == self._local_rank and block not in self._memory:
                        return block
                self._changed.wait()
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
