"""scripts/corpus.py: the text that experiments/curve.toml trains on is the same in every clone."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def script(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("corpus", root / "scripts" / "corpus.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.soak  # half a minute; versions are compared each time, and wheels of a version do not change
@pytest.mark.slow
def test_corpus_of_this_environment_is_the_listed_one(root: Path, tmp_path: Path) -> None:
    asked = [sys.executable, root / "scripts" / "corpus.py", f"--out={tmp_path / 'corpus.parquet'}"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "9908 documents, 119.6 MB, of 40 packages" in done.stdout


def test_packages_of_the_list_are_pinned(script: ModuleType) -> None:
    listed = script.read_list(script.LIST.read_text())
    pins = script.pins()
    assert len(listed) >= 40 and all(pins[name] == version for name, version in map(str.split, listed))
    assert sum(int(line.split()[3]) for line in listed.values()) > 100e6


def test_document_of_which_half_was_seen_is_left_out(script: ModuleType) -> None:
    first, other = b"one line\nanother line\n", b"a third line\na fourth line\n"
    mixed = b"one line\na third line, and longer than what is known\n"
    assert list(script.without_copies([first, other, first + b"x\n", mixed], set())) == [first, other, mixed]


def test_what_differs_is_named(script: ModuleType) -> None:
    listed = {"a 1": script.line_of("a 1", [b"text"]), "b 2": script.line_of("b 2", [b"more"])}
    assert script.differences(listed, listed) == []
    found = {"a 1": script.line_of("a 1", [b"texts"])}
    assert script.differences(listed, found) == ["a 1: other files", "b 2: not installed"]


def test_short_files_and_those_that_are_no_text_are_left_out(script: ModuleType, tmp_path: Path) -> None:
    for name, content in (("short", b"x"), ("binary", b"\0" * 300), ("latin", b"\xe9" * 300), ("text", b"x\n" * 200)):
        (tmp_path / name).write_bytes(content)
    assert [bool(script.text_of(tmp_path / name)) for name in ("short", "binary", "latin", "text", "none")] == [
        *(False, False, False),
        *(True, False),
    ]
