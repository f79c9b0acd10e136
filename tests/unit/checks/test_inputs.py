"""What the doctor says of what a run reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.data.prepared import config_of, drawn_ids, served, write_set

from zeroband.checks.disk import disks
from zeroband.checks.extras import missing_packages, unknown_protocols
from zeroband.checks.inputs import local_inputs, open_inputs
from zeroband.checks.needs import Needs
from zeroband.config.data import ChatSource, DataConfig
from zeroband.config.schema import RunConfig


def seen_of(tmp_path: Path, *rows: Any, template: str | None = None) -> list[tuple[str, str, str | None]]:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    source = ChatSource(type="chat", paths=(str(path),), template=template)
    found = open_inputs(RunConfig(data=DataConfig(source=source)))[0]
    return [(finding.what, f"{finding.seen}; {finding.advice}", finding.stops) for finding in found]


def test_first_conversation_is_written_as_training_would(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra hf")
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (_, data) = seen_of(tmp_path, good)
    assert data[1].startswith("first conversation: 27 tokens of ") and data[2] is None
    (_, data) = seen_of(tmp_path, good, template="{{ messages[0]['content'] + 1 }}")
    assert "chats.jsonl:1: the chat template cannot render this conversation" in data[1]
    assert data[2] == "start"


def test_line_without_an_answer_stops_the_start(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra hf")
    (_, data) = seen_of(tmp_path, {"messages": [{"role": "user", "content": "a"}]})
    assert "chats.jsonl:1: no message of the assistant" in data[1] and data[2] == "start"


def test_prepared_set_is_opened_and_told(tmp_path: Path) -> None:
    write_set(tmp_path / "set", [drawn_ids(1000), drawn_ids(333, 1)])
    config = RunConfig(data=config_of(tmp_path / "set", tmp_path / "cache"))
    assert list(local_inputs(config)) == []
    seen = [finding.seen for finding in open_inputs(config)[0] if finding.what == "data"]
    assert seen == [f"1333 tokens, 2 documents in 2 shards of {tmp_path / 'set'}"]


def test_set_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    missing, empty = config_of(tmp_path / "none", tmp_path / "cache"), config_of(tmp_path, tmp_path / "cache")
    for data in (missing, empty):
        for findings in (list(local_inputs(RunConfig(data=data))), open_inputs(RunConfig(data=data))[0]):
            (found,) = [finding for finding in findings if finding.what == "data"]
            assert "is not a prepared set" in found.advice and found.stops == "start"


def test_every_source_of_a_mixture_is_looked_at(tmp_path: Path) -> None:
    write_set(tmp_path / "set", [drawn_ids(100)])
    tokens = {"type": "tokens", "path": str(tmp_path / "set")}
    far = {"type": "tokens", "path": "nosuch://b/set"}
    text = {"type": "text", "paths": [str(tmp_path / "*.txt")]}
    sources = {"web": tokens, "far": far, "books": text}
    mixed = [{"name": name, "weight": 1, "source": source} for name, source in sources.items()]
    config = RunConfig.model_validate({"data": {"sources": mixed, "cache_dir": tmp_path / "cache"}})
    seen = [f"{finding.seen}; {finding.advice}" for finding in open_inputs(config)[0] if finding.what == "data"]
    assert seen[0] == f"web: 100 tokens, 1 documents in 1 shards of {tmp_path / 'set'}; "
    assert "far: data.source.path='nosuch://b/set' is not a readable path or URL" in seen[1] and "books: " in seen[2]
    assert ["no file matches" in finding.advice for finding in local_inputs(config)] == [True]
    assert any("nothing opens nosuch://" in finding.seen for finding in unknown_protocols(config))
    assert list(missing_packages(config)) == []


@pytest.mark.slow
def test_room_for_what_is_fetched_is_asked_for(tmp_path: Path) -> None:
    write_set(tmp_path / "set", [drawn_ids(1000)])
    with served(tmp_path / "set") as server:
        data = config_of(server.url, tmp_path / "cache", cache_gb=1e9)
        config = RunConfig.model_validate({"data": data.model_dump(), "run": {"dir": tmp_path}})
        (found,) = [finding for finding in disks(Needs(config)) if "data.cache_gb" in finding.seen]
        assert found.stops == "finish" and "lower data.cache_gb" in found.advice
        assert all(finding.stops is None for finding in open_inputs(config)[0] if finding.what == "data")
