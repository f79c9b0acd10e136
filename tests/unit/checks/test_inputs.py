"""What the doctor says of what a run reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zeroband.checks.inputs import open_inputs
from zeroband.config.data import ChatSource, DataConfig
from zeroband.config.schema import RunConfig


def seen_of(tmp_path: Path, *rows: Any, template: str | None = None) -> list[tuple[str, str, str | None]]:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    source = ChatSource(type="chat", paths=(str(path),), template=template)
    found = open_inputs(RunConfig(data=DataConfig(source=source))).findings
    return [(finding.what, f"{finding.seen}; {finding.advice}", finding.stops) for finding in found]


def test_first_conversation_is_written_as_training_would(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra hf")
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (_, data) = seen_of(tmp_path, good)
    assert data[1].startswith("first conversation: 27 tokens of ") and data[2] is None
    (_, data) = seen_of(tmp_path, good, template="{{ messages[0]['content'] + 1 }}")
    assert "chats.jsonl:1: the chat template cannot write this conversation" in data[1]
    assert data[2] == "start"


def test_line_without_an_answer_stops_the_start(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra hf")
    (_, data) = seen_of(tmp_path, {"messages": [{"role": "user", "content": "a"}]})
    assert "chats.jsonl:1: no message of the assistant" in data[1] and data[2] == "start"
