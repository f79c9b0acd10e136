"""The tutorials of docs/tutorials, word for word (`tests/tutorial.py`), and their notebook.

Two of them are part of every test run, the others of `./scripts/test.sh -m soak tests/integration/test_tutorials.py`;
what those say is at least looked at here: configurations load, programs compile, and what they import is there.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from tests.hosts import obstacle
from tests.tutorial import DEADLINE_S, TUTORIALS, Block, blocks_of, shows, terminals, two_hosts

from zeroband.config import load_config
from zeroband.observe.jsonl import JsonlTail
from zeroband.tools.data.audit import audit, read_rounds

BLOCKS = [block for path in sorted(TUTORIALS.glob("*.md")) for block in blocks_of(path)]
(NOTEBOOK,) = TUTORIALS.glob("*.ipynb")


def of_language(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize(
    "names",
    [
        ("first-run",),
        pytest.param(("two-machines", "operate"), marks=pytest.mark.soak),
        pytest.param(("two-machines", "when-things-go-wrong"), marks=pytest.mark.soak),
        pytest.param(("your-model",), marks=pytest.mark.soak),
        pytest.param(("write-an-algorithm",), marks=pytest.mark.soak),
    ],
    ids=" and ".join,
)
def test_tutorials_come_out_as_they_say(names: tuple[str, ...], tmp_path: Path) -> None:
    with terminals(tmp_path) as opened:
        opened.follow(*(TUTORIALS / f"{name}.md" for name in names))


@pytest.mark.soak
@pytest.mark.faults
@pytest.mark.skipif(bool(obstacle()), reason=obstacle())
@pytest.mark.parametrize("goes_on", ["operate", "when-things-go-wrong"])
def test_tutorials_of_two_machines_come_out_on_two_hosts_where_only_an_address_changes(
    goes_on: str, tmp_path: Path
) -> None:
    with two_hosts(tmp_path, second=("b", "probe")) as opened:
        opened.follow(*(TUTORIALS / f"{name}.md" for name in ("two-machines", goes_on)))
    found = [{path.name for path in tmp_path.glob(f"disk-{n}/runs/together/*") if path.is_dir()} for n in range(2)]
    assert found[1] == {"b"} and "a" in found[0] and not found[0] & found[1]


@pytest.mark.soak
@pytest.mark.slow
def test_tutorial_of_data_trains_two_nodes_on_each_sample_once(tmp_path: Path) -> None:
    with terminals(tmp_path) as opened:
        opened.follow(TUTORIALS / "your-data.md")
    run_dir = tmp_path / "runs" / "my-data"
    metrics = [JsonlTail(path).read() for path in sorted(run_dir.glob("*/metrics.jsonl"))]
    losses = [[row["train/loss"] for row in rows if "train/loss" in row] for rows in metrics]
    assert len(losses) == 2 and all(last[-1] < last[0] for last in losses)
    result = audit(read_rounds(run_dir))
    assert result.is_exact and sum(account.trained for account in result.accounts.values()) == 40 * 8 * 2


def test_output_is_compared_by_its_words_and_their_order() -> None:
    printed = "10:01:02 a joined  round=7\n11:00:00 b left digest=0123abcd at 4.84k\n"
    assert shows(printed, "09:00:00 a joined round=12\n… b left … at 91\n")
    assert not shows(printed, "… b left …\n… a joined …\n")
    assert not shows(printed, "10:01:02 a joined\n")


def test_every_block_is_run_saved_or_said_to_be_for_elsewhere() -> None:
    assert len(BLOCKS) > 50
    known = {"bash": {"exit", "terminal", "types", "elsewhere"}, "console": {"elsewhere"}, "text": {"terminal"}}
    for block in BLOCKS:
        words = known.get(block.language, {"file", "elsewhere"})
        assert set(block.words) <= words and (block.language in known or block.words), block.place


def test_configurations_in_tutorials_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in of_language("toml") + of_language("python"):
        (tmp_path / block.words["file"]).write_text(block.text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    commands = [
        (block, found[1] != "train", shlex.split(found[2], comments=True))
        for block in of_language("bash")
        if block.words.get("exit") != "2"
        for found in re.finditer(r"zeroband (train|launch|simulate) ([^\n>&]*)", block.text)
    ]
    assert len(commands) >= 7
    for block, has_others, words in commands:
        first = next(number for number, word in enumerate(words) if word.startswith("@"))
        environ = {"ZERO_BAND_STORE__URL": "redis://localhost:6379"} if has_others else {}
        asked = load_config(words[first:], environ=environ)
        assert asked.train.total_steps > 0, block.place


def cells() -> Iterator[str]:
    """The notebook's cells of code."""
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            yield "".join(cell["source"])


def test_programs_in_tutorials_compile_and_import_what_exists() -> None:
    programs = [block.text for block in of_language("python")] + list(cells())
    assert len(programs) > 6
    nodes = [node for text in programs for node in ast.walk(ast.parse(text))]
    modules = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names} - {"peer"}
    assert len(modules) > 6
    assert [name for name in sorted(modules) if find_spec(name) is None] == []
    taken = [(node.module, name.name) for node in nodes if isinstance(node, ast.ImportFrom) for name in node.names]
    assert len(taken) > 6
    assert [one for one in taken if not hasattr(import_module(str(one[0])), one[1])] == []


def test_notebook_is_kept_without_outputs() -> None:
    kept = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell.get("outputs")]
    assert kept == []


@pytest.mark.soak
@pytest.mark.faults
def test_notebook_ends_with_one_model_on_both_peers(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=DEADLINE_S, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output.data for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
    assert any("image/png" in data for data in shown)
    rows = [JsonlTail(tmp_path / "runs" / "notebook" / peer / "events.jsonl").read() for peer in "ab"]
    ends = [[row["digest"] for row in of_one if row["kind"] == "round_committed"][-1] for of_one in rows]
    assert ends[0] == ends[1] and len(rows[1]) < len(rows[0])
