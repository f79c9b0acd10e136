"""The package's sources, parsed once for all house rules."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Module:
    """One file of the package: its dotted name, where it lies and its syntax tree."""

    name: str
    path: Path
    tree: ast.Module


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


def parsed(paths: Iterable[Path]) -> dict[Path, ast.Module]:
    """Trees of files by their paths from the root. Making them takes less time than garbage collection would."""
    gc.disable()
    try:
        return {path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(paths)}
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def trees_of_tests() -> dict[Path, ast.Module]:
    """All files of the tests."""
    return parsed((ROOT / "tests").rglob("*.py"))


@pytest.fixture(scope="session")
def modules() -> dict[str, Module]:
    source = ROOT / "src"
    trees = parsed((source / "zeroband").rglob("*.py"))
    names = {path: ".".join(path.relative_to("src").with_suffix("").parts).removesuffix(".__init__") for path in trees}
    return {name: Module(name, path, trees[path]) for path, name in names.items()}
