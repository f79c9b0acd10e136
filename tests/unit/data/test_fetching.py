"""Ids that lie elsewhere: fetched ahead, kept, and had again whatever the storage does on the way."""

from __future__ import annotations

import itertools
import logging
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.unit.data.prepared import (
    BLOCK,
    FileServer,
    FilesHandler,
    config_of,
    drawn_ids,
    fetched_blocks,
    opened,
    served,
    spans_of,
    stored,
    write_set,
)

from zeroband.data import fetching, token_files
from zeroband.data.block_cache import BlockCache, cached_bytes
from zeroband.data.dataset import open_dataset
from zeroband.data.fetching import FetchedTokens, SupplyLog, most_in_use
from zeroband.data.loader import Loader
from zeroband.data.stored_tokens import TokenFile, TokenFiles
from zeroband.errors import ConfigError, StorageLost

TOKENS = 1333
WHOLE = np.concatenate([drawn_ids(1000), drawn_ids(333, 1)])
BLOCKS = 16 + 6
BLOCK_BYTES = 2 * BLOCK


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FileServer]:
    write_set(tmp_path / "set", [WHOLE[:1000], WHOLE[1000:]])
    with served(tmp_path / "set") as serving:
        yield serving


def block_requests(server: FileServer) -> Counter[str]:
    """How often each part of a shard was asked for."""
    return Counter({asked: n for asked, n in server.asked.items() if "part-" in asked})


def read_everything(store: object) -> None:
    for start, stop in spans_of(TOKENS):
        np.testing.assert_array_equal(store.read(start, stop), WHOLE[start:stop])  # type: ignore[attr-defined]


def test_order_of_first_use_names_each_block_once() -> None:
    layout = TokenFiles((TokenFile("a", 0, 100), TokenFile("b", 0, 70)), np.dtype("<u2"), 32, 0, "", 9)
    assert layout.first_blocks == [0, 4, 4 + 3]
    spans = [(100, 132), (31, 33), (140, 141), (96, 100), (0, 97), (0, 1)]
    last_uses = layout.last_uses(spans)
    assert list(last_uses) == [4, 0, 1, 5, 3, 2]
    assert [*last_uses.values()] == [0, 5, 4, 3, 5, 5], "block 1 is needed for the last time before block 2 is"
    assert most_in_use([*last_uses.values()]) == 3 and most_in_use([0, 1, 2]) == 1
    assert not layout.last_uses([]) and most_in_use([]) == 0
    assert [layout.block_of(position) for position in (0, 31, 32, 99, 100, 169)] == [
        *[(0, 0), (0, 31), (1, 0), (3, 3), (4, 0), (6, 5)],
    ]


@pytest.mark.slow
def test_each_block_is_fetched_once_and_kept_between_runs(server: FileServer, tmp_path: Path) -> None:
    config = config_of(server.url, tmp_path / "cache")
    for _ in range(2):
        with stored(config) as store:
            store.prefetch(spans_of(TOKENS))
            read_everything(store)
        requests = block_requests(server)
        assert len(requests) == BLOCKS and set(requests.values()) == {1}
    assert store.fetched_bytes == 0 and len(fetched_blocks(tmp_path / "cache")) == BLOCKS
    assert server.asked["/hashes.npy "] + sum(n for asked, n in server.asked.items() if "hashes" in asked) == 1


@pytest.mark.slow
def test_blocks_that_nobody_expected_are_fetched_when_they_are_read(server: FileServer, tmp_path: Path) -> None:
    with stored(config_of(server.url, tmp_path / "cache")) as store:
        np.testing.assert_array_equal(store.read(70, 80), WHOLE[70:80])
        assert sum(block_requests(server).values()) == 1 and store.fetched_bytes == BLOCK_BYTES


@pytest.mark.slow
def test_blocks_come_in_the_order_of_their_use_and_what_is_read_comes_first(server: FileServer, tmp_path: Path) -> None:
    gate, order = threading.Event(), list[str]()

    def hold(request: FilesHandler) -> bool:
        if "part-" in request.path:
            order.append(request.asked_range())
            gate.wait(20.0)
        return False

    server.fault = hold
    config = config_of(server.url, tmp_path / "cache")
    with stored(config, local_world_size=8, local_rank=0) as store:  # four requests at a time
        store.prefetch([(start, start + 1) for start in range(0, 1000, BLOCK)])
        reader = threading.Thread(target=store.read, args=(15 * BLOCK, 15 * BLOCK + 1))
        wait_for(lambda: len(order) == 2)  # of sixteen, those that are this rank's
        reader.start()
        wait_for(lambda: len(order) == 3)
        gate.set()
        reader.join(20.0)
    starts = [int(asked.removeprefix("bytes=").partition("-")[0]) for asked in order]
    assert sorted(starts[:2]) == [128, 128 + 8 * BLOCK_BYTES] and starts[2] == 128 + 15 * BLOCK_BYTES


