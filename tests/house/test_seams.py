"""Tests use what is public: whoever changes how a thing works inside changes no test of what it does."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ALLOWED = {"os._exit"}
"""Public in spite of its name: ends a forked child without what belongs to its parent."""


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Where a test reads, calls or imports what belongs to somebody else, and what."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=attr) if _is_private(attr) and ast.unparse(node) not in ALLOWED:
                yield node.lineno, ast.unparse(node)
            case ast.ImportFrom(module=origin, names=names):
                yield from ((node.lineno, f"{origin}.{n.name}") for n in names if _is_private(n.name))
            case _:
                pass


def test_no_test_uses_a_private_name(trees_of_tests: Mapping[Path, ast.Module]) -> None:
    assert len(trees_of_tests) > 200
    found = [(file, line, name) for file, tree in trees_of_tests.items() for line, name in private_names(tree)]
    assert found == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("store._call(1)", ["store._call"]),
        ("a.b._c.d = 1", ["a.b._c"]),
        ("from zeroband.a import _b, c", ["zeroband.a._b"]),
        ("self._a = cls._b", []),
        ("self.a._b", ["self.a._b"]),
        ("a.__dict__, os._exit(1), a.b_", []),
    ],
)
def test_private_names_are_found(source: str, found: list[str]) -> None:
    assert [name for _, name in private_names(ast.parse(source))] == found
