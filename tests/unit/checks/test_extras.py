"""Optional packages that a configuration needs, where none of them is installed."""

from __future__ import annotations

from typing import Any

import pytest

from zeroband.checks import extras
from zeroband.checks.extras import missing_packages
from zeroband.config import RunConfig


@pytest.fixture(autouse=True)
def _nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda _: None)


def needed(**data: Any) -> list[str]:
    return [finding.seen for finding in missing_packages(RunConfig.model_validate({"data": data}))]


def test_each_source_of_a_mixture_says_what_it_needs() -> None:
    sources = {
        "hub": {"type": "huggingface", "name": "x"},
        "talk": {"type": "chat", "paths": ["/a.jsonl"]},
        "far": {"type": "jsonl", "paths": ["/b.jsonl", "s3://bucket/c.jsonl"]},
        "ids": {"type": "tokens", "path": "gs://bucket/ids"},
        "here": {"type": "text", "paths": ["/d.txt"]},
    }
    parts = [{"name": name, "weight": 1, "source": source} for name, source in sources.items()]
    assert needed(sources=parts) == [
        "data.sources, hub: source.type='huggingface' needs datasets, which is not installed",
        "data.sources, talk: source.type='chat' needs transformers, which is not installed",
        "data.sources, far: source.paths='s3://bucket/c.jsonl' needs s3fs, which is not installed",
        "data.sources, ids: source.path='gs://bucket/ids' needs gcsfs, which is not installed",
    ]


def test_a_single_source_is_named_by_its_key() -> None:
    assert needed(source={"type": "tokens", "path": "s3://bucket/ids"}, tokenizer="gpt2") == [
        "data.tokenizer='gpt2' needs transformers, which is not installed",
        "data.source.path='s3://bucket/ids' needs s3fs, which is not installed",
    ]


def test_types_of_torchao_need_it() -> None:
    config = RunConfig.model_validate({"optim": {"state_dtype": "int8"}, "train": {"float8": "rowwise"}})
    found = list(missing_packages(config))
    keys = ["train.float8='rowwise'", "optim.state_dtype='int8'"]
    assert [finding.seen for finding in found] == [f"{key} needs torchao, which is not installed" for key in keys]
    assert all("torchao" in finding.advice for finding in found)


def test_made_up_ids_need_nothing_in_a_mixture_either() -> None:
    made_up = {"name": "a", "weight": 1, "source": {"type": "synthetic-tokens"}}
    assert needed(sources=[made_up], vocab_size=100, tokenizer="gpt2") == []
