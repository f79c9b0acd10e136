from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.text_server import text_server

from zeroband.config.data import DataConfig, JsonlSource, SyntheticSource, TextSource
from zeroband.data import files, tokens
from zeroband.data.block_cache import cache_dir_of
from zeroband.data.readers import Document
from zeroband.data.token_store import TokenStore
from zeroband.data.tokenizer import ByteTokenizer
from zeroband.data.tokens import prepare
from zeroband.errors import ConfigError, StorageLost

END = 256


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    (tmp_path / "a.txt").write_bytes(b"abc")
    (tmp_path / "b.txt").write_bytes(b"de")
    return DataConfig(source=TextSource(paths=(f"{tmp_path}/*.txt",)), cache_dir=tmp_path / "cache")


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One item for each time that the documents are read."""
    seen: list[int] = []
    read = tokens.documents

    def counted(source: Any, seed: int, *rest: Any) -> Iterator[Document]:
        seen.append(seed)
        return read(source, seed, *rest)

    monkeypatch.setattr(tokens, "documents", counted)
    return seen


def test_store_holds_the_documents_with_an_end_behind_each_and_counts_empty_ones(
    make_store: Callable[..., TokenStore],
) -> None:
    store = make_store(b"", b"abc", b"", b"de")
    assert store.read(0, len(store)).tolist() == [97, 98, 99, END, 100, 101, END]
    assert store.read(2, 5).tolist() == [99, END, 100] and store.read(2, 5).dtype == np.uint16
    assert (store.manifest.documents, store.manifest.empty_documents) == (2, 2)
    with pytest.raises(AssertionError):
        store.read(2, 8)
    with pytest.raises(ValueError, match="read-only"):
        store.read(0, 2)[0] = 1


def test_store_joins_chunks_without_a_seam(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = prepare(config, 0)
    expected = whole.read(0, len(whole)).tolist()
    monkeypatch.setattr(tokens, "_BATCH_CHARACTERS", 1)
    parts = prepare(config.model_copy(update={"cache_dir": config.cache_dir / "other"}), 0)
    assert parts.read(0, len(parts)).tolist() == expected
    assert parts.fingerprint == whole.fingerprint


def test_store_takes_four_bytes_an_id_for_a_large_vocabulary(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = ByteTokenizer()
    tokenizer.vocab_size, tokenizer.end_of_document = 100_001, 100_000
    monkeypatch.setattr(tokens, "tokenizer_of", lambda _: tokenizer)
    store = prepare(config, 0)
    assert store.read(0, len(store)).tolist() == [97, 98, 99, 100_000, 100, 101, 100_000]


def test_prepare_opens_a_built_corpus_without_reading_the_documents_again(
    config: DataConfig, builds: list[int]
) -> None:
    first, second = prepare(config, 0), prepare(config, 1)
    assert len(builds) == 1
    assert second.manifest == first.manifest
    assert second.read(0, 7).tolist() == first.read(0, 7).tolist()


def test_prepare_builds_again_when_a_file_changes(config: DataConfig, builds: list[int], tmp_path: Path) -> None:
    before = prepare(config, 0)
    (tmp_path / "b.txt").write_bytes(b"DEF")
    after = prepare(config, 0)
    assert len(builds) == 2
    assert after.read(0, len(after)).tolist() == [97, 98, 99, END, 68, 69, 70, END]
    assert after.fingerprint != before.fingerprint


def test_fingerprint_is_of_ids_and_ends_not_of_where_they_lie(tmp_path: Path) -> None:
    def fingerprint(name: str, *lines: str) -> str:
        (tmp_path / name).write_text("\n".join(lines))
        is_text = name.endswith(".txt")
        source = TextSource if is_text else JsonlSource
        kind = source(type="text" if is_text else "jsonl", paths=(f"{tmp_path}/{name}",))
        return prepare(DataConfig(source=kind, cache_dir=tmp_path / "cache"), 0).fingerprint

    assert fingerprint("a.txt", "ab") == fingerprint("b.jsonl", '{"text": "ab"}')
    assert fingerprint("b.jsonl", '{"text": "ab"}') != fingerprint("c.jsonl", '{"text": "a"}', '{"text": "b"}')


@pytest.mark.parametrize("damage", ["no manifest", "broken manifest", "short file", "no file"])
def test_prepare_builds_again_what_is_not_whole(config: DataConfig, builds: list[int], damage: str) -> None:
    expected = prepare(config, 0).read(0, 7).tolist()
    (manifest,), (ids,) = config.cache_dir.glob("*.json"), config.cache_dir.glob("*.tokens")
    match damage:
        case "no manifest":
            manifest.unlink()
        case "broken manifest":
            manifest.write_text('{"format": 1')
        case "short file":
            ids.write_bytes(ids.read_bytes()[:-2])
        case _:
            ids.unlink()
    assert prepare(config, 0).read(0, 7).tolist() == expected
    assert len(builds) == 2


def test_prepare_builds_once_for_all_that_ask_at_once(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_POLL_S", 0.001)
    waiting = threading.Barrier(4)
    builders: list[int] = []

    def once_all_others_wait(*_: object) -> Iterator[Document]:
        builders.append(threading.get_ident())
        waiting.wait(timeout=10)
        yield Document("abc", "here")

    def on_progress(_: int) -> None:
        if threading.get_ident() not in builders and threading.get_ident() not in waiters:
            waiters.append(threading.get_ident())
            waiting.wait(timeout=10)

    waiters: list[int] = []
    stores: list[TokenStore] = []
    monkeypatch.setattr(tokens, "documents", once_all_others_wait)
    asking = [threading.Thread(target=lambda: stores.append(prepare(config, 0, on_progress))) for _ in range(4)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(timeout=10)
    assert len(builders) == 1
    assert [store.read(0, 4).tolist() for store in stores] == [[97, 98, 99, END]] * 4


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.defect(9)
def test_prepare_takes_over_from_a_builder_that_was_killed(config: DataConfig) -> None:
    script = """
