"""Facts of a folder, read piece by piece."""

from __future__ import annotations

import json
from pathlib import Path

from zeroband.observe.facts import Fact, FolderFacts


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
