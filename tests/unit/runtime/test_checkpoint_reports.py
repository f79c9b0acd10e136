"""Marks: nodes find out whether they see one folder. Real folders; the store is a table."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zeroband.checkpoint.layout import MARKS
from zeroband.checkpoint.storage import LocalStorage
from zeroband.config.schema import CkptConfig, RunConfig
from zeroband.elastic.membership.resume_rules import Held, Holding
from zeroband.errors import ConfigError, StoreLost
from zeroband.runtime.checkpoint_reports import CheckpointReports

HELD = Holding(True, Held(630, 63, "digest", "x"))


class Table:
    """What nodes have told."""

    def __init__(self) -> None:
        self.said: dict[str, Holding] = {}
        self.is_lost = False
        self.writes = 0

    def publish_holding(self, member_id: str, holding: Holding, *, retry_s: float | None = None) -> None:
        self.said[member_id] = holding
        self.writes += 1

    def holdings(self, *, retry_s: float | None = None) -> dict[str, Holding]:
        if self.is_lost:
            raise StoreLost("Redis is out of reach")
        return dict(self.said)


@pytest.fixture
def table() -> Table:
    return Table()


@pytest.fixture
def node(table: Table) -> Callable[..., CheckpointReports]:
    def make(name: str, path: Path | None, shared: Any = "auto") -> CheckpointReports:
        config = RunConfig(ckpt=CkptConfig(path=None if path is None else str(path), shared=shared))
        config = config.model_copy(update={"run": config.run.model_copy(update={"id": "r"})})
        store: Any = table
        return CheckpointReports(store, config, name)

    return make


def enter(*nodes: tuple[str, CheckpointReports]) -> None:
    """Each comes in beside those before it."""
    alive: list[str] = []
    for member, reports in nodes:
        alive.append(member)
        reports.exchange(member, alive, HELD)


def test_nodes_that_see_one_folder_save_together_whichever_way_leads_there(
    node: Callable[..., CheckpointReports], tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    a, b = node("a", tmp_path / "disk"), node("b", tmp_path / "link")
    enter(("a#1", a), ("b#1", b))
    for reports, own in ((a, "a#1"), (b, "b#1")):
        assert reports.folder_peers(own, ["a#1", "b#1"]) == ({"a", "b"}, frozenset())


def test_nodes_with_folders_of_their_own_save_alone_also_where_one_is_a_copy(
    node: Callable[..., CheckpointReports], table: Table, tmp_path: Path
) -> None:
    a = node("a", tmp_path / "a")
    enter(("a#1", a))
    (tmp_path / "b/r").mkdir(parents=True)
    LocalStorage(tmp_path / "b/r", "a").write(f"{MARKS}/a.{'0' * 32}", (b"",))  # of an earlier life, copied
    b = node("b", tmp_path / "b")
    b.exchange("b#1", ["a#1", "b#1"], HELD)
    assert a.folder_peers("a#1", ["a#1", "b#1"]) == ({"a"}, {"b"})
    assert b.folder_peers("b#1", ["a#1", "b#1"]) == ({"b"}, {"a"})


def test_of_three_nodes_two_share_a_folder_and_the_third_saves_alone(
    node: Callable[..., CheckpointReports], tmp_path: Path
) -> None:
    made = {name: node(name, tmp_path / ("nfs" if name != "c" else "c")) for name in "abc"}
    members = [f"{name}#1" for name in made]
    enter(*zip(members, made.values(), strict=True))
    assert made["a"].folder_peers("a#1", members) == made["b"].folder_peers("b#1", members) == ({"a", "b"}, {"c"})
    assert made["c"].folder_peers("c#1", members) == ({"c"}, {"a", "b"})


def test_node_without_a_path_is_waited_for_by_nobody(node: Callable[..., CheckpointReports], tmp_path: Path) -> None:
    a, b = node("a", tmp_path), node("b", None)
    enter(("a#1", a), ("b#1", b))
    assert a.folder_peers("a#1", ["a#1", "b#1"]) == ({"a"}, frozenset())


def test_one_folder_that_was_asked_for_and_is_not_there_is_refused(
    node: Callable[..., CheckpointReports], tmp_path: Path
) -> None:
    enter(("a#1", node("a", tmp_path / "a", True)))
    with pytest.raises(ConfigError, match=r"ckpt\.shared=true, and ckpt\.path=.* is not the folder of a: mount one"):
        node("b", tmp_path / "b", True).exchange("b#1", ["a#1", "b#1"], HELD)
    node("c", tmp_path / "a", True).exchange("c#1", ["a#1", "c#1"], HELD)


def test_folders_of_their_own_that_were_asked_for_are_not_looked_into(
    node: Callable[..., CheckpointReports], table: Table, tmp_path: Path
) -> None:
    a, b = node("a", tmp_path, False), node("b", tmp_path, False)
    enter(("a#1", a), ("b#1", b))
    assert a.folder_peers("a#1", ["a#1", "b#1"]) == ({"a"}, frozenset())


def test_mark_of_an_earlier_life_is_removed_and_the_own_one_at_the_end(
    node: Callable[..., CheckpointReports], tmp_path: Path
) -> None:
    killed, other = node("a", tmp_path), node("a.b", tmp_path)
    enter(("a#1", killed), ("a.b#1", other))
    again = node("a", tmp_path)
    again.exchange("a#2", ["a#2", "a.b#1"], HELD)
    assert sorted(path.name.rpartition(".")[0] for path in (tmp_path / "r" / MARKS).iterdir()) == ["a", "a.b"]
    again.close()
    other.close()
    assert not list((tmp_path / "r" / MARKS).iterdir())


def test_node_that_cannot_write_a_mark_says_so_and_saves_alone(
    node: Callable[..., CheckpointReports],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    a = node("a", tmp_path)
    enter(("a#1", a))
    monkeypatch.setattr(LocalStorage, "write", fails)
    b = node("b", tmp_path)
    b.exchange("b#1", ["a#1", "b#1"], HELD)
    assert b.folder_peers("b#1", ["a#1", "b#1"])[0] == {"b"} and a.folder_peers("a#1", ["a#1", "b#1"])[0] == {"a"}
    assert "the file system is read-only" in str(vars(caplog.records[0])["fields"])


def test_what_stands_already_is_not_told_again(
    node: Callable[..., CheckpointReports], table: Table, tmp_path: Path
) -> None:
    a = node("a", tmp_path)
    enter(("a#1", a))
    writes = table.writes
    a.exchange("a#1", ["a#1"], HELD)
    assert table.writes == writes
    a.exchange("a#1", ["a#1"], replace(HELD, held=None))
    assert table.said["a#1"].held is None


def test_store_that_lost_what_was_told_is_told_again_and_one_out_of_reach_holds_nothing_up(
    node: Callable[..., CheckpointReports], table: Table, tmp_path: Path
) -> None:
    a, b = node("a", tmp_path), node("b", tmp_path)
    enter(("a#1", a))
    table.said.clear()
    b.exchange("b#1", ["a#1", "b#1"], HELD)
    assert a.folder_peers("a#1", ["a#1", "b#1"])[0] == {"a", "b"}, "b has seen the mark, which is in the folder"
    assert b.folder_peers("b#1", ["a#1", "b#1"])[0] == {"a", "b"} and "a#1" in table.said
    table.is_lost = True
    assert a.folder_peers("a#1", ["a#1", "b#1", "c#1"])[0] == {"a", "b"}
