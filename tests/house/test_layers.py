"""Imports go down the layers, never sideways; importing does nothing but define."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

LAYERS = (
    {"errors"},
    {"config", "kernels", "observe"},
    {"data", "node"},
    {"elastic.membership", "model", "state"},
    {"elastic.transport", "outer.sparse"},
    {"elastic.store"},
    {"elastic.guardian", "elastic.recovery"},
    {"checkpoint", "elastic.rounds"},
    {"export", "outer"},
    {"checks"},
    {"runtime"},
    {"cli", "dropin", "tools", "train"},
)
"""From the bottom: the rooms of the package, and its files."""

FREE = {"zeroband", "zeroband.config.schema", "zeroband.errors", "zeroband.observe.log"}
"""May be imported from everywhere."""

FORBIDDEN = {"outer": {"elastic.store", "elastic.guardian", "elastic.recovery"}}
"""An outer algorithm knows the members and what travels between them, never the store, a lease or the way in."""

WHAT_IMPORTING_MAY_NOT_TOUCH = {"Popen", "Process", "Thread", "basicConfig", "cuda", "environ", "getenv"}


def _room(module: str) -> str:
    """The room that a module lies in: the longest that begins its name."""
    name = module.removeprefix("zeroband.")
    rooms = [room for rooms in LAYERS for room in rooms if f"{name}.".startswith(f"{room}.")]
    assert rooms or name == "elastic", f"{module} is in no room; add it to LAYERS here and to docs/architecture.md"
    return max(rooms, key=len, default=name)


def _height(room: str) -> int:
    return next((height for height, rooms in enumerate(LAYERS) if room in rooms), 0)


def objection(importer: str, imported: str) -> str | None:
    """Why `importer` may not import `imported` (dotted module names), or None where it may."""
    if imported in FREE or importer == "zeroband":  # the package itself names what users import
        return None
    above, below = _room(importer), _room(imported)
    if above == below:
        return None
    if _height(above) <= _height(below):
        beside = "beside" if _height(above) == _height(below) else "above"
        return f"{importer} imports {imported}, which lies {beside} it"
    if below in FORBIDDEN.get(above, set()):
        return f"{importer} imports {imported}; {above} knows nothing of {below}"
    return None


def _imports(module: Any, names: Mapping[str, Any]) -> Iterator[str]:
    """Modules of the package that a module imports, at its top or inside a function."""
    package = module.name if module.path.name == "__init__.py" else module.name.rpartition(".")[0]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "zeroband")
        elif isinstance(node, ast.ImportFrom):
            climbed = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*climbed, *([node.module] if node.module else [])])
            if origin.split(".")[0] == "zeroband":
                for alias in node.names:
                    yield f"{origin}.{alias.name}" if f"{origin}.{alias.name}" in names else origin


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("zeroband.outer.diloco", "zeroband.elastic.rounds.elastic_device_mesh", True),
        ("zeroband.outer.diloco", "zeroband.elastic.store.redis_store", False),
        ("zeroband.model.loss", "zeroband.data.index", True),
        ("zeroband.model.loss", "zeroband.state.flat", False),
        ("zeroband.model.loss", "zeroband.errors", True),
        ("zeroband.elastic.rounds.member", "zeroband.outer.diloco", False),
        ("zeroband.elastic.transport.dial", "zeroband.elastic.store.redis_store", False),
        ("zeroband.config.load", "zeroband.observe.metrics", False),
        ("zeroband.runtime.loop", "zeroband.node.mesh", True),
        ("zeroband.runtime.join", "zeroband.tools.ctl", False),
        ("zeroband", "zeroband.dropin", True),
        ("zeroband.runtime.join", "zeroband.dropin", False),
    ],
)
def test_objection_is_raised_to_imports_sideways_and_up(importer: str, imported: str, allowed: bool) -> None:
    assert (objection(importer, imported) is None) == allowed


def test_imports_go_down_the_layers_only(modules: Mapping[str, Any]) -> None:
    edges = {(name, imported) for name, module in modules.items() for imported in _imports(module, modules)}
    assert len(edges) > 50
    assert [why for edge in sorted(edges) if (why := objection(*edge))] == []


def circles(imports: Mapping[str, set[str]]) -> list[tuple[str, ...]]:
    """Groups of modules that import one another, directly or through others."""

    def reached(start: str) -> set[str]:
        found, left = set[str](), [start]
        while left:
            new = imports.get(left.pop(), set()) - found
            found |= new
            left += new
        return found

    ways = {name: reached(name) for name in imports}
    return sorted(
        {tuple(sorted(o for o in ways[name] if name in ways.get(o, ()))) for name in ways if name in ways[name]}
    )


def test_no_modules_import_one_another_in_a_circle(modules: Mapping[str, Any]) -> None:
    """Imports for type checking alone count: who reads one of the files has to read the other."""
    imports = {name: set(_imports(module, modules)) - {name} for name, module in modules.items()}
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [("a", "b", "c")]
    assert circles(imports) == []


def test_package_root_holds_the_trainer_the_command_and_the_errors_alone(root: Path) -> None:
    assert {path.name for path in (root / "src/zeroband").glob("*.py")} == {
        *("__init__.py", "cli.py", "errors.py", "train.py"),
    }


def test_no_packages_import_one_another_in_a_circle(modules: Mapping[str, Any]) -> None:
    """Rooms within one, such as the tools, lie on no layer of their own. The root is no room: it holds the errors."""
    folders = {
        name: str(module.path.parent) for name, module in modules.items() if module.path.parent.name != "zeroband"
    }
    imports: dict[str, set[str]] = {folder: set() for folder in folders.values()}
    for name, folder in folders.items():
        imports[folder] |= {folders[other] for other in _imports(modules[name], modules) if other in folders} - {folder}
    assert sum(map(len, imports.values())) > 50
    assert circles(imports) == []


def test_every_package_says_what_it_owns(root: Path) -> None:
    folders = {path.parent for path in (root / "src/zeroband").rglob("*.py")}
    faces = {folder: ast.parse((folder / "__init__.py").read_text(encoding="utf-8")) for folder in folders}
    assert [str(folder) for folder, face in faces.items() if not ast.get_docstring(face)] == []


def test_ruff_asks_for_docstrings_and_refuses_dead_code_prints_and_tangles(root: Path) -> None:
    lint = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]["lint"]
    assert {"C90", "D", "ERA", "T20"} <= set(lint["select"])
    assert not {"C90", "C901", "D", "D100", "D101", "D103", "D104", "ERA", "ERA001", "T20", "T201"} & set(
        lint["ignore"]
    )


RUN_BY_IMPORTING_THEM = {"zeroband.tools.cluster.preload"}
"""What `multiprocessing` imports in its server, which is the one way to run something there."""


def _is_definition(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)  # a docstring
    if isinstance(node, ast.If):
        return ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'")
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    return isinstance(node, kinds)


def test_modules_only_define_when_they_are_imported(modules: Mapping[str, Any]) -> None:
    wrong = [
        f"{module.path}:{node.lineno} runs {ast.unparse(node)[:60]!r}"
        for module in modules.values()
        if module.name not in RUN_BY_IMPORTING_THEM
        for node in module.tree.body
        if not _is_definition(node)
    ]
    assert wrong == []


def test_constants_of_modules_touch_no_device_environment_or_thread(modules: Mapping[str, Any]) -> None:
    wrong = [
        f"{module.path}:{node.lineno} touches {name}"
        for module in modules.values()
        for statement in module.tree.body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for node in ast.walk(statement)
        if (name := getattr(node, "attr", getattr(node, "id", None))) in WHAT_IMPORTING_MAY_NOT_TOUCH
    ]
    assert wrong == []


LOAD_NO_TORCH = (
    *("zeroband.config", "zeroband.cli", "zeroband.tools.cluster", "zeroband.tools.demo", "zeroband.checkpoint.writer"),
    *("zeroband.checks", "zeroband.tools.plan", "zeroband.train"),
)
IMPORTS = """
import sys
from importlib import import_module

