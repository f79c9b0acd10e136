"""Token ids in remote storage: fetched block by block, ahead of use by prefetch threads or on demand by the reader.

The on-disk cache is shared by the ranks of a node, which divide the prefetching among them. A block is fetched by one
thread at a time: the one that claims it in the cache.
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
from zeroband.data.stored_tokens import Ids, StoredTokens, TokenFiles
from zeroband.data.token_storage import TokenStorage
from zeroband.errors import StorageLost
from zeroband.observe.log import get_logger

_REQUESTS = 32
"""Concurrent requests of a node: at 128 KiB each they fill 10 Gbit/s at 3 ms latency, or 300 Mbit/s at 100 ms."""
_MIN_REQUESTS = 4
_USABLE_CACHE = 0.8
"""Fraction of the cache for blocks that are still needed and prefetched ones."""
_MEMORY_BYTES = 64 << 20
"""In-memory LRU of recently read blocks."""
_POLL_S = 0.02
_CLOSE_S = 2.0
_WINDOW_S = 60.0
_WINDOW_READS = 20
_SLOW_SHARE = 0.05

_log = get_logger(__name__)


class FetchedTokens(StoredTokens):
    """Token ids that are fetched into a cache. Any thread may read.

    `memory_bytes`: of recently read blocks; a few are held in any case. `clock`: measures the waits for blocks.
    """

    is_remote = True

    def __init__(
        self,
        files: TokenFiles,
        storage: TokenStorage,
        cache: BlockCache,
        *,
        local_rank: int,
        local_world_size: int,
        memory_bytes: int = _MEMORY_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(files, storage)
        self._cache = cache
        self._local_rank, self._local_world_size = local_rank, local_world_size
        block_bytes = files.block_tokens * files.dtype.itemsize
        self._cache_blocks = max(2 * _MIN_REQUESTS, int(_USABLE_CACHE * cache.capacity_bytes) // block_bytes)
        self._memory_blocks = max(_MIN_REQUESTS, memory_bytes // block_bytes)
        self._memory: OrderedDict[int, Ids] = OrderedDict()
        self._threads: list[threading.Thread] = []
        self._warned_small = False
        self.fetched_bytes = 0
        self._clock, self._supply = clock, SupplyLog(local_world_size, clock)
        self._changed = threading.Condition()
        """Guards the mutable state; notified when a block arrives or the read order changes."""
        self._order: list[int] = []
        """Announced blocks in the order of their first use."""
        self._last_use = dict[int, int]()
        """Position in the read order that is reached when a block is used for the last time."""
        self._ahead = 0
        """Blocks that may be prefetched beside those in use, without displacing any."""
        self._position_of = dict[int, int]()
        self._next = self._reached = 0
        """Positions in the read order: next block to prefetch, furthest block read."""

    def prefetch(self, spans: Sequence[tuple[int, int]]) -> None:
        last_use = self.files.last_uses(spans)
        if (needed := most_in_use([*last_use.values()])) > self._cache_blocks:
            self._warn_small(needed)
        with self._changed:
            self._order, self._last_use = list(last_use), last_use
            self._ahead = max(_MIN_REQUESTS, self._cache_blocks - needed)
            self._position_of = {block: position for position, block in enumerate(last_use)}
            self._next = self._reached = 0
            self._start_threads()
            self._changed.notify_all()

    def forget(self) -> None:
        self._cache.clear()
        with self._changed:
            self._memory.clear()

    def close(self) -> None:
        super().close()
        with self._changed:
            self._changed.notify_all()
        end_s = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        self._cache.close()

    # -- reading ---------------------------------------------------------------------------------------------------

    def read(self, start: int, stop: int) -> Ids:
        assert 0 <= start <= stop <= len(self), (start, stop, len(self))
        parts = [self._block(block)[first:end] for block, first, end in self.files.in_blocks(start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _block(self, block: int) -> Ids:
        with self._changed:
            ids = self._memory.get(block)
            if ids is not None:
                self._memory.move_to_end(block)
            position = self._position_of.get(block, -1)
            if position > self._reached:
                self._reached = position
                self._changed.notify_all()
        if ids is None:
            ids = self.files.ids_of(self._content(block))
            with self._changed:
                self._memory[block] = ids
                while len(self._memory) > self._memory_blocks:
                    self._memory.popitem(last=False)
        return ids

    def _content(self, block: int) -> bytes:
        """Return the verified bytes of a block: cached, fetched here, or awaited from the thread that fetches it."""
        from_s, waited_s = self._clock(), 0.0
        content = self._cache.read(block)
        while content is None:
            if self._storage.is_closed:
                raise StorageLost("read cancelled: this node is shutting down", is_transient=True)
            content = self._fetch(block) or self._cache.read(block)
            if content is None:
                with self._changed:
                    self._changed.wait(_POLL_S)
            waited_s = self._clock() - from_s
        with self._changed:
            if self._order:  # no announced sample waits for earlier reads, such as hashes
                self._supply.read(waited_s, self.fetched_bytes)
        return content

    def _fetch(self, block: int) -> bytes | None:
        """Fetch a block into the cache; None if it is cached or another thread or process is fetching it."""
        content = self._cache.fetch(block, lambda: self._read_block(block))
        if content is None:
            return None
        self._cache.evict(self._pinned)
        with self._changed:
            self.fetched_bytes += len(content)
            self._changed.notify_all()
        return content

    # -- prefetching -----------------------------------------------------------------------------------------------

    def _start_threads(self) -> None:
        if not self._threads:
            count = max(_MIN_REQUESTS, _REQUESTS // self._local_world_size)
            self._threads = [
                threading.Thread(target=self._prefetch_loop, name=f"tokens-{number}", daemon=True)
                for number in range(count)
            ]
            for thread in self._threads:
                thread.start()

    def _prefetch_loop(self) -> None:
        while (block := self._take()) is not None:
            with contextlib.suppress(Exception):  # the reader fetches the block again and reports the error
                if not self._cache.touch(block):
                    self._fetch(block)

    def _take(self) -> int | None:
        """Wait for the next block that this rank should prefetch; None once the store is closed."""
        with self._changed:
            while not self._storage.is_closed:
                while self._next < self._limit():
                    block = self._order[self._next]
                    self._next += 1
                    if block % self._local_world_size == self._local_rank and block not in self._memory:
                        return block
                self._changed.wait()
            return None

    def _limit(self) -> int:
        """Return the position up to which blocks may be prefetched."""
        return min(len(self._order), self._reached + 1 + self._ahead)

    def _pinned(self) -> Collection[int]:
        """Return the blocks that must stay cached: prefetched, or still needed."""
        with self._changed:
            announced = self._order[: self._limit()]
            return [block for block in announced if self._last_use[block] >= self._reached][-self._cache_blocks :]

    def _warn_small(self, blocks: int) -> None:
        if not self._warned_small:
            self._warned_small = True
            fields = {"blocks": blocks, "room_for": self._cache_blocks}
            _log.warning(
                "the cache holds fewer blocks than are shuffled together, so blocks are fetched repeatedly; raise "
                "data.cache_gb, or lower data.shuffle_blocks",
                extra={"fields": fields},
            )


def most_in_use(last_use: Sequence[int]) -> int:
    """Return the most blocks of a read order that are in use at a position of it: first used by then, and needed yet.

    `last_use`: the position of the last use of each block, in the order of the first uses.
    """
    done = np.cumsum(np.bincount(np.asarray(last_use, dtype=np.int64), minlength=len(last_use)))
    return int((np.arange(1, len(last_use) + 1) - np.concatenate([[0], done[:-1]])).max(initial=0))


class SupplyLog:
    """Warns when fetching is slower than reading. `ranks`: local ranks, each of which fetches its share."""

    def __init__(self, ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._ranks, self._clock = ranks, clock
        self._restart(0)

    def read(self, waited_s: float, fetched_bytes: int) -> None:
        """Record that a block was read after `waited_s`. `fetched_bytes`: what this rank has fetched in total."""
        self._waited_s += waited_s
        self._reads += 1
        elapsed_s = self._clock() - self._from_s
        if elapsed_s < _WINDOW_S or self._reads < _WINDOW_READS:
            return
        share = self._waited_s / elapsed_s
        if share > _SLOW_SHARE:
            came_mb = self._ranks * (fetched_bytes - self._from_bytes) / 1e6
            fields: dict[str, Any] = {
                "waited": f"{100 * share:.0f}%",
                "came_mb_s": round(came_mb / elapsed_s, 3),
                "needed_mb_s": round(came_mb / max(elapsed_s - self._waited_s, 1e-9), 3),
            }
            _log.warning("training waits for data: ids are fetched more slowly than used", extra={"fields": fields})
        self._restart(fetched_bytes)

    def _restart(self, fetched_bytes: int) -> None:
        self._from_s, self._from_bytes = self._clock(), fetched_bytes
        self._waited_s, self._reads = 0.0, 0
