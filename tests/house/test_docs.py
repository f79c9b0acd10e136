"""What is written for people is in step with the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import zeroband
import zeroband.config
import zeroband.errors

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


def test_docstrings_of_the_package_stand_alone(modules: Mapping[str, Any]) -> None:
    """One that begins with "Of" needs the name above it, and "Nothing" or "The same" what was said before."""
    begun = re.compile(r'"""(Of|Nothing|The same)\b.*')
    found = [
        f"{module.path}: {line.strip()}"
        for module in modules.values()
        for line in module.path.read_text(encoding="utf-8").splitlines()
        if begun.match(line.strip())
    ]
    assert found == []


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


@pytest.fixture(scope="module")
def documents(root: Path) -> dict[str, str]:
    """What people read, by its path."""
    paths = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "wheelhouse").glob("*.md")]
    paths += (root / "deploy").rglob("*.md")
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def test_document_of_configurations_names_every_preset(documents: Mapping[str, str]) -> None:
    assert [preset for preset in PRESETS if f"`{preset}`" not in documents["docs/configurations.md"]] == []


def test_tree_in_the_architecture_exists(root: Path, documents: Mapping[str, str]) -> None:
    tree = documents["docs/architecture.md"].partition("## The tree")[2].partition("```")[2].partition("```")[0]
    named = re.findall(r"^(\S+/|\S+\.\w+)  ", tree, flags=re.MULTILINE)
    assert len(named) >= 10
    assert [path for path in named if not (root / path).exists()] == []


def test_package_folders_and_files_are_in_the_tree(documents: Mapping[str, str], modules: Mapping[str, Any]) -> None:
    units = {module.path.parts[2] for module in modules.values() if module.path.parts[2] != "__init__.py"}
    named = {f"src/zeroband/{unit}" if unit.endswith(".py") else f"src/zeroband/{unit}/" for unit in units}
    assert sorted(path for path in named if path not in documents["docs/architecture.md"]) == []


@pytest.mark.defect(10)
def test_environment_variables_that_users_are_told_are_accepted(documents: Mapping[str, str]) -> None:
    told = documents["README.md"] + documents["docs/configurations.md"]
    given = dict(re.findall(r"\b(ZERO_BAND_\w+)=(\S+)", told))
    assert set(re.findall(r"\bZERO_BAND_\w+", told)) == set(given)
    assert len(given) >= 5
    environ = {name: re.sub(r"\$\(?\w+\)?", "4", value) for name, value in given.items()}
    config = zeroband.config.load_config([f"@{CONFIGS / '150M.toml'}"], environ=environ)
    assert (config.log_level, config.train.micro_bs, config.run.id) == ("DEBUG", 8, "first-try")


