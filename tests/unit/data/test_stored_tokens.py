"""Prepared ids, read where they lie: what a store gives, and what it refuses."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from tests.unit.data.prepared import (
    BLOCK,
    END,
    config_of,
    drawn_ids,
    opened,
    served,
    spans_of,
    stored,
    write_set,
)

from zeroband.config.data import DataConfig
from zeroband.data.shard_set import HASHES, MANIFEST, hashes_digest
from zeroband.data.token_storage import TokenStorage
from zeroband.data.tokens import is_prepared, prepare
from zeroband.errors import ConfigError, StorageLost


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_set(tmp_path / "set", [drawn_ids(1000), drawn_ids(333, 1)])
    return tmp_path / "set"


def test_store_gives_the_ids_of_all_shards_in_one_numbering(folder: Path, tmp_path: Path) -> None:
    whole = np.concatenate([drawn_ids(1000), drawn_ids(333, 1)])
    config = config_of(folder, tmp_path / "cache")
    assert is_prepared(config, 0)
    store = prepare(config, 0)
    assert len(store) == 1333 and list(store.shards) == [1000, 333] and store.block_tokens == BLOCK
    assert store.documents == 2 and store.end_of_document == END
    for start, stop in [*spans_of(1333), (0, 0), (1333, 1333), (999, 1001), (0, 1333), (63, 65)]:
        np.testing.assert_array_equal(store.read(start, stop), whole[start:stop])
    assert (store.document_starts(0, whole) == (whole == END)).all()
    store.close()


def test_fingerprint_is_of_the_ids_and_not_of_the_place(folder: Path, tmp_path: Path) -> None:
    of = {}
    for name, seed in (("same", 1), ("other", 2)):
        write_set(tmp_path / name, [drawn_ids(1000), drawn_ids(333, seed)])
    for name in ("set", "same", "other"):
        with stored(config_of(tmp_path / name, tmp_path / "cache")) as store:
            of[name] = store.fingerprint
    assert of["set"] == of["same"] != of["other"]


def test_damaged_shorter_and_missing_files_are_named_and_other_blocks_are_read(folder: Path, tmp_path: Path) -> None:
    path = folder / "part-0.npy"
    content = bytearray(path.read_bytes())
    content[128 + 2 * (BLOCK + 5)] ^= 1
    path.write_bytes(content)
    with stored(config_of(folder, tmp_path / "cache")) as store:
        assert len(store.read(0, BLOCK)) == BLOCK
        for _ in range(2):
            with pytest.raises(StorageLost, match=r"part-0.npy is damaged: the hash of block 1 differs"):
                store.read(BLOCK, BLOCK + 1)
        path.write_bytes(path.read_bytes()[:-10])
        (folder / "part-1.npy").unlink()
        with pytest.raises(StorageLost, match=r"part-0.npy is damaged: got \d+ bytes instead of \d+"):
            store.read(990, 1000)
        with pytest.raises(StorageLost, match=r"part-1.npy does not exist"):
            store.read(1001, 1002)


def test_padding_of_packed_samples_is_not_learned(tmp_path: Path) -> None:
    ids = np.array([1, 2, END, END, END, 3, END, 4], dtype="<u2")
    write_set(tmp_path / "set", [ids, ids[2:]], block_tokens=4, packed_length=16)
    config = config_of(tmp_path / "set", tmp_path / "cache", packing="best-fit")
    with stored(config) as store:
        learned = [*[True, True, True, False, False, True, True, True], *[True, False, False, True, True, True]]
        for start in range(15):
            for stop in range(start, 15):
                assert store.is_target(start, stop).tolist() == learned[start:stop], (start, stop)
                assert store.count_targets(start, stop) == sum(learned[start:stop])


@pytest.mark.parametrize(
    ("of_set", "asked", "said"),
    [
        ({}, {"packing": "best-fit"}, "are not packed; prepare them with --pack best-fit --seq-length 16"),
        ({"packed_length": 16}, {"packing": "concatenate"}, "are packed for samples of 16 tokens"),
        (
            {"packed_length": 16},
            {"packing": "best-fit", "seq_length": 32},
            'set data.packing = "best-fit" and data.seq_length = 16',
        ),
        ({"tokenizer": "gpt2", "tokenizer_fingerprint": "other"}, {}, "which were made by 'gpt2'; set"),
        ({"vocab_size": 300}, {}, "has a vocabulary of 300 ids, and the model one of 257; set data.vocab_size to 300"),
    ],
)
def test_set_of_another_packing_or_tokenizer_is_refused(
    tmp_path: Path, of_set: dict[str, Any], asked: dict[str, Any], said: str
) -> None:
    write_set(tmp_path / "set", [drawn_ids(100)], **of_set)
    with pytest.raises(ConfigError, match=said):
        opened(config_of(tmp_path / "set", tmp_path / "cache", **asked))


def test_folder_that_is_no_set_is_refused(folder: Path, tmp_path: Path) -> None:
    def refused(match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            opened(config_of(folder, tmp_path / "cache"))

    manifest = (folder / MANIFEST).read_text()
    np.save(folder / HASHES, np.zeros(22, dtype=np.uint64))
    refused("hashes.npy does not match manifest.json")
    (folder / HASHES).write_bytes(b"no array")
    refused("hashes.npy does not match manifest.json")
    (folder / HASHES).unlink()
    refused("hashes.npy does not exist")
    (folder / MANIFEST).write_text(json.dumps(json.loads(manifest) | {"format": 9}))
    refused("not a valid manifest: .*format 9, this version reads 1")
    (folder / MANIFEST).write_text(json.dumps(json.loads(manifest) | {"vocab_size": 100_000}))
    refused("not a valid manifest: .*ids below 100000 and end of document 256 do not fit <u2")
    (folder / MANIFEST).unlink()
    refused("is not a prepared set: .*manifest.json does not exist")


def test_hashes_that_are_cut_while_they_are_in_use_are_an_error_and_no_signal(folder: Path, tmp_path: Path) -> None:
    with stored(config_of(folder, tmp_path / "cache")) as store:
        os.truncate(folder / HASHES, 0)
        with pytest.raises(StorageLost, match=r"hashes.npy is damaged: got 0 bytes instead of 176"):
            store.read(0, 1)


def test_set_without_a_token_is_refused(tmp_path: Path) -> None:
    made = write_set(tmp_path / "set", [drawn_ids(10)])
    np.save(tmp_path / "set" / HASHES, np.empty(0, dtype="<u8"))
    empty = replace(made, tokens=0, documents=0, shards=(), hashes=hashes_digest([]))
    (tmp_path / "set" / MANIFEST).write_bytes(empty.to_json())
    with pytest.raises(ConfigError, match="/set' holds no tokens; prepare text that has some"):
        opened(config_of(tmp_path / "set", tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"", bytes(8 * 22), bytes(8 * 22) + xxhash.xxh3_64_digest(bytes(8 * 22))])
def test_hashes_that_were_kept_and_are_damaged_are_fetched_again(folder: Path, tmp_path: Path, content: bytes) -> None:
    with served(folder) as server:
        config = config_of(server.url, tmp_path / "cache")
        opened(config).close()
        (kept,) = (tmp_path / "cache" / "blocks").glob("*.npy/0/0")
        kept.write_bytes(content)
        with stored(config) as store:
            assert store.read(0, 1) == drawn_ids(1)
    np.testing.assert_array_equal(np.frombuffer(kept.read_bytes()[:-8], "<u8"), np.load(folder / HASHES))


def test_protocol_that_nothing_opens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a readable path or URL"):
        opened(config_of("nosuch://bucket/set", tmp_path / "cache"))


def test_parts_of_a_mixture_share_the_cache() -> None:
    tokens = {"type": "tokens", "path": "s3://b/p/"}
    sources = [{"name": name, "weight": 1, "source": tokens} for name in "ab"]
    sources.append({"name": "c", "weight": 1, "source": {"type": "synthetic"}})
    data = DataConfig.model_validate({"sources": sources, "cache_gb": 10.0})
    assert {name: part.cache_gb for name, part in data.parts.items()} == {"a": 5.0, "b": 5.0, "c": 5.0}


TERABYTE = """
import json, resource, sys, time
from pathlib import Path
import numpy as np
from zeroband.config.data import DataConfig, TokensSource
from zeroband.data.tokens import prepare

