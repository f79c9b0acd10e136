"""Facts of a folder, read piece by piece."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

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


@pytest.fixture
def source(tmp_path: Path) -> FolderFacts:
    """A run of three nodes, each with a line in either file."""
    for node_id in ("a", "b", "c"):
        (tmp_path / "run" / node_id).mkdir(parents=True)
        (tmp_path / "run" / node_id / "metrics.jsonl").write_text('{"step": 1, "at_s": 1.0}\n')
        (tmp_path / "run" / node_id / "events.jsonl").write_text('{"kind": "left", "at_s": 2.0, "reason": "done"}\n')
    return FolderFacts(tmp_path / "run")


def read(source: FolderFacts) -> list[tuple[str, str]]:
    return [(fact.node_id, fact.record.get("kind", "step")) for fact in source.read()]


ALL = [(node_id, kind) for node_id in ("a", "b", "c") for kind in ("step", "left")]


def test_folder_in_place_of_a_file_costs_that_file_only(source: FolderFacts) -> None:
    path = source.folder / "a" / "metrics.jsonl"
    path.unlink()
    path.mkdir()
    assert read(source) == [one for one in ALL if one != ("a", "step")]
    assert source.unread() == ["a/metrics.jsonl: Is a directory"]
    path.rmdir()
    path.write_text('{"step": 1, "at_s": 3.0}\n')
    assert read(source) == [("a", "step")]
    assert source.unread() == []


def test_file_that_this_user_may_not_read_costs_that_file_only(
    source: FolderFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, open_file = source.folder / "a" / "events.jsonl", Path.open

    def refuse(path: Path, mode: str) -> object:
        if path == refused:
            raise PermissionError(errno.EACCES, "Permission denied")
        return open_file(path, mode)

    monkeypatch.setattr(Path, "open", refuse)
    assert read(source) == [one for one in ALL if one != ("a", "left")]
    assert source.unread() == ["a/events.jsonl: Permission denied"]
    monkeypatch.undo()
    assert read(source) == [("a", "left")]


def test_folder_that_cannot_be_looked_into_costs_that_node_only(
    source: FolderFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, stat = source.folder / "b", Path.stat

    def refuse(path: Path, **how: bool) -> os.stat_result:
        if path.parent == closed:
            raise PermissionError(errno.EACCES, "Permission denied")
        return stat(path, **how)

    monkeypatch.setattr(Path, "stat", refuse)
    assert read(source) == [one for one in ALL if one[0] != "b"]
    assert source.unread() == ["b: Permission denied"]
    monkeypatch.undo()
    assert read(source) == [one for one in ALL if one[0] == "b"]


def test_run_folder_that_is_closed_is_said(source: FolderFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> list[Path]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert (read(source), source.unread()) == ([], [f"{source.folder}: Permission denied"])


def test_source_says_whether_a_piece_was_the_last(source: FolderFacts) -> None:
    with (source.folder / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "at_s": 3.0}\n' * 100)
    pieces = FolderFacts(source.folder, most_bytes=1000)
    reads = 0
    while pieces.read() and pieces.has_more:
        reads += 1
    assert reads > 1
    assert (source.read() != [], source.has_more, pieces.read()) == (True, False, [])
