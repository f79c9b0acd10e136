"""How many lines the examples add to a loop or change in it: counted, and as docs/dropin.md says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from tests.plain_form import plain_form

ROOT = Path(__file__).parents[3]
MARKED = sorted(path.stem for path in (ROOT / "examples").glob("*.py") if "  # zeroband\n" in path.read_text())

LOOP = """\
import zeroband  # zeroband
optimizer = make(
    lr=1,
    seed=pid,  # zeroband
)
optimizer = zeroband.Optimizer(  # zeroband
    optimizer, 2
)
class Stop:  # zeroband
    x = 1

    y = 2

# zeroband, before: while step < 3:
while not optimizer.is_done:
    step()
"""


def test_plain_form_is_the_loop_without_what_is_marked() -> None:
    assert plain_form(LOOP) == ("optimizer = make(\n    lr=1,\n)\n\nwhile step < 3:\n    step()\n", 9)


@pytest.mark.parametrize("name", MARKED)
def test_loop_without_what_is_marked_has_nothing_of_zeroband(name: str) -> None:
    source = (ROOT / "examples" / f"{name}.py").read_text()
    tree = ast.parse(plain_form(source)[0])
    imported = {alias.asname or alias.name for node in ast.walk(tree) for alias in _imports(node)}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert imported - {"annotations"} <= used
    assert not used & {"zeroband", "diloco"}


def test_table_has_every_marked_example_and_its_lines() -> None:
    rows = re.findall(
        r"^\|.*\| (\d+) \|.*`examples/(\w+)\.py`", (ROOT / "docs/dropin.md").read_text(), flags=re.MULTILINE
    )
    assert {name: int(lines) for lines, name in rows} == {
        name: plain_form((ROOT / "examples" / f"{name}.py").read_text())[1] for name in MARKED
    }
    assert len(MARKED) == 4


def test_both_tables_have_the_same_lines() -> None:
    text = (ROOT / "docs/dropin.md").read_text()
    examples = re.findall(r"\| (\d+) \| `examples/", text)
    compared = re.findall(r"^\| [^|]+ \| (\d+) \| ", text, flags=re.MULTILINE)
    assert examples == compared and len(compared) == len(MARKED)


def _imports(node: ast.AST) -> list[ast.alias]:
    return node.names if isinstance(node, ast.Import | ast.ImportFrom) else []
