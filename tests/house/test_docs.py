"""What is written for people is in step with the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import zeroband.config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
PRESETS = sorted(path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.toml"))


def _drawn_tree(docstring: str) -> dict[str, str | None]:
    """Name -> parent of a tree drawn with box characters, four columns for each level."""
    drawn: dict[str, str | None] = {}
    branch: list[str] = []
    for line in docstring.splitlines():
        match = re.match(r"^((?:[│ ]   )*(?:[├└]── )?)([A-Z]\w+)\b", line)
        if match and (match[1] or not drawn):
            depth = len(match[1]) // 4
            drawn[match[2]] = branch[depth - 1] if depth else None
            branch[depth:] = [match[2]]
    return drawn


def test_error_tree_in_its_docstring_equals_the_classes(modules: Mapping[str, Any]) -> None:
    tree = modules["zeroband.errors"].tree
    text = ast.get_docstring(tree) or ""
    parents = {node.name: ast.unparse(node.bases[0]) for node in tree.body if isinstance(node, ast.ClassDef)}
    expected = {name: None if parent == "Exception" else parent for name, parent in parents.items()}
    assert _drawn_tree(text.partition("\n\n")[2]) == expected


def test_every_field_of_the_schema_says_what_it_is(modules: Mapping[str, Any]) -> None:
    silent: list[str] = []
    for section in (*modules["zeroband.config.schema"].tree.body, *modules["zeroband.config.outer"].tree.body):
        if isinstance(section, ast.ClassDef) and section.name != "RunConfig":
            for field, following in zip(section.body, [*section.body[1:], None], strict=True):
                if isinstance(field, ast.AnnAssign) and not isinstance(following, ast.Expr):
                    silent.append(f"{section.name}.{ast.unparse(field.target)}")
    assert [field for field in silent if not field.endswith(".type")] == []


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_loads_and_opens_with_what_it_is(preset: str) -> None:
    text = (CONFIGS / preset).read_text(encoding="utf-8")
    environ = {"ZERO_BAND_STORE__URL": "redis://localhost:6379"} if "[outer" in text else {}
    zeroband.config.load_config([f"@{CONFIGS / preset}"], environ=environ)
    assert text.startswith("# ")


def test_readme_names_every_preset(root: Path) -> None:
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert [preset for preset in PRESETS if f"`{preset}`" not in readme] == []


def test_tree_in_the_readme_exists(root: Path) -> None:
    readme = (root / "README.md").read_text(encoding="utf-8")
    tree = readme.partition("## The tree")[2].partition("```")[2].partition("```")[0]
    named = re.findall(r"^(\S+/|\S+\.\w+)  ", tree, flags=re.MULTILINE)
    assert len(named) >= 10
    assert [path for path in named if not (root / path).exists()] == []


def test_package_folders_and_files_are_in_the_readme(root: Path, modules: Mapping[str, Any]) -> None:
    readme = (root / "README.md").read_text(encoding="utf-8")
    units = {module.path.parts[2] for module in modules.values() if module.path.parts[2] != "__init__.py"}
    named = {f"src/zeroband/{unit}" if unit.endswith(".py") else f"src/zeroband/{unit}/" for unit in units}
    assert sorted(path for path in named if path not in readme) == []


@pytest.mark.defect(10)
def test_environment_variables_of_the_readme_are_accepted(root: Path) -> None:
    readme = (root / "README.md").read_text(encoding="utf-8")
    given = dict(re.findall(r"\b(ZERO_BAND_\w+)=(\S+)", readme))
    assert set(re.findall(r"\bZERO_BAND_\w+", readme)) == set(given)
    assert len(given) >= 5
    environ = {name: re.sub(r"\$\w+", "secret", value) for name, value in given.items()}
    config = zeroband.config.load_config([f"@{CONFIGS / '150M.toml'}"], environ=environ)
    assert (config.log_level, config.train.micro_bs, config.run.id) == ("DEBUG", 8, "first-try")


def test_readme_has_no_open_places(root: Path) -> None:
    assert re.findall(r"<!-- FILL.*?-->", (root / "README.md").read_text(encoding="utf-8")) == []


def test_links_between_documents_lead_somewhere(root: Path) -> None:
    documents = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "wheelhouse").glob("*.md")]
    broken = [
        f"{document.relative_to(root)} -> {target}"
        for document in documents
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8"))
        if "://" not in target and not (document.parent / target).exists()
    ]
    assert broken == []


def test_names_of_the_code_in_documents_are_those_of_the_code(root: Path) -> None:
    """Classes, their members, and files: what was renamed is renamed in the documents, too."""
    sources = [
        path for folder in ("src", "tests", "bench", "examples", "scripts") for path in (root / folder).rglob("*")
    ]
    words = set(
        re.findall(r"\w+", " ".join(p.read_text() for p in sources if p.suffix in {".py", ".h", ".cpp", ".sh"}))
    )
    files = {path.name for path in sources}
    wrong: list[str] = []
    for document in [*root.glob("*.md"), *(root / "docs").glob("*.md")]:
        text = document.read_text(encoding="utf-8")
        for name in re.findall(r"`([A-Za-z_][\w.]*)`", text):
            if name.endswith(".py"):
                wrong += [] if name in files else [f"{document.name}: {name}"]
            elif re.fullmatch(r"[A-Z]\w*[a-z]\w*(\.\w+)*", name):
                wrong += [f"{document.name}: {name}" for part in name.split(".") if part not in words]
    assert [name for name in wrong if not name.endswith(": Dockerfile")] == []
