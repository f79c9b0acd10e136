"""A cache that several processes fill."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroband.data.block_cache import BlockCache, cached_bytes


@pytest.mark.slow
def test_cache_keeps_its_room_while_other_ranks_fill_it_too(tmp_path: Path) -> None:
    ranks, size, room = 8, 92, 400 * 100
    caches = [BlockCache(tmp_path / "blocks", "set", room, evicts=rank == 0, ranks=ranks) for rank in range(ranks)]
    most = 0
    for block in range(600):
        cache = caches[block % ranks]
        assert cache.fetch(block, lambda: bytes(size)) == bytes(size)
        cache.evict(lambda: ())
        if block % ranks == 0:
            most = max(most, cached_bytes(tmp_path))
    for cache in caches:
        cache.close()
    assert 0.9 * room < most <= room
