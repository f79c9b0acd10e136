"""The package's sources, parsed once for all house rules."""

from __future__ import annotations

import ast
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


@pytest.fixture(scope="session")
def modules() -> dict[str, Module]:
    source = ROOT / "src"
    found: dict[str, Module] = {}
    for path in sorted((source / "zeroband").rglob("*.py")):
        name = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        text = path.read_text(encoding="utf-8")
        found[name] = Module(name, path.relative_to(ROOT), ast.parse(text))
    return found