began, begun_kib = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
source = TokensSource(type="tokens", path=sys.argv[1], **json.loads(sys.argv[2]))
store = prepare(DataConfig(source=source), 0)
spans = [(int(start), int(start) + 1025) for start in np.linspace(0, len(store) - 1025, 200)]
store.prefetch(spans)
total = sum(int(store.read(*span).sum()) for span in spans)
most_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([len(store), total, time.monotonic() - began, (most_kib - begun_kib) / 1024]))
"""


@pytest.mark.slow
def test_terabyte_of_ids_in_a_file_of_others_opens_in_little_memory(tmp_path: Path) -> None:
    """A prepared set of as much: tests/integration/test_prepared_data.py."""
    tokens = 1 << 39  # of two bytes each
    with (tmp_path / "ids.bin").open("wb") as out:
        out.truncate(2 * tokens)
    arguments = [str(tmp_path / "ids.bin"), json.dumps({"format": "nanogpt"})]
    done = subprocess.run([sys.executable, "-c", TERABYTE, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found, total, took_s, most_mib = json.loads(done.stdout)
    assert (found, total) == (tokens, 0)
    assert most_mib < 256
    print(f"{took_s:.2f} s, {most_mib:.0f} MiB")


def test_threads_that_read_more_files_than_stay_open_get_the_bytes_of_theirs(
    tmp_path: Path,
) -> None:
    """A descriptor that another thread evicts before it is read has become another file's by then."""
    for number in range(200):
        (tmp_path / str(number)).write_bytes(bytes([number]) * 64)
    storage, before = TokenStorage(str(tmp_path), 5.0), sys.getswitchinterval()

    def count_wrong(seed: int) -> int:
        numbers = random.Random(seed).choices(range(200), k=2000)
        return sum(storage.read(str(tmp_path / str(n)), 8, 24) != bytes([n]) * 16 for n in numbers)

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert sum(threads.map(count_wrong, range(4))) == 0
    finally:
        sys.setswitchinterval(before)
    storage.close()
