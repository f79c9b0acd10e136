"""Text that is cut by documents: nothing that is evaluated is trained, not even in another place."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from zeroband.config import load_config
from zeroband.config.data import DataConfig, JsonlSource, MixtureSource, SyntheticSource, SyntheticTokensSource
from zeroband.data.dataset import Dataset, open_dataset
from zeroband.data.sources import documents
from zeroband.tools.compare.options import read_options
from zeroband.tools.compare.texts import Texts, cut
from zeroband.tools.compare.trials import trial, warm_up


def documents_of(data: DataConfig) -> list[Any]:
    return [document.text for part in data.parts.values() for document in documents(part.source, 0)]  # type: ignore


def cut_or_fail(data: DataConfig, folder: Path) -> Texts:
    texts = cut(data, 0, folder)
    assert texts is not None
    return texts


@pytest.fixture
def lines(tmp_path: Path) -> JsonlSource:
    """400 documents, of which every third comes twice."""
    path = tmp_path / "lines.jsonl"
    texts = [f"document {n - n % 3 // 2} " * 9 for n in range(400)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return JsonlSource(type="jsonl", paths=(str(path),))


def test_every_document_is_in_one_part_and_equal_ones_in_the_same(lines: JsonlSource, tmp_path: Path) -> None:
    data = DataConfig(source=lines, seq_length=16, cache_dir=tmp_path / "cache")
    texts = cut_or_fail(data, tmp_path / "texts")
    parts = [documents_of(part) for part in (texts.trained, *texts.held_out.values())]
    assert sorted(itertools.chain(*parts)) == sorted(text.encode() for text in documents_of(data))
    assert all(not set(one) & set(other) for one in parts for other in parts if one is not other)
    assert len(parts[0]) > 300 and all(len(part) > 8 for part in parts[1:])


def test_samples_that_are_evaluated_hold_no_document_that_is_trained(tmp_path: Path) -> None:
    source = SyntheticSource(type="synthetic", documents=300, mean_length=200)
    data = DataConfig(source=source, seq_length=32, cache_dir=tmp_path / "cache")
    texts = cut_or_fail(data, tmp_path / "texts")

    def text_of(opened: Dataset) -> bytes:
        (only,) = opened.sources
        return bytes(only.store.read(0, len(only.store)).astype("uint8"))

    trained = text_of(open_dataset(texts.trained, 0))
    for half in texts.held_out.values():
        opened = open_dataset(half, 0, evaluation_only=True)
        samples = opened.held_out(10**6)
        assert sum(stop - start - 1 for _, start, stop in samples) == len(opened.sources[0].store) - 1
        assert not any(document in trained for document in documents_of(half))


def test_text_is_cut_once_and_anew_when_it_changes(lines: JsonlSource, tmp_path: Path) -> None:
    data, folder = DataConfig(source=lines, seq_length=16, cache_dir=tmp_path / "cache"), tmp_path / "texts"
    first = cut_or_fail(data, folder)
    (place,) = folder.iterdir()
    written = [path.stat().st_mtime_ns for path in sorted(place.iterdir())]
    assert cut(data, 0, folder) == first
    assert [path.stat().st_mtime_ns for path in sorted(place.iterdir())] == written
    with Path(lines.paths[0]).open("a") as out:
        out.write(json.dumps({"text": "one more"}) + "\n")
    assert cut_or_fail(data, folder).digest != first.digest and len(list(folder.iterdir())) == 2


def test_sources_of_a_mixture_are_cut_each_by_itself(lines: JsonlSource, tmp_path: Path) -> None:
    made_up = SyntheticSource(type="synthetic", documents=300, mean_length=200)
    mixed = (
        MixtureSource(name="lines", weight=3, source=lines),
        MixtureSource(name="made-up", weight=1, source=made_up),
    )
    data = DataConfig(sources=mixed, seq_length=16, cache_dir=tmp_path / "cache")
    texts = cut_or_fail(data, tmp_path / "texts")
    assert [(one.name, one.weight) for one in texts.trained.sources] == [("lines", 3), ("made-up", 1)]
    arguments = texts.arguments(["--data.sources=[]", "--data.seq-length=16"])
    assert load_config(arguments, {}).data.sources == texts.trained.sources


@pytest.mark.parametrize(
    "source",
    [SyntheticTokensSource(type="synthetic-tokens"), SyntheticSource(type="synthetic", documents=1)],
    ids=["no documents", "too few"],
)
def test_what_has_no_documents_to_tell_apart_stays_whole(source: Any, tmp_path: Path) -> None:
    data = DataConfig(source=source, vocab_size=300, seq_length=16, cache_dir=tmp_path / "cache")
    assert cut(data, 0, tmp_path / "texts") is None


def test_source_that_a_file_names_is_replaced(lines: JsonlSource, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        f'[data]\nseq_length = 16\ncache_dir = "{tmp_path}"\n[data.source]\ntype = "jsonl"\nfield = "text"\n'
        f'paths = ["{lines.paths[0]}"]\n'
    )
    options = read_options(["--methods=ddp", f"@{tmp_path / 'run.toml'}"])
    texts = cut_or_fail(load_config(options.arguments, {}).data, tmp_path / "texts")
    assert load_config(texts.arguments(options.arguments), {}).data == texts.trained


def test_run_trains_what_is_left_and_its_digest_follows_the_text_not_its_place(tmp_path: Path) -> None:
    asked = ["--methods=diloco", "--warm-steps=3", "--data.source.type", "synthetic", "--data.source.documents=300"]
    options = read_options([*asked, "--data.seq-length=32", f"--data.cache-dir={tmp_path / 'cache'}"])
    found = []
    for place in ("here", "there"):
        texts = cut_or_fail(load_config(options.arguments, {}).data, tmp_path / place)
        there = read_options(["--methods=diloco", "--warm-steps=3", *texts.arguments(options.arguments)])
        run = trial(there, there.methods[0], 1e-3, 0, start="s", texts=texts.digest)
        assert run.config.data.source == texts.trained.source
        found.append((run.digest, warm_up(there, texts=texts.digest)[1]))
    assert found[0] == found[1]
    other = trial(there, there.methods[0], 1e-3, 0, start="s", texts="other")
    assert other.digest != found[0][0]
