"""Every place where the product waits has a name and a bound, in a table that people read (docs/faults.md, "Waits")."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from zeroband.config.outer import Outer
from zeroband.config.schema import FaultConfig, RunConfig
from zeroband.elastic.transport.stalls import TransferBounds

OUTER = get_args(get_args(Outer)[0])

TOOLS = {"cli", "tools"}
"""Somebody looks at them while they run, and no node waits for them."""

BLOCKING = {
    *("sleep", "wait", "wait_for", "timeout", "select", "poll", "communicate", "result", "await_change"),
    *("recv", "recv_into", "recv_fds", "sock_recv", "sock_accept", "create_connection", "getresponse"),
    "head",
}
"""Methods and functions that give the processor away until something happens."""


def _is_blocking(call: ast.Call) -> bool:
    function = call.func
    if not isinstance(function, ast.Attribute):
        return False
    if function.attr == "join":  # of a thread, not of text
        return not call.args or "thread" in ast.unparse(function.value)
    if ast.unparse(function) == "subprocess.run":
        return True
    return function.attr in BLOCKING


def waits_of(tree: ast.Module) -> Iterator[str]:
    """Qualified names of the functions that wait."""

    def walk(node: ast.AST, name: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from walk(child, f"{name}.{child.name}" if name else child.name)
            else:
                if isinstance(child, ast.Call) and _is_blocking(child):
                    yield name
                yield from walk(child, name)

    yield from walk(tree, "")


def waiting_functions(modules: Mapping[str, Any]) -> set[str]:
    """`file: function` of all that a node runs."""
    found = set[str]()
    for module in modules.values():
        path = module.path.relative_to("src/zeroband")
        if path.parts[0].removesuffix(".py") not in TOOLS:
            found |= {f"{path}: {name}" for name in waits_of(module.tree)}
    return found


def section_of(docs: str) -> str:
    return docs.split("\n## Waits\n")[1].split("\n## ")[0]


def rows_of(section: str) -> list[list[str]]:
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows[1:]]


def places_of(text: str) -> list[str]:
    return re.findall(r"`([\w/]+\.py: [\w.]+)`", text)


@pytest.fixture(scope="module")
def section(root: Path) -> str:
    return section_of((root / "docs/faults.md").read_text(encoding="utf-8"))


NOT_FOUND_BY_NAME = {
    "runtime/join.py: NodeRuntimeSteps._announce",  # asks for `join` of an algorithm
    "elastic/rounds/runner.py: RoundRunner.arrived",  # BackgroundRound.wait, which is in the table
}
ONLY_BY_TORCH = {"node/mesh.py: init_local_mesh"}
"""Waits inside collectives, which have no call of their own to be found by."""


def test_every_wait_of_a_node_stands_in_the_table(modules: Mapping[str, Any], section: str) -> None:
    found, said = waiting_functions(modules) - NOT_FOUND_BY_NAME, set(places_of(section)) - ONLY_BY_TORCH
    assert len(found) > 50
    assert found - said == set(), "these wait; say in docs/faults.md for whom and how long"
    assert said - found == set(), "these do not wait any more"


def constants_of(tree: ast.Module) -> dict[str, float]:
    """Numbers that a module gives names to."""
    found = dict[str, float]()
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            found |= {ast.unparse(target): node.value.value for target in node.targets}
    return found


def is_setting(name: str) -> bool:
    """Whether a user can set it."""
    section, _, key = name.partition(".")
    owner = RunConfig.model_fields[section].annotation if section in RunConfig.model_fields else None
    owners = [owner, *getattr(owner, "__args__", ())]
    if section == "outer":
        return any(key in variant.model_fields for variant in OUTER)
    return any(key in getattr(kind, "model_fields", {}) for kind in owners)


def test_every_wait_has_a_bound_that_its_code_or_its_configuration_knows(
    modules: Mapping[str, Any], section: str, root: Path
) -> None:
    by_path = {str(module.path.relative_to("src/zeroband")): module for module in modules.values()}
    rows = rows_of(section)
    assert len(rows) > 30 and len({row[0] for row in rows}) == len(rows)
    wrong: list[str] = []
    for name, where, _, bound, then in rows:
        files = [place.split(":")[0] for place in places_of(where)] + re.findall(r"`([\w/]+\.py)`", bound)
        source = "\n".join((root / by_path[file].path).read_text(encoding="utf-8") for file in files)
        constants = {key: value for file in files for key, value in constants_of(by_path[file].tree).items()}
        bounds = [named for named in re.findall(r"`([\w.]+)`", bound) if not named.endswith(".py")]
        if not (bounds and then):
            wrong.append(f"{name}: no bound")
        wrong += [f"{name}: {b} is no setting" for b in bounds if "." in b and not is_setting(b)]
        wrong += [
            f"{name}: {b} is not in {files}" for b in bounds if "." not in b and not re.search(rf"\b{b}\b", source)
        ]
        for constant, value in re.findall(r"`(\w+)` = ([\d.]+)", bound + then):
            if constants.get(constant) != float(value):
                wrong.append(f"{name}: {constant} is {constants.get(constant)}, not {value}")
    assert wrong == []


def test_wait_that_nobody_named_is_found() -> None:
    source = "class A:\n    async def b(self):\n        await asyncio.sleep(1)\n        ', '.join(c)\n"
    assert list(waits_of(ast.parse(source))) == ["A.b"]


@pytest.mark.parametrize(
    ("detect_s", "stall_s", "most_s", "stream_s", "connect_s"),
    [(0.5, 1.0, 150.0, 60.0, 15.0), (5.0, 10.0, 150.0, 60.0, 15.0), (60.0, 120.0, 720.0, 360.0, 120.0)],
)
def test_waits_of_a_transfer_follow_from_the_one_knob(
    detect_s: float, stall_s: float, most_s: float, stream_s: float, connect_s: float
) -> None:
    bounds = TransferBounds.of(FaultConfig(detect_s=detect_s).time_outs)
    assert bounds == TransferBounds(stall_s, most_s, stream_s, connect_s)
    assert bounds.max_stall_s < FaultConfig(detect_s=detect_s).time_outs.hung_s, "who waits must not look hung"
