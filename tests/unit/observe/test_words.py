"""Events as sentences, counts with prefixes, and commands that run when they are copied."""

from __future__ import annotations

import os
import shlex
import sysconfig
from pathlib import Path
from string import Formatter

import pytest

from zeroband.observe.events import EVENTS
from zeroband.observe.view import EventView
from zeroband.observe.words import command, event_in_words, human_bytes, human_count, typed

ODD = ("/runs/a [1] {x}", "it's", "$HOME #2")


@pytest.mark.parametrize("kind", list(EVENTS))
def test_words_use_fields_that_the_kind_always_carries(kind: str) -> None:
    used = {name for _, name, _, _ in Formatter().parse(EVENTS[kind].words) if name}
    assert used <= {"node", *EVENTS[kind].fields}


@pytest.mark.parametrize(
    ("kind", "fields", "sentence"),
    [
        ("peer_lost", {"round": 3, "member_ids": ["c#2", "b#1"]}, "Round 3 continues without b, c."),
        ("danced", {}, "a: danced"),
        ("left", {}, "a left: ?."),
    ],
)
def test_members_are_said_by_their_nodes_and_what_is_missing_or_unknown_is_told_all_the_same(
    kind: str, fields: dict[str, object], sentence: str
) -> None:
    assert event_in_words(EventView(1.0, "a", kind, fields)) == sentence


COUNTS = {0: "0", 7: "7", 999: "999", 999.6: "1k", 1000: "1k", 1234567: "1.23M", 2.5e9: "2.5G", 1e18: "1e+03P"}
BYTES = {0: "0 B", 512: "512 B", 86_800_000: "86.8 MB"}


def test_counts_have_three_digits_and_bytes_a_prefix() -> None:
    assert {count: human_count(count) for count in COUNTS} == COUNTS
    assert {size_bytes: human_bytes(size_bytes) for size_bytes in BYTES} == BYTES


def test_words_of_a_command_come_back_from_a_shell() -> None:
    assert shlex.split(command("export", *ODD)) == ["zeroband", "export", *ODD]


def test_program_is_the_shortest_that_leads_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = tmp_path / ".venv" / "bin"
    scripts.mkdir(parents=True)
    (scripts / "zeroband").write_text("#!/bin/sh\n")
    (scripts / "zeroband").chmod(0o755)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(scripts))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert shlex.split(typed("status", *ODD)) == [".venv/bin/zeroband", "status", *ODD]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert typed("runs") == f"{scripts}/zeroband runs"
    monkeypatch.setenv("PATH", f"{scripts}{os.pathsep}/bin")
    assert typed("runs") == "zeroband runs"
