"""Each defect of docs/defects.md is kept out by tests that carry its number and run every day."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

NUMBERS = range(1, 13)
NEEDS_A_GPU = "gpu"


@dataclass(frozen=True)
class Mark:
    """`pytest.mark.NAME` or `pytest.mark.NAME(...)` as it stands in a file."""

    name: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """A test function: `path::name`, and its marks with those of its file."""

    where: str
    marks: tuple[Mark, ...]

    @property
    def defects(self) -> tuple[int, ...]:
        return tuple(mark.arguments[0] for mark in self.marks if mark.name == "defect")


def _mark(node: ast.expr) -> Mark | None:
    arguments: Sequence[ast.expr] = ()
    if isinstance(node, ast.Call):
        node, arguments = node.func, node.args
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pytest.mark":
        return Mark(node.attr, tuple(a.value if isinstance(a, ast.Constant) else a for a in arguments))
    return None


def _marks(nodes: Sequence[ast.expr]) -> tuple[Mark, ...]:
    return tuple(mark for mark in map(_mark, nodes) if mark is not None)


def _marks_of_file(tree: ast.Module) -> tuple[Mark, ...]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            return _marks(node.value.elts if isinstance(node.value, ast.List) else [node.value])
    return ()


def _cases(path: str, tree: ast.Module) -> Iterator[Case]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield Case(f"{path}::{node.name}", _marks(node.decorator_list) + _marks_of_file(tree))


@pytest.fixture(scope="module")
def trees(trees_of_tests: Mapping[Path, ast.Module]) -> dict[str, ast.Module]:
    return {path.as_posix(): tree for path, tree in trees_of_tests.items() if path.name.startswith("test_")}


@pytest.fixture(scope="module")
def tagged(trees: Mapping[str, ast.Module]) -> list[Case]:
    """The tests that keep a defect out."""
    cases = [case for path, tree in trees.items() for case in _cases(path, tree)]
    return [case for case in cases if case.defects]


@pytest.fixture(scope="module")
def sections(root: Path) -> dict[int, str]:
    """What docs/defects.md says of each number, in its order."""
    text = (root / "docs" / "defects.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (\d+)\. ", text, flags=re.MULTILINE)[1:]
    assert len(parts) == 2 * len(set(parts[::2])), "a number has two sections"
    return {int(number): section for number, section in zip(parts[::2], parts[1::2], strict=True)}


def test_every_defect_has_a_test_and_every_tag_a_defect(tagged: Sequence[Case]) -> None:
    assert {number for case in tagged for number in case.defects} == set(NUMBERS)


def test_every_tag_stands_on_a_test(trees: Mapping[str, ast.Module], tagged: Sequence[Case]) -> None:
    """A tag inside a class, a parameter or a constant would not be seen by the others."""
    tags = [
        mark
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and (mark := _mark(node)) is not None and mark.name == "defect"
    ]
    assert len(tags) == sum(len(case.defects) for case in tagged)


def test_document_has_a_section_for_each_defect(sections: Mapping[int, str]) -> None:
    assert list(sections) == list(NUMBERS)


def test_document_names_exactly_the_tests_that_carry_the_number(
    sections: Mapping[int, str], tagged: Sequence[Case]
) -> None:
    carry: dict[int, set[str]] = defaultdict(set)
    for case in tagged:
        for number in case.defects:
            carry[number].add(case.where)
    assert {number: set(re.findall(r"`(tests/\S+::test_\w+)`", text)) for number, text in sections.items()} == carry


def test_tagged_tests_run_every_day(root: Path, tagged: Sequence[Case]) -> None:
    """A predecessor's tests of joining and leaving existed, and were all skipped."""
    pyproject = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    options: list[str] = pyproject["tool"]["pytest"]["ini_options"]["addopts"]
    left_out = {*re.findall(r"\bnot (\w+)", options[options.index("-m") + 1]), NEEDS_A_GPU, "skip", "skipif", "xfail"}
    assert "faults" not in left_out
    assert [case.where for case in tagged if left_out & {mark.name for mark in case.marks}] == []


# -- tests that never run -------------------------------------------------------------------------------------------


def _never_run(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of what keeps a test from running, or from counting, on every machine."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr="skip" | "xfail" | "gpu") if _mark(node) is not None:
                yield node.lineno, ast.unparse(node)
            case ast.Call(func=ast.Attribute(attr="skipif"), args=[ast.Constant(), *_]):
                yield node.lineno, ast.unparse(node)
            case ast.Module(body=body) | ast.FunctionDef(body=body) | ast.With(body=body):
                calls = [s.value for s in body if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)]
                yield from ((c.lineno, ast.unparse(c)) for c in calls if ast.unparse(c.func) == "pytest.skip")
            case _:
                pass


@pytest.mark.parametrize(
    "source",
    [
        "@pytest.mark.skip\ndef test_join(): ...",
        "@pytest.mark.skip(reason='flaky')\ndef test_join(): ...",
        "@pytest.mark.skipif(True, reason='flaky')\ndef test_join(): ...",
        "@pytest.mark.xfail\ndef test_join(): ...",
        "@pytest.mark.gpu\ndef test_join(): ...",
        "pytestmark = [pytest.mark.faults, pytest.mark.skip]",
        "pytest.skip('later', allow_module_level=True)",
        "def test_join():\n    pytest.skip('later')",
        "x = [pytest.param(1, marks=pytest.mark.skip)]",
    ],
)
def test_tests_that_never_run_are_found(source: str) -> None:
    assert len(list(_never_run(ast.parse(source)))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "@pytest.mark.skipif(shutil.which('cc') is None, reason='no compiler')\ndef test_join(): ...",
        "def test_join():\n    if not has_network():\n        pytest.skip('no network')",
        "@pytest.mark.faults\ndef test_join(): ...",
    ],
)
def test_tests_that_run_where_they_can_are_let_be(source: str) -> None:
    assert list(_never_run(ast.parse(source))) == []


@pytest.mark.defect(10)
def test_tests_with_real_processes_are_skipped_for_no_reason_but_the_machine(trees: Mapping[str, ast.Module]) -> None:
    real = {path: tree for path, tree in trees.items() if path.startswith(("tests/faults/", "tests/integration/"))}
    assert len(real) >= 10
    assert [f"{path}:{line} {what}" for path, tree in real.items() for line, what in _never_run(tree)] == []
