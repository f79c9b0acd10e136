"""docs/troubleshooting.md names every error that a user can meet, in the words that are printed, and no other.

Messages that name their own remedy stand in self_explaining.txt instead: whoever adds one there has read it as a user.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ENDING = {
    *("ConfigError", "UnsupportedArchitecture", "StoreLost", "StorageLost", "RunOver", "Leaving", "CheckpointFailed"),
    *("RecoveryFailed", "LearnsNothing", "BadRow", "LineEnds"),
}
"""Raised with messages of their own, which a user reads."""

GAP = "…"
"""What differs from case to case."""

LEAST_LETTERS = 5


def _text(node: ast.expr) -> str | None:
    """A string of the sources with a gap for each value in it; None for what is no string."""
    match node:
        case ast.Constant(value=str(text)):
            return " ".join(text.split("\n"))
        case ast.JoinedStr(values=parts):
            shown = "".join((_text(part) or "") if isinstance(part, ast.Constant) else GAP for part in parts)
            return re.sub(f"{GAP}+", GAP, shown)
        case _:
            return None


def _texts(tree: ast.AST) -> Iterator[str]:
    yield from (text for node in ast.walk(tree) if isinstance(node, ast.expr) and (text := _text(node)) is not None)


def _findings(tree: ast.AST) -> Iterator[str]:
    """What is printed of a `Finding` that may stop a run."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="Finding"), args=[what, seen, *_], keywords=[*_, ast.keyword(arg="stops")]):
                yield f"{_text(what) or GAP}: {_text(seen) or GAP}"
            case _:
                pass


def _raised(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each error that is raised with a message of its own."""
    for node in ast.walk(tree):
        match node:
            case ast.Raise(exc=ast.Call(func=ast.Name(id=name), args=[message, *_])) if name in ENDING:
                if text := _text(message):
                    yield node.lineno, text
            case _:
                pass


def says(symptom: str, texts: str) -> bool:
    """Whether a symptom stands for one of these texts, a line each: its words are there, in its order.

    One of hardly any words stands for the text that it is alone.
    """
    if sum(map(str.isalpha, symptom)) < LEAST_LETTERS:
        return symptom in texts.splitlines()
    return _pattern(symptom).search(texts) is not None


@cache
def _pattern(symptom: str) -> re.Pattern[str]:
    """Compiled once: each of 200 symptoms is held against each of 400 texts."""
    return re.compile(".*".join(re.escape(part) for part in re.split(rf"\s*{GAP}\s*", symptom) if part))


@pytest.fixture(scope="module")
def document(root: Path) -> str:
    return (root / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def symptoms(document: str) -> list[str]:
    """What the tables of printed messages have in their first column, and the self-explaining messages."""
    tables = re.findall(r"^\| printed .*\n\|[-|]*\n((?:\|.*\n)+)", document, flags=re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    listed = [symptom for row in rows for symptom in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    assert len(listed) > 150
    lines = Path(__file__).with_name("self_explaining.txt").read_text(encoding="utf-8").splitlines()
    return [*listed, *(line for line in lines if line and not line.startswith("#"))]


@pytest.mark.parametrize(
    ("symptom", "text", "stands"),
    [
        ("no file matches …", "data.source.paths: no file matches …", True),
        ("… answers nonsense: …", "it answers nonsense: …", True),
        ("the lease of … ran out", "the lease of … and the run", False),
        ("ran out … lease", "the lease of … ran out", False),
        ("…: …", "…: …", True),
        ("…: …", "the lease of …: ran out", False),
        ("the lease ran out", "the lease\nran out", False),
    ],
)
def test_symptom_stands_for_texts_with_its_words_in_their_order(symptom: str, text: str, stands: bool) -> None:
    assert says(symptom, text) == stands


def test_every_kind_of_error_has_a_row_and_every_row_a_kind(document: str, modules: Mapping[str, Any]) -> None:
    kinds = {node.name for node in modules["zeroband.errors"].tree.body if isinstance(node, ast.ClassDef)}
    table = document.partition("| kind |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)) == kinds - {"ZerobandError"}


def test_every_error_that_ends_a_node_or_a_command_is_there(symptoms: list[str], modules: Mapping[str, Any]) -> None:
    raised = [(f"{module.path}:{line}", text) for module in modules.values() for line, text in _raised(module.tree)]
    assert len(raised) > 150
    assert [(where, text) for where, text in raised if not any(says(symptom, text) for symptom in symptoms)] == []


def test_every_finding_that_stops_a_run_is_there(symptoms: list[str], modules: Mapping[str, Any]) -> None:
    found = [text for module in modules.values() for text in _findings(module.tree)]
    assert len(found) > 15
    assert [text for text in found if not any(says(symptom, text) for symptom in symptoms)] == []


def test_every_symptom_is_what_the_package_prints(symptoms: list[str], modules: Mapping[str, Any]) -> None:
    trees = [module.tree for module in modules.values()]
    texts = "\n".join(text for tree in trees for text in (*_texts(tree), *_findings(tree)))
    assert len(symptoms) > 150
    assert [symptom for symptom in symptoms if not says(symptom, texts)] == []
