"""Facts of a folder, read piece by piece."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zeroband.observe.facts import Fact, FolderFacts
from zeroband.observe.jsonl import JsonlTail


def test_pieces_of_a_long_past_keep_the_order_of_a_node(tmp_path: Path) -> None:
    events = [{"at_s": 10.0 * at, "kind": "left", "reason": "x" * 400} for at in range(40)]
    metrics = [{"at_s": float(at), "step": at} for at in range(390)]
    for name, records in (("events.jsonl", events), ("metrics.jsonl", metrics)):
        (tmp_path / "run" / "a").mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / "a" / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    source = FolderFacts(tmp_path / "run", most_bytes=1000)
    pieces: list[list[Fact]] = []
    while piece := source.read():
        pieces.append(piece)
    facts = [fact for piece in pieces for fact in piece]
    assert len(pieces) > 10
    assert [fact.record["at_s"] for fact in facts] == sorted(fact.record["at_s"] for fact in facts)
    assert len(facts) == len(events) + len(metrics)


def test_node_that_cannot_be_read_costs_the_others_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node_id in ("a", "b"):
        (tmp_path / "run" / node_id).mkdir(parents=True)
        (tmp_path / "run" / node_id / "metrics.jsonl").write_text('{"step": 1, "at_s": 1.0}\n')
    source, read = FolderFacts(tmp_path / "run"), JsonlTail.read

    def fails(tail: JsonlTail, most_bytes: int | None = None) -> list[dict[str, Any]]:
        if len(calls) < 3:
            calls.append(tail)
            return read(tail, most_bytes)
        raise PermissionError

    calls: list[JsonlTail] = []
    monkeypatch.setattr(JsonlTail, "read", fails)
    with pytest.raises(PermissionError):
        source.read()
    monkeypatch.setattr(JsonlTail, "read", read)
    assert sorted(fact.node_id for fact in source.read()) == ["a", "b"]
