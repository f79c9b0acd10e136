"""How long a function may be, and what the package never does."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

FUNCTION_LINES = 50
PICKLING_MODULES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
PICKLING_COLLECTIVES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}
INHERITED_NAMES = ("handle_error",)  # socketserver asks for it
EMPTY_NAMES = ("handle_", "helper", "maybe_", "misc", "util")


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function from `def` to its end, without its docstring."""
    assert function.end_lineno is not None
    first = function.body[0]
    has_docstring = ast.get_docstring(function, clean=False) is not None
    docstring = (first.end_lineno or 0) - first.lineno + 1 if has_docstring else 0
    return function.end_lineno - function.lineno + 1 - docstring


def _offences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    if alias.name.split(".")[0] in PICKLING_MODULES:
                        yield node.lineno, f"imports {alias.name}: bytes from elsewhere would run as code"
            case ast.ImportFrom(module=str(origin)) if origin.split(".")[0] in PICKLING_MODULES:
                yield node.lineno, f"imports {origin}: bytes from elsewhere would run as code"
            case ast.Attribute(attr=attr) | ast.alias(name=attr) if attr in PICKLING_COLLECTIVES:
                yield node.lineno, f"{attr} pickles"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load"), keywords=keywords):
                if not any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in keywords):
                    yield node.lineno, "torch.load without weights_only=True"
            case ast.ExceptHandler(type=None):
                yield node.lineno, "bare except"
            case ast.Global(names=names):
                yield node.lineno, f"global {', '.join(names)}"
            case _:
                pass


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import dumps",
        "dist.broadcast_object_list(x)",
        "from torch.distributed import all_gather_object",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "try:\n    f()\nexcept:\n    pass",
        "def f():\n    global state",
    ],
)
def test_offences_are_found_in_code_that_has_them(source: str) -> None:
    assert len(list(_offences(ast.parse(source)))) == 1


@pytest.mark.defect(11)
def test_package_neither_pickles_nor_hides_errors_nor_keeps_globals(modules: Mapping[str, Any]) -> None:
    found = [f"{module.path}:{line} {what}" for module in modules.values() for line, what in _offences(module.tree)]
    assert found == []


def test_functions_stay_within_their_budget(modules: Mapping[str, Any]) -> None:
    found = {
        f"{module.path}:{function.lineno} {function.name}": _length(function)
        for module in modules.values()
        for function in _functions(module.tree)
        if _length(function) > FUNCTION_LINES
    }
    assert found == {}


def test_modules_say_what_they_are_for(modules: Mapping[str, Any]) -> None:
    assert [str(module.path) for module in modules.values() if not ast.get_docstring(module.tree)] == []


def test_public_classes_and_functions_have_a_docstring(modules: Mapping[str, Any]) -> None:
    modules = {name: module for name, module in modules.items() if name != "zeroband.config.schema"}  # fields have them
    documented = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = [
        f"{module.path}:{node.lineno} {node.name}"
        for module in modules.values()
        for node in module.tree.body
        if isinstance(node, documented) and not node.name.startswith("_") and not ast.get_docstring(node)
    ]
    assert found == []


def test_names_of_modules_and_functions_say_something(modules: Mapping[str, Any]) -> None:
    names = {f"{module.path}": module.path.stem for module in modules.values()}
    for module in modules.values():
        names |= {f"{module.path}:{function.lineno}": function.name for function in _functions(module.tree)}
    ours = {place: name.lstrip("_") for place, name in names.items() if name not in INHERITED_NAMES}
    assert {place: name for place, name in ours.items() if name.startswith(EMPTY_NAMES)} == {}