def _typed(text: str) -> str:
    """All that a document has somebody type."""
    return "".join(re.findall(r"^```bash[^\n]*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE))


def test_blocks_set_the_variables_that_they_use(documents: Mapping[str, str]) -> None:
    missing: list[str] = []
    for name, text in documents.items():
        used = set(re.findall(r"\$\{?([A-Z][A-Z_0-9]+)", _typed(text)))
        given = set(re.findall(r"(?:^|[\s;(])([A-Z][A-Z_0-9]+)=", _typed(text), flags=re.MULTILINE))
        missing += [f"{name}: {variable}" for variable in used - given if not variable.startswith("SLURM_")]
    assert missing == []


def test_blocks_put_no_secret_on_a_command_line(documents: Mapping[str, str]) -> None:
    """Every user of a machine sees those; `export` is the shell's own."""
    shown = re.compile(r"--requirepass|--auth-pass|redis-cli.* -a |--run[.]token[= ]|://[^/\s]*:[^/\s]*@")
    lines = [(name, line) for name, text in documents.items() for line in _typed(text).splitlines()]
    assert [place for place in lines if shown.search(place[1]) and not place[1].startswith("export ")] == []
    assert len(lines) > 150


def test_documents_have_no_open_places(documents: Mapping[str, str]) -> None:
    assert [name for name, text in documents.items() if re.search(r"<!-- FILL.*?-->", text)] == []


def _anchors(text: str) -> set[str]:
    """What a link into a document may name: its headings as forges write them, and anchors of its own."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


def test_links_between_documents_lead_somewhere(root: Path, documents: Mapping[str, str]) -> None:
    broken: list[str] = []
    for name, text in documents.items():
        for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
            if "://" not in target:
                path = (root / name).parent / target if target else root / name
                is_there = path.exists() and (not anchor or anchor in _anchors(path.read_text(encoding="utf-8")))
                broken += [] if is_there else [f"{name} -> {target}#{anchor}"]
    assert broken == []


def test_files_and_commands_in_documents_exist(
    root: Path, documents: Mapping[str, str], modules: Mapping[str, Any]
) -> None:
    told = [(name, text) for name, text in documents.items() if name != "CHANGELOG.md"]  # which names what was
    files = r"(?<![\w/.-])(?:bench|configs|examples|experiments|scripts|src|tests)/[\w./-]*\w"
    missing = [
        f"{name}: {path}" for name, text in told for path in re.findall(files, text) if not (root / path).exists()
    ]
    assert missing == []
    commands = {(name, command) for name, text in told for command in re.findall(r"`(?:uv run )?zeroband (\w+)", text)}
    known = set(re.findall(r"'(\w+)': _Command\(", ast.unparse(modules["zeroband.cli"].tree)))
    assert len(known) >= 10
    assert [told for told in sorted(commands) if told[1] not in known] == []


def test_citation_names_the_version_and_the_distribution(root: Path) -> None:
    citation = (root / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {zeroband.__version__}\n" in citation
    assert zeroband.errors.DISTRIBUTION in citation


def test_names_of_the_code_in_documents_are_those_of_the_code(root: Path, documents: Mapping[str, str]) -> None:
    """Classes, their members, and files: what was renamed is renamed in the documents, too."""
    sources = [
        path for folder in ("src", "tests", "bench", "examples", "scripts") for path in (root / folder).rglob("*")
    ]
    words = set(
        re.findall(r"\w+", " ".join(p.read_text() for p in sources if p.suffix in {".py", ".h", ".cpp", ".sh"}))
    )
    places = {path.relative_to(root).as_posix() for path in sources}
    wrong: list[str] = []
    for document, text in documents.items():
        if document == "CHANGELOG.md":  # names what was
            continue
        saved = set(re.findall(r"^```\w+ file=(\S+)$", text, flags=re.MULTILINE))  # by whoever follows a tutorial
        for name in re.findall(r"`([A-Za-z_][\w./]*)`", text):
            if name in saved:
                continue
            if name.endswith(".py"):
                wrong += [] if any(f"/{place}".endswith(f"/{name}") for place in places) else [f"{document}: {name}"]
            elif re.fullmatch(r"[A-Z]\w*[a-z]\w*(\.\w+)*", name):
                wrong += [f"{document}: {name}" for part in name.split(".") if part not in words]
    assert [name for name in wrong if not name.endswith(": Dockerfile")] == []


def test_every_statement_on_another_project_names_its_source(root: Path) -> None:
    text = (root / "docs" / "comparison.md").read_text(encoding="utf-8").partition("## What an operator needs")[2]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(lines) > 15
    for line in lines[1:]:
        need, here, shown, *others = (cell.strip() for cell in line.strip("|").split("|"))
        assert need and here and set(others) != {"-"}, line
        for path in re.findall(r"`(tests/[^`]*)`", shown) or [shown.partition("](")[2].rstrip(")")]:
            assert (root / path).exists() or (root / "docs" / path).exists(), line
        for cell, project in zip(others, ("psyche", "torchft", "prime-rl"), strict=True):
            source = rf"\[[^()]+\]\(https://github\.com/[\w-]+/{project}/blob/[0-9a-f]{{40}}/\S+\)"
            assert re.fullmatch(rf"-|{source}(, {source})*", cell), f"{need}: {cell}"
