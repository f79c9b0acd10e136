"""What the nodes of a run recorded, line by line, wherever it is read: from their files, or from the run's store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from zeroband.observe.events import EVENTS_FILE
from zeroband.observe.jsonl import JsonlTail
from zeroband.observe.metrics import METRICS_FILE

REPORT_FILE = "report.html"
"""Name of the report inside the run directory."""


class Fact(NamedTuple):
    """One line that a node wrote."""

    node_id: str
    record: dict[str, Any]
    """An event if it has a `kind`, else the metrics of an inner step."""


class FactSource(Protocol):
    """Where facts come from. One thread; nothing that it does reaches the run."""

    @property
    def run_id(self) -> str: ...

    @property
    def place(self) -> str:
        """Where it reads, for people: a folder, or a store without its password."""
        ...

    def node_ids(self) -> Sequence[str]:
        """The nodes that there are."""
        ...

    def read(self) -> list[Fact]:
        """What is new since the last call, each node's in the order of their times.

        Raises StoreLost or ConfigError where nothing can be had now; the next call goes on from there.
        """
        ...

    def skipped_lines(self) -> dict[str, int]:
        """Lines that could not be read, by node."""
        ...

    def close(self) -> None: ...


class FolderFacts(FactSource):
    """Follows the files of all nodes of a run; nodes may appear at any time.

    `run_dir`: `<run.dir>/<run.id>`, which need not exist yet.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._nodes: dict[str, tuple[JsonlTail, JsonlTail]] = {}

    @property
    def run_id(self) -> str:
        return self._run_dir.name

    @property
    def place(self) -> str:
        return str(self._run_dir)

    def node_ids(self) -> list[str]:
        if self._run_dir.is_dir():
            for folder in self._run_dir.iterdir():
                if folder.name not in self._nodes and is_node_folder(folder):
                    self._nodes[folder.name] = (JsonlTail(folder / EVENTS_FILE), JsonlTail(folder / METRICS_FILE))
        return sorted(self._nodes)

    def read(self) -> list[Fact]:
        """What is new; a node's two files are merged by the clock of the process that wrote both."""
        found: list[Fact] = []
        for node_id in self.node_ids():
            events, metrics = self._nodes[node_id]
            found += [Fact(node_id, record) for record in sorted(events.read() + metrics.read(), key=_at_s)]
        return found

    def skipped_lines(self) -> dict[str, int]:
        return {node_id: sum(tail.skipped_lines for tail in tails) for node_id, tails in self._nodes.items()}

    def close(self) -> None: ...


def is_node_folder(path: Path) -> bool:
    """Whether a node recorded something in this folder."""
    return (path / METRICS_FILE).exists() or (path / EVENTS_FILE).exists()


def _at_s(record: dict[str, Any]) -> float:
    at_s = record.get("at_s")
    return at_s if isinstance(at_s, (int, float)) else 0.0
