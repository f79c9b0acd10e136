"""Facts of a folder, read piece by piece."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zeroband.errors import ConfigError
from zeroband.observe.facts import Fact, FolderFacts, find_run_dir, newest_run
from zeroband.observe.jsonl import LineTail

ALL = [(node_id, kind) for node_id in ("a", "b", "c") for kind in ("step", "left")]


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


def test_pieces_of_a_long_past_keep_the_order_of_a_node_and_say_which_is_the_last(source: FolderFacts) -> None:
    events = [{"at_s": 10.0 * at, "kind": "left", "reason": "x" * 400} for at in range(40)]
    metrics = [{"at_s": float(at), "step": at} for at in range(390)]
    for name, records in (("events.jsonl", events), ("metrics.jsonl", metrics)):
        (source.folder / "a" / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    in_pieces = FolderFacts(source.folder, most_bytes=1000)
    pieces, has_more = list[list[Fact]](), list[bool]()
    while piece := in_pieces.read():
        pieces.append(piece)
        has_more.append(in_pieces.has_more)
    facts = [fact for piece in pieces for fact in piece if fact.node_id == "a"]
    assert len(pieces) > 10 and has_more == [True] * (len(pieces) - 1) + [False]
    assert [fact.record["at_s"] for fact in facts] == sorted(fact.record["at_s"] for fact in facts)
    assert len(facts) == len(events) + len(metrics)
    assert (source.read() != [], source.has_more, in_pieces.read()) == (True, False, [])


def test_record_that_comes_while_the_other_file_is_read_keeps_its_place(
    source: FolderFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(source)
    lines, meanwhile = LineTail.lines, [True]

    def write_meanwhile(tail: LineTail, *args: Any, **options: Any) -> Any:
        if tail.path.match("a/metrics.jsonl") and meanwhile:
            meanwhile.clear()
            with (source.folder / "a" / "events.jsonl").open("a") as events, tail.path.open("a") as metrics:
                events.write('{"kind": "joined", "at_s": 3.0}\n')
                metrics.write('{"step": 2, "at_s": 4.0}\n')
        return lines(tail, *args, **options)

    monkeypatch.setattr(LineTail, "lines", write_meanwhile)
    assert [*read(source), *read(source)] == [("a", "joined"), ("a", "step")]


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


def refusing(method: Callable[..., Any], is_refused: Callable[[Path], bool]) -> Callable[..., Any]:
    """What a method of Path does where this user may not do it."""

    def refuse(path: Path, *args: Any, **options: Any) -> Any:
        if is_refused(path):
            raise PermissionError(errno.EACCES, "Permission denied")
        return method(path, *args, **options)

    return refuse


@pytest.mark.parametrize(
    ("method", "is_refused", "lacking", "said"),
    [
        ("open", lambda path: path.match("a/events.jsonl"), [("a", "left")], "a/events.jsonl: Permission denied"),
        ("stat", lambda path: path.parent.name == "b", [("b", "step"), ("b", "left")], "b: Permission denied"),
        ("iterdir", lambda path: True, ALL, "{folder}: Permission denied"),
    ],
)
def test_what_this_user_may_not_read_costs_that_only_and_is_said(
    source: FolderFacts, monkeypatch: pytest.MonkeyPatch,
    method: str, is_refused: Callable[[Path], bool], lacking: list[tuple[str, str]], said: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(Path, method, refusing(getattr(Path, method), is_refused))
    assert read(source) == [one for one in ALL if one not in lacking]
    assert source.unread() == [said.format(folder=source.folder)]
    monkeypatch.undo()
    assert read(source) == lacking


def add_run(run_dir: Path) -> None:
    (run_dir / "a").mkdir(parents=True)
    (run_dir / "a" / "events.jsonl").touch()
    os.utime(run_dir / "a" / "events.jsonl", (0.0, 0.0))


def test_find_run_dir_takes_the_only_run_of_a_folder_and_names_them_where_there_are_several(
    source: FolderFacts, tmp_path: Path
) -> None:
    assert find_run_dir(tmp_path) == find_run_dir(source.folder) == source.folder
    add_run(tmp_path / "another")
    with pytest.raises(ConfigError, match="it contains the runs another, run; name one of them"):
        find_run_dir(tmp_path)
    with pytest.raises(ConfigError, match="is not a run directory; and it contains no runs"):
        find_run_dir(source.folder / "a")


def test_newest_run_is_the_folder_itself_or_the_one_written_to_last(source: FolderFacts, tmp_path: Path) -> None:
    add_run(tmp_path / "older")
    assert newest_run(tmp_path) == newest_run(source.folder) == source.folder
    assert newest_run(source.folder / "a") == source.folder / "a"
    with pytest.raises(ConfigError, match="no such folder"):
        newest_run(tmp_path / "none")