for name in sys.argv[1:]:
    import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"import {name} loads torch")
"""


def test_modules_load_no_torch(root: Path) -> None:
    command = [sys.executable, "-c", IMPORTS, *LOAD_NO_TORCH]
    done = subprocess.run(command, cwd=root / "src", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


ONE_STEP = """
import sys
from contextlib import ExitStack
from zeroband.config import load_config
from zeroband.elastic.membership.departure import Departure
from zeroband.node.mesh import init_local_mesh
from zeroband.runtime.loop import train

config = load_config(sys.argv[1:], {})
with ExitStack() as stack:
    local = init_local_mesh({})
    stack.callback(local.close)
    train(config, local, Departure(grace_s=1.0), stack)
print({"sympy", "torch._dynamo", "torch.distributed.tensor"} & sys.modules.keys())
"""


@pytest.mark.slow
def test_one_rank_in_float32_trains_without_loading_fsdp_or_torchs_compiler(root: Path, tmp_path: Path) -> None:
    """They take longer to load than all the rest, and so does whatever of torch loads them at its first call."""
    settings = {
        "data.source.type": "synthetic",
        "data.cache_dir": tmp_path,
        "run.dir": tmp_path,
        "train.dtype": "float32",
        "train.total_steps": 2,
        "train.batch_size": 4,
        "model.d_model": 32,
        "model.n_layers": 1,
        "model.n_heads": 2,
        "data.seq_length": 32,
    }
    flags = [f"--{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-c", ONE_STEP, *flags]
    done = subprocess.run(command, cwd=root / "src", capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr
