"""Commands that we print run when they are copied: quoted, and with a program that is found."""

from __future__ import annotations

import os
import shlex
import sysconfig
from pathlib import Path

import pytest

from zeroband.observe.commands import command, typed

ODD = ("/runs/a [1] {x}", "it's", "$HOME #2")


def test_words_come_back_from_a_shell() -> None:
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
