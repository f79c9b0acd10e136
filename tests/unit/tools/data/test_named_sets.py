"""Data sets of Hugging Face that a name or a folder of their files names, with every way to the network cut."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.unit.tools.data.preparations import manifest_of, prepare, texts_of

from zeroband.data import sources
from zeroband.errors import ConfigError

datasets = pytest.importorskip("datasets", reason="needs the extra hf")

TEXTS = [f"row {number}" for number in range(400)]
SMALL = ("--unit-mb", "0.002")
SAYS_ITS_SIZE = """---
dataset_info:
  features:
  - name: text
    dtype: string
  splits:
  - name: train
    num_bytes: 4490
    num_examples: 400
---
"""

pytestmark = pytest.mark.slow


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where this machine keeps what it has converted."""

    def refuse(*_: Any) -> NoReturn:
        raise OSError("the network is off in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def name(tmp_path: Path, cache: Path) -> str:
    """SOURCE of a folder of four files of Parquet, which no loader was ever asked for."""
    for number in range(4):
        part = TEXTS[100 * number : 100 * (number + 1)]
        (tmp_path / "set").mkdir(exist_ok=True)
        pq.write_table(pa.table({"text": part}), tmp_path / "set" / f"part-{number}.parquet")
    return f"hf:{tmp_path / 'set'}"


def converted(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*.arrow"))


def interrupt(tasks: list[Any]) -> Iterator[Any]:
    yield from tasks[:2]
    raise KeyboardInterrupt


def test_set_of_a_name_is_converted_by_as_many_processes_as_there_are_workers(
    name: str, cache: Path, tmp_path: Path
) -> None:
    assert prepare(name, tmp_path / "out", *SMALL, "--workers", 2) == 0
    assert texts_of(tmp_path / "out") == TEXTS and len(manifest_of(tmp_path / "out").shards) > 1
    assert converted(cache) == ["set-train-00000-of-00002.arrow", "set-train-00001-of-00002.arrow"]


def test_preparation_goes_on_on_another_machine_that_has_converted_the_set_for_itself(
    name: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert prepare(name, out, *SMALL, "--workers", 2, order=interrupt) == 130
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "elsewhere")
    assert prepare(name, out, *SMALL, "--workers", 1) == 0
    assert converted(tmp_path / "elsewhere") == ["set-train.arrow"]
    assert "resuming: 2 of" in capsys.readouterr().out and texts_of(out) == TEXTS


def test_set_that_changed_since_the_beginning_and_another_split_are_named(
    name: str, tmp_path: Path, cache: Path
) -> None:
    out = tmp_path / "out"
    assert prepare(name, out, *SMALL, order=interrupt) == 130
    with pytest.raises(ConfigError, match=r"added: hf:.*/set::train\[:50%\]; removed: .*::train;"):
        prepare(f"{name}::train[:50%]", out, *SMALL)
    pq.write_table(pa.table({"text": TEXTS[100:200][::-1]}), tmp_path / "set" / "part-1.parquet")
    with pytest.raises(ConfigError, match=r"changed: hf:.*/set::train; give the same arguments"):
        prepare(name, out, *SMALL)


def test_dry_run_fetches_nothing_of_a_set_that_says_its_size(
    name: str, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "set" / "README.md").write_text(SAYS_ITS_SIZE)
    assert prepare(name, tmp_path / "out", *SMALL, "--dry-run") == 0
    said = capsys.readouterr().out
    assert "1 x huggingface, about 4.49 kB of text" in said and "units     3 shards at most" in said
    assert converted(cache) == []
    with pytest.raises(ConfigError, match=r"no column 'body' \(--column\); it has 'text'"):
        prepare(name, tmp_path / "out", "--column", "body", "--dry-run")
    (tmp_path / "set" / "README.md").unlink()
    assert prepare(name, tmp_path / "out", *SMALL, "--dry-run") == 0
    assert converted(cache) != []


def test_broken_file_of_a_set_is_named(name: str, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "set" / "part-2.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ConfigError, match=r"cannot load the data set name='.*/set', .*: .*Parquet magic bytes"):
        prepare(name, tmp_path / "out")


def test_hub_that_is_away_is_waited_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = ConnectionError("Couldn't reach the Hub")
    load, failures = datasets.load_dataset, [error, error]

    def fail(*arguments: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return load(*arguments, **options)

    monkeypatch.setattr(sources, "pause", lambda _: False)
    monkeypatch.setattr(datasets, "load_dataset", fail)
    assert prepare(name, tmp_path / "out", *SMALL) == 0
    assert texts_of(tmp_path / "out") == TEXTS
    assert "prepare: data storage is failing; retrying file=" in capsys.readouterr().err
    failures += [error, error]
    with pytest.raises(ConfigError, match=r"/set: the storage failed for 0 s, last with .*raise --retry-s"):
        prepare(name, tmp_path / "again", "--retry-s", 0)