def wait_for(condition: object) -> None:
    end_s = time.monotonic() + 20.0
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end_s
        time.sleep(0.02)


@pytest.mark.slow
def test_server_that_fails_one_request_in_five_loses_nothing(
    server: FileServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_set(tmp_path / "set" / "small", [WHOLE], block_tokens=16)
    draw, kinds = random.Random(1), itertools.cycle(["500", "429", "cut", "wrong"])
    damaged, failed = set[str](), Counter[str]()

    def fail(request: FilesHandler) -> bool:
        with server.lock:
            kind = next(kinds) if draw.random() < 0.2 else ""
            if kind == "wrong" and (request.asked_range() in damaged or "part-" not in request.path):
                kind = ""
            failed[kind] += 1
        content, status = request.content()
        match kind:
            case "500":
                return request.refuse(500)
            case "429":
                return request.refuse(429, Retry_After="0.1")
            case "cut":
                return request.send(content, status, cut=True)
            case "wrong":
                damaged.add(request.asked_range())
                return request.send(bytes(len(content)), status)
            case _:
                return False

    server.fault = fail
    caplog.set_level(logging.INFO)
    with stored(config_of(f"{server.url}/small", tmp_path / "cache")) as store:
        store.prefetch(spans_of(TOKENS))
        read_everything(store)
    assert all(failed[kind] for kind in ("500", "429", "cut", "wrong")), failed
    said = [record for record in caplog.records if "data storage" in record.message]
    assert said[0].message == "data storage is failing; retrying" and "small" in said[0].fields["file"]  # type: ignore[attr-defined]
    assert len(said) <= 4, "once, and not for each of the failures"


@pytest.mark.slow
def test_server_that_sends_whole_files_is_refused(server: FileServer, tmp_path: Path) -> None:
    server.knows_ranges = False
    with pytest.raises(ConfigError, match=r"server of .*/manifest\.json does not support range requests; copy the set"):
        opened(config_of(server.url, tmp_path / "cache"))
    assert not block_requests(server)


def once(statuses: dict[str, int]) -> object:
    """A fault that answers each path with a status, whenever it is asked for."""

    def fault(request: FilesHandler) -> bool:
        status = next((status for path, status in statuses.items() if path in request.path), None)
        return status is not None and request.refuse(status)

    return fault


@pytest.mark.slow
def test_file_that_vanishes_or_is_damaged_is_named_at_once(server: FileServer, tmp_path: Path) -> None:
    with stored(config_of(server.url, tmp_path / "cache")) as store:
        server.fault = once({"part-1": 404})  # type: ignore[assignment]
        with pytest.raises(StorageLost, match=r"/part-1.npy does not exist"):
            store.read(1000, 1001)
        server.fault = lambda request: "part-0" in request.path and request.send(b"x" * BLOCK_BYTES, 206)
        store.prefetch([(0, 1)])
        with pytest.raises(StorageLost, match=r"/part-0.npy is damaged: the hash of block 0 differs"):
            store.read(0, 1)
        server.fault = lambda _: False
        assert store.read(64, 65) == WHOLE[64]


@pytest.mark.slow
def test_storage_that_stays_silent_is_given_up_after_its_time(server: FileServer, tmp_path: Path) -> None:
    with stored(config_of(server.url, tmp_path / "cache", retry_s=0.3)) as store:
        server.fault = once({"part-": 503})  # type: ignore[assignment]
        with pytest.raises(StorageLost, match=r"/part-0.npy: the storage failed for \d s .*503.*data.retry_s"):
            store.read(0, 1)
        server.fault = lambda _: False
        assert store.read(0, 1) == WHOLE[0], "it is asked again by whoever reads again"


@pytest.mark.slow
def test_damaged_file_of_the_cache_is_fetched_again(
    server: FileServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(server.url, tmp_path / "cache")
    with stored(config) as store:
        read_everything(store)
    path = fetched_blocks(tmp_path / "cache")[3]
    path.write_bytes(path.read_bytes()[:-9])
    with stored(config) as store:
        read_everything(store)
        assert store.fetched_bytes in (BLOCK_BYTES, 2 * (1000 % BLOCK), 2 * (333 % BLOCK))
    assert [record.message for record in caplog.records] == ["damaged block in the cache; fetching it again"]


@pytest.mark.slow
def test_cache_keeps_its_room_and_what_is_expected(server: FileServer, tmp_path: Path) -> None:
    room = 8 * (BLOCK_BYTES + 8)
    config = config_of(server.url, tmp_path / "cache", cache_gb=room / 1e9)
    with stored(config) as store:
        spans = [(start, start + 1) for start in range(0, 1000, BLOCK)]
        for _ in range(2):
            store.prefetch(spans)
            for span in spans:
                assert store.read(*span) == WHOLE[span[0]]
                assert len(fetched_blocks(tmp_path / "cache")) * BLOCK_BYTES <= room + 32 * BLOCK_BYTES
    requests = block_requests(server)
    assert sum(requests.values()) <= 2 * 16, "what was fetched ahead was still there when it was read"


@pytest.mark.slow
def test_cache_keeps_what_is_read_again(server: FileServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    room = 10 * (BLOCK_BYTES + 8)
    each = [(start, start + 1) for start in range(0, TOKENS, BLOCK)]
    with stored(config_of(server.url, tmp_path / "cache", cache_gb=room / 1e9)) as store:
        store.prefetch([*each, each[1]])
        for start, stop in each:
            store.read(start, stop)
        names = {path.name for path in fetched_blocks(tmp_path / "cache")}
        assert "1" in names and len(names) < len(each), "it was read long before all others that are there"
        assert not caplog.records
        store.prefetch([*each, *each])
    assert [record.message.partition(",")[0] for record in caplog.records] == [
        "the cache holds fewer blocks than are shuffled together"
    ]


def cached_hashes(cache: Path) -> set[Path]:
    """The blocks of hashes in a cache folder."""
    return set(cache.glob("blocks/*.npy/*/*"))


@pytest.mark.slow
def test_sets_that_nobody_has_open_make_room(server: FileServer, tmp_path: Path) -> None:
    write_set(tmp_path / "set" / "other", [drawn_ids(1000, 7)])
    config = config_of(f"{server.url}/other", tmp_path / "cache")
    with stored(config) as store:
        store.read(0, 1000)
    before, hashes = set(fetched_blocks(tmp_path / "cache")), cached_hashes(tmp_path / "cache")
    assert len(before) == 16 and len(hashes) == 1
    del store
    with stored(config_of(server.url, tmp_path / "cache", cache_gb=20 * BLOCK_BYTES / 1e9)) as store:
        store.read(0, 1000)
        own = cached_hashes(tmp_path / "cache")
        assert len(before & set(fetched_blocks(tmp_path / "cache"))) < 8
        assert len(own) == 1 and not own & hashes, "the hashes of the other set went with its blocks"
        with stored(config) as other:
            other.read(0, 1000)
            assert own < cached_hashes(tmp_path / "cache"), "what is in use stays, although it is the oldest"


@pytest.mark.slow
def test_hashes_count_in_the_room_of_the_cache(server: FileServer, tmp_path: Path) -> None:
    write_set(tmp_path / "set" / "small", [WHOLE[:640]], block_tokens=16)
    hashes = 8 * 40
    room = hashes + 20 * (2 * 16 + 8)
    with stored(config_of(f"{server.url}/small", tmp_path / "cache", cache_gb=room / 1e9)) as store:
        store.read(0, 640)
        assert 0.8 * room < cached_bytes(tmp_path / "cache") <= room
    with pytest.raises(ConfigError, match=rf"is too small: .*/small/hashes.npy .* {hashes} bytes, .*; raise it"):
        opened(config_of(f"{server.url}/small", tmp_path / "none", cache_gb=hashes / 1e9))


class Pace:
    """The time of a loop and its link, whatever this machine's: `STEP_S` for a step, `BLOCK_S` for a missing block."""

    STEP_S, BLOCK_S = 0.001, 0.02

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        read = BlockCache.read

        def look(cache: BlockCache, block: int) -> bytes | None:
            content = read(cache, block)
            self.now_s += self.BLOCK_S if content is None else 0.0
            return content

        monkeypatch.setattr(BlockCache, "read", look)
        monkeypatch.setattr(fetching, "_WINDOW_S", 0.1)
        monkeypatch.setattr(
            token_files, "FetchedTokens", partial(FetchedTokens, memory_bytes=0, clock=lambda: self.now_s)
        )

    def train(self, url: str, cache: Path) -> None:
        """Read all batches of a set in the order of training."""
        config = config_of(url, cache, seq_length=256, hold_out=0, shuffle_blocks=8)
        dataset = open_dataset(config, 0)
        loader = Loader(dataset, batch_size=4, micro_bs=4, local_rank=0, local_world_size=1, document_mask=False)
        steps = dataset.sources[0].index.n_train // 4
        loader.assign([(0, 4 * steps)])
        for _ in range(steps):
            loader.next_step()
            self.now_s += self.STEP_S
        loader.close()


@pytest.mark.slow
def test_link_that_is_too_slow_for_the_loop_is_said_and_a_fast_one_is_not(
    server: FileServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pace = Pace(monkeypatch)
    write_set(tmp_path / "set" / "large", [drawn_ids(60 * 1024)], block_tokens=1024)
    for _ in range(2):
        caplog.clear()
        pace.train(f"{server.url}/large", tmp_path / "fast")
    assert not caplog.records, "all blocks were there before the second time"
    monkeypatch.setattr(FetchedTokens, "_prefetch_loop", lambda _: None)  # no block comes before it is read
    pace.train(f"{server.url}/large", tmp_path / "slow")
    said = [
        record
        for record in caplog.records
        if record.message == "training waits for data: ids are fetched more slowly than used"
    ]
    fields = said[0].fields  # type: ignore[attr-defined]
    assert 5 < int(fields["waited"].removesuffix("%")) <= 100
    assert 0 < fields["came_mb_s"] <= 2048 / pace.BLOCK_S / 1e6 and fields["came_mb_s"] < fields["needed_mb_s"]


READER = """
import sys
from pathlib import Path
sys.path[:0] = ["src", "."]
from tests.unit.data.prepared import config_of, opened, spans_of
store, spans = opened(config_of(sys.argv[1], Path(sys.argv[2]))), spans_of(int(sys.argv[3]))
store.prefetch(spans)
for span in spans:
    store.read(*span)
"""


@pytest.mark.slow
def test_ranks_of_a_node_fetch_each_block_once_between_them(server: FileServer, tmp_path: Path) -> None:
    """Locks are of an opened file, so two stores of one process exclude each other as two processes do."""
    config, spans = config_of(server.url, tmp_path / "cache"), spans_of(TOKENS)

    def read(rank: int) -> int:
        with stored(config, local_rank=rank, local_world_size=2) as store:
            store.prefetch(spans)
            return sum(int(store.read(*span).sum()) for span in spans[rank::2])

    with ThreadPoolExecutor(2) as ranks:
        assert sum(ranks.map(read, range(2))) == int(WHOLE.sum())
    requests = block_requests(server)
    assert len(requests) == BLOCKS and set(requests.values()) == {1}


@pytest.mark.faults
def test_fetcher_that_is_killed_leaves_a_cache_that_others_go_on_with(server: FileServer, tmp_path: Path) -> None:
    gate = threading.Event()

    def hold(request: FilesHandler) -> bool:
        if sum(block_requests(server).values()) > 8:
            gate.wait(20.0)
        return False

    server.fault = hold
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", READER, server.url, str(tmp_path / "cache"), str(TOKENS)]
    killed = subprocess.Popen(command, cwd=root)
    wait_for(lambda: len(list((tmp_path / "cache").glob("blocks/*/*/*.part"))) > 4)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    server.fault = lambda _: False
    gate.set()
    with stored(config_of(server.url, tmp_path / "cache")) as store:
        read_everything(store)
    assert len(fetched_blocks(tmp_path / "cache")) == BLOCKS


@pytest.mark.slow
def test_store_that_is_closed_while_it_waits_lets_go(server: FileServer, tmp_path: Path) -> None:
    store = opened(config_of(server.url, tmp_path / "cache", retry_s=900.0))
    server.fault = once({"part-": 503})  # type: ignore[assignment]
    ended = list[BaseException]()

    def read() -> None:
        try:
            store.read(0, 1)
        except StorageLost as error:
            ended.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    wait_for(lambda: sum(block_requests(server).values()) > 1)
    store.close()
    reader.join(20.0)
    assert not reader.is_alive() and "is shutting down" in str(ended[0])


def test_supply_that_is_too_slow_is_said_with_its_rates(caplog: pytest.LogCaptureFixture) -> None:
    clock = SimpleNamespace(now_s=0.0, fetched_bytes=0)
    supply = SupplyLog(2, lambda: clock.now_s)

    def a_minute(waited_s: float, reads: int = 20) -> None:
        for _ in range(reads):
            clock.now_s += 61.0 / reads
            clock.fetched_bytes += 3_000_000
            supply.read(waited_s / reads, clock.fetched_bytes)

    a_minute(2.9)
    a_minute(40.0, reads=19)
    assert not caplog.records
    supply.read(0.0, clock.fetched_bytes)
    a_minute(30.5)
    fields = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    assert fields[-1] == {"waited": "50%", "came_mb_s": 1.967, "needed_mb_s": 3.934}
    assert len(fields) == 2
