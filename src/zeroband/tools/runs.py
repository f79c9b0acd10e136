"""`zeroband runs [DIR]`: list the runs in a folder, newest first. Reads only the ends of their files.

A run's age comes from its files' modification times, not from the clock of the machine that wrote them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zeroband.observe.events import EVENTS_FILE
from zeroband.observe.facts import Fact, at_s_of, run_folders, written_at_s_of
from zeroband.observe.history import RunHistory
from zeroband.observe.jsonl import JsonlTail
from zeroband.observe.metrics import METRICS_FILE
from zeroband.observe.view import ENDED, SILENT_S, RunView
from zeroband.observe.words import age, aligned
from zeroband.tools.arguments import parser_of, run_command

_TAIL_BYTES = 1 << 17
"""Bytes read of each file."""
_COLUMNS = ("run", "state", "step", "loss", "nodes", "newest line")


@dataclass(frozen=True)
class RunRow:
    """Summary of a run; None for what its files do not show."""

    run_id: str
    path: str
    state: str
    """training, silent (nothing written for two minutes, but not all ended), finished, failed, left, empty."""
    step: int
    total_steps: int | None
    loss: float | None
    """Mean of its nodes' newest losses."""
    nodes: int
    """Nodes with files."""
    nodes_in: int
    """Nodes that train or are joining."""
    nodes_of_others: int
    """Nodes that run in another run of this name; not counted otherwise."""
    written_at_s: float
    """Newest modification time of its files."""


def main(argv: Sequence[str]) -> int:
    """Print the runs of a folder. Returns the exit code: 2 if there is no such folder."""
    parser = parser_of("runs", "List the runs of a folder, newest first.")
    parser.add_argument("directory", nargs="?", type=Path, default=Path("runs"), help="run.dir (default: runs)")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    options = parser.parse_args(argv)
    return run_command("runs", lambda: _list(options))


def _list(options: argparse.Namespace) -> int:
    found = runs_in(options.directory, now_s=time.time())
    if options.json:
        print(json.dumps([asdict(run) for run in found], indent=2))
    else:
        print(render(found, now=time.time) if found else f"no run in {options.directory}")
    return 0


def runs_in(directory: Path, *, now_s: float) -> list[RunRow]:
    """Return the runs of a folder, newest first. Raises ConfigError."""
    found = [_summary(path, nodes, now_s) for path, nodes in run_folders(directory)]
    return sorted(found, key=lambda run: (run.written_at_s, run.run_id), reverse=True)


def _summary(run_dir: Path, node_dirs: Sequence[Path], now_s: float) -> RunRow:
    history = RunHistory(run_dir.name)
    for path in node_dirs:
        records = _newest_records(path / EVENTS_FILE) + _newest_records(path / METRICS_FILE)
        history.take([path.name], [Fact(path.name, record) for record in sorted(records, key=at_s_of)])
    run = history.view()
    written_at_s = max(map(written_at_s_of, node_dirs))
    return RunRow(
        run_id=run_dir.name,
        path=str(run_dir),
        state=_state(run, now_s - written_at_s),
        step=run.step,
        total_steps=run.total_steps,
        loss=run.loss,
        nodes=len(run.nodes),
        nodes_in=sum(node.state not in ENDED for node in run.own),
        nodes_of_others=len(run.foreign_nodes),
        written_at_s=written_at_s,
    )


def _state(run: RunView, silent_s: float) -> str:
    if all(node.last_at_s is None for node in run.nodes):
        return "empty"
    if any(node.state not in ENDED for node in run.own):
        return "training" if silent_s < SILENT_S else "silent"
    states = {node.state for node in run.own}
    return next((state for state in ("finished", "failed", "left") if state in states), "silent")


def _newest_records(path: Path) -> list[dict[str, Any]]:
    try:
        return JsonlTail(path, most_behind=_TAIL_BYTES).read()
    except OSError:
        return []


def render(runs: Sequence[RunRow], *, now: Callable[[], float]) -> str:
    """Return the runs as a table."""
    return "\n".join(aligned([_COLUMNS, *(_row(run, now()) for run in runs)]))


def _row(run: RunRow, now_s: float) -> tuple[str, ...]:
    return (
        run.run_id,
        run.state,
        str(run.step) if run.total_steps is None else f"{run.step}/{run.total_steps}",
        "-" if run.loss is None else f"{run.loss:.3f}",
        f"{run.nodes_in} of {run.nodes}" + (f", {run.nodes_of_others} of another run" if run.nodes_of_others else ""),
        f"{age(now_s - run.written_at_s)} ago",
    )