import os, signal, sys
from zeroband.config.data import DataConfig
from zeroband.data import files, tokens
from zeroband.data.block_cache import cache_dir_of
from zeroband.data.readers import Document
def documents(*_):
    yield Document("x" * (1 << 21), "first")
    os.kill(os.getpid(), signal.SIGKILL)
tokens.documents = documents
tokens.prepare(DataConfig.model_validate_json(sys.argv[1]), 0)
"""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run(
        [sys.executable, "-c", script, config.model_dump_json()], env=environ, timeout=60, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert [path.suffix for path in config.cache_dir.iterdir() if path.stat().st_size] == [".part"]
    store = prepare(config, 0)
    assert store.read(0, len(store)).tolist() == [97, 98, 99, END, 100, 101, END]
    assert not list(config.cache_dir.glob("*.part"))


def test_prepare_waits_for_a_server_of_text_as_long_as_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "pause", lambda _: False)
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "a.jsonl").write_text('{"text": "abc"}\n{"text": "de"}\n')
    with text_server(tmp_path / "served") as server:
        source = JsonlSource(type="jsonl", paths=(f"{server.url}/a.jsonl",))
        config = DataConfig(source=source, cache_dir=tmp_path / "cache", retry_s=60.0)
        turn = itertools.count()
        server.fault = lambda request: next(turn) % 3 == 0 and request.refuse(503)
        store = prepare(config, 0)
        assert store.read(0, len(store)).tolist() == [97, 98, 99, END, 100, 101, END]
        server.fault = lambda request: request.refuse(503)
        with pytest.raises(StorageLost, match=rf"^{server.url}/a.jsonl: the storage failed for 0 s .*503"):
            prepare(config.model_copy(update={"retry_s": 1e-9, "cache_dir": tmp_path / "other"}), 0)


def test_prepare_leaves_no_entry_when_a_source_fails_midway(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": 3}')
    config = DataConfig(source=JsonlSource(type="jsonl", paths=(f"{tmp_path}/a.jsonl",)), cache_dir=tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"a\.jsonl:2"):
        prepare(config, 0)
    assert not [*config.cache_dir.glob("*.json"), *config.cache_dir.glob("*.tokens")]


def test_prepare_reports_the_tokens_written_so_far(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_BATCH_DOCUMENTS", 1)
    reports: list[int] = []
    prepare(config, 0, reports.append)
    assert reports == [4, 7]


def test_prepare_refuses_a_corpus_without_text(make_store: Callable[..., TokenStore]) -> None:
    with pytest.raises(ConfigError, match="2 documents, all empty"):
        make_store(b"", b"")


def test_prepare_names_the_document_that_has_no_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n{"text": "half a pair: \\ud800"}')
    config = DataConfig(source=JsonlSource(type="jsonl", paths=(str(path),)), cache_dir=tmp_path)
    with pytest.raises(
        ConfigError, match=r"a\.jsonl:2: data.tokenizer cannot encode this text.*surrogates not allowed"
    ):
        prepare(config, 0)


def test_prepare_names_a_cache_folder_that_cannot_be_made(config: DataConfig, tmp_path: Path) -> None:
    blocked = config.model_copy(update={"cache_dir": tmp_path / "a.txt" / "cache"})
    with pytest.raises(ConfigError, match=r"data\.cache_dir=.*a\.txt/cache"):
        prepare(blocked, 0)


def test_default_cache_dir_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = DataConfig(source=SyntheticSource(type="synthetic", documents=2))
    prepare(config, 0)
    assert len(list((tmp_path / "zeroband").glob("*.tokens"))) == 1
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir_of(config) == tmp_path / ".cache" / "zeroband"


def test_best_fit_cuts_no_document_that_fits_and_learns_no_padding(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lengths = [*rng.integers(1, 15, 60).tolist(), 40, 15, 16]
    texts = [bytes(rng.integers(97, 123, length).tolist()) for length in lengths]
    for number, text in enumerate(texts):
        (tmp_path / f"{number:03}.txt").write_bytes(text)
    config = DataConfig(source=TextSource(paths=(f"{tmp_path}/*.txt",)), cache_dir=tmp_path / "cache", seq_length=16)
    plain = prepare(config, 0)
    packed = prepare(config.model_copy(update={"packing": "best-fit"}), 0)
    assert (plain.packed_length, packed.packed_length) == (None, 16) and plain.fingerprint != packed.fingerprint
    assert len(packed) % 16 == 0
    ids, learned = packed.read(0, len(packed)), packed.is_target(0, len(packed))
    rows = zip(ids.reshape(-1, 16), learned.reshape(-1, 16), strict=True)
    bins = [bytes(row[keep].astype(np.uint8)) for row, keep in rows]
    assert sorted(ids[learned].tolist()) == sorted(plain.read(0, len(plain)).tolist()), "nothing twice, nothing lost"
    for text in texts:
        assert len(text) >= 16 or any(text in one for one in bins), "in one bin"
    assert 0 < int((~learned).sum()) == packed.manifest.padding < len(packed) // 8
    assert packed.count_targets(0, len(packed)) == len(plain)
    spans = [(start, start + 7) for start in range(0, len(packed) - 7, 7)]
    assert [packed.is_target(*span).tolist() for span in spans] == [learned[slice(*span)].tolist() for span in spans]
