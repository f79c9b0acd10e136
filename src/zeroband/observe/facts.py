"""Facts: the lines that a run's nodes recorded, read from their files or from the run's store."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from zeroband.errors import ConfigError
from zeroband.observe.events import EVENTS_FILE
from zeroband.observe.jsonl import JsonlTail
from zeroband.observe.metrics import METRICS_FILE

REPORT_FILE = "report.html"
"""Name of the report inside the run directory."""
CONFIG_FILE = "config.toml"
"""The resolved configuration, in the node's folder of the run directory."""
_MOST = 2**53
"""Nodes write no larger integers."""


class Fact(NamedTuple):
    """A line that a node wrote."""

    node_id: str
    record: dict[str, Any]
    """An event if it has a `kind`, else metrics of an inner step."""


class FactSource(Protocol):
    """A source of facts. One thread; read-only."""

    @property
    def run_id(self) -> str: ...

    @property
    def place(self) -> str:
        """The folder, or the store's address without password, for display."""
        ...

    @property
    def folder(self) -> Path | None:
        """Folder of the nodes' other files; None if only facts are available."""
        return None

    @property
    def has_all_machines(self) -> bool:
        """Whether nodes of other machines are included."""
        return True

    def node_ids(self) -> Sequence[str]:
        """Return the known nodes."""
        ...

    def read(self) -> list[Fact]:
        """Return the facts since the last call, each node's by ascending time.

        Raises StoreLost or ConfigError if nothing can be read now; the next call continues from there.
        """
        ...

    @property
    def has_more(self) -> bool:
        """Whether the last `read` left facts for the next one."""
        return False

    def skipped_lines(self) -> dict[str, int]:
        """Return the number of unreadable lines by node."""
        ...

    def unread(self) -> Sequence[str]:
        """Return what could not be read at the last call, each with the reason."""
        return ()

    def ages_s(self) -> Mapping[str, float]:
        """Return the seconds since each node's newest line, by the storage's clock, never the node's."""
        return {}

    def close(self) -> None: ...


class FolderFacts(FactSource):
    """Follows the files of a run's nodes; nodes may appear at any time.

    `run_dir`: `<run.dir>/<run.id>`, which need not exist yet. `most_bytes`: read per file and call, to bound memory;
    call again while `has_more`.
    """

    def __init__(self, run_dir: Path, *, most_bytes: int | None = None) -> None:
        self._run_dir = run_dir
        self._most_bytes = most_bytes
        self._nodes: dict[str, tuple[_File, _File]] = {}
        self._closed_folders: list[str] = []
        """Unreadable folders, each with the reason."""

    @property
    def run_id(self) -> str:
        return self._run_dir.name

    @property
    def place(self) -> str:
        return str(self._run_dir)

    @property
    def folder(self) -> Path:
        return self._run_dir

    @property
    def has_all_machines(self) -> bool:
        return False

    def node_ids(self) -> list[str]:
        self._closed_folders = []
        try:
            for path in self._run_dir.iterdir():
                if path.name not in self._nodes:
                    self._look_into(path)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            self._closed_folders.append(f"{self._run_dir}: {error.strerror}")
        return sorted(self._nodes)

    def _look_into(self, folder: Path) -> None:
        try:
            if _has_files(folder):
                self._nodes[folder.name] = (_File(folder / EVENTS_FILE), _File(folder / METRICS_FILE))
        except OSError as error:
            self._closed_folders.append(f"{folder.name}: {error.strerror}")

    def read(self) -> list[Fact]:
        """Return the new facts; a node's two files are merged by time, as one process writes both."""
        found: list[Fact] = []
        for node_id in self.node_ids():
            files = self._nodes[node_id]
            while any(file.look(self._most_bytes) for file in files):
                pass  # an older record may be appended to one file while the other is read
            until_s = min(file.known_until_s for file in files)  # later records wait for the rest of the other file
            records = [record for file in files for record in file.take(until_s)]
            found += [Fact(node_id, record) for record in sorted(records, key=at_s_of)]
        return found

    @property
    def has_more(self) -> bool:
        return not all(file.is_done for files in self._nodes.values() for file in files)

    def skipped_lines(self) -> dict[str, int]:
        return {node_id: sum(file.skipped_lines for file in files) for node_id, files in self._nodes.items()}

    def unread(self) -> list[str]:
        files = [(node_id, file) for node_id, files in self._nodes.items() for file in files]
        unread = [f"{node_id}/{file.path.name}: {file.unread}" for node_id, file in files if file.unread is not None]
        return [*self._closed_folders, *unread]

    def ages_s(self) -> dict[str, float]:
        return {node_id: min(file.age_s() for file in files) for node_id, files in self._nodes.items()}

    def close(self) -> None: ...


class _File(JsonlTail):
    """One file of a node, with the records that were read and not returned yet."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.unread: str | None = None
        """Error of the last read."""
        self._held: list[dict[str, Any]] = []

    def look(self, most_bytes: int | None) -> bool:
        """Read more, unless records of a partial read are still held. Returns whether there was anything new."""
        if self._held and self.has_more:
            return False
        try:
            new, self.unread = self.read(most_bytes), None
        except OSError as error:  # possibly transient; other nodes stay readable
            new, self.unread = [], error.strerror or type(error).__name__
        self._held += new
        return bool(new)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left for the next call."""
        return not self._held and not self.has_more

    def age_s(self) -> float:
        """Return the seconds since the last write; infinity without a file."""
        try:
            return max(0.0, time.time() - self.path.stat().st_mtime)
        except OSError:
            return math.inf

    @property
    def known_until_s(self) -> float:
        """Time of the newest record read; infinity at the end of the file."""
        return max(map(at_s_of, self._held)) if self._held and self.has_more else math.inf

    def take(self, until_s: float) -> list[dict[str, Any]]:
        """Remove and return the records up to a time."""
        taken = [record for record in self._held if not at_s_of(record) > until_s]
        self._held = [record for record in self._held if at_s_of(record) > until_s]
        return taken


# -- folders of runs and nodes ----------------------------------------------------------------------------------------


def find_run_dir(path: Path) -> Path:
    """Return the run directory that the user means: `path`, or the only run in it. Raises ConfigError."""
    if not path.is_dir():
        raise ConfigError(f"no such folder: {path}; it is <run.dir>/<run.id>, for example runs/first")
    if node_folders(path):
        return path
    runs = [folder for folder, _ in run_folders(path)]
    if len(runs) == 1:
        return runs[0]
    names = ", ".join(folder.name for folder in runs)
    found = f"it contains the runs {names}; name one of them" if runs else "and it contains no runs"
    raise ConfigError(f"{path} is not a run directory; {found}")


def newest_run(path: Path) -> Path:
    """Return `path` if it is or may become a run's folder, else the most recently written run in it.

    Raises ConfigError if there is no such folder.
    """
    folders = run_folders(path)
    if not folders or node_folders(path):
        return path
    return max(folders, key=lambda folder: max(map(written_at_s_of, folder[1])))[0]


def run_folders(directory: Path) -> list[tuple[Path, list[Path]]]:
    """Return the runs in a folder, each with its nodes' folders. Raises ConfigError if there is no such folder."""
    if not directory.is_dir():
        raise ConfigError(f"no such folder: {directory}; runs are in run.dir, by default ./runs")
    runs = [(path, node_folders(path)) for path in _folders(directory)]
    return [(path, nodes) for path, nodes in runs if nodes]


def node_folders(run_dir: Path) -> list[Path]:
    """Return the readable folders with nodes' files."""
    found: list[Path] = []
    for path in _folders(run_dir):
        with contextlib.suppress(OSError):
            found += [path] if _has_files(path) else []
    return found


def written_at_s_of(node_dir: Path) -> float:
    """Return when a node's files were last modified; 0 without any."""
    times = [0.0]
    for name in (EVENTS_FILE, METRICS_FILE):
        with contextlib.suppress(OSError):
            times.append((node_dir / name).stat().st_mtime)
    return max(times)


def _folders(directory: Path) -> list[Path]:
    """Return the subfolders; none if the folder is unreadable."""
    try:
        return sorted(path for path in directory.iterdir() if path.is_dir())
    except OSError:
        return []


def _has_files(folder: Path) -> bool:
    return (folder / METRICS_FILE).exists() or (folder / EVENTS_FILE).exists()


# -- lines ------------------------------------------------------------------------------------------------------------


def at_s_of(record: dict[str, Any]) -> float:
    """Return the time of a record; 0 without one."""
    at_s = record.get("at_s")
    return at_s if isinstance(at_s, (int, float)) else 0.0


def require_line(record: Mapping[str, Any]) -> None:
    """Raise ValueError or KeyError for an invalid record: no time, or known fields of the wrong type."""
    at_s = record["at_s"]
    if record.get("kind", "") is None:
        raise ValueError("kind=None")
    if isinstance(at_s, bool) or not isinstance(at_s, (int, float)) or not 0 <= at_s < 1e11:
        raise ValueError(f"at_s={at_s!r}")
    for name, value in record.items():
        is_usual = _USUAL.get(name)
        if is_usual is None:
            if (type(value) is float and -_MOST < value < _MOST) or "/" not in name:  # fast path
                continue
            is_usual = _is_number
        if value is not None and not is_usual(value):
            raise ValueError(f"{name}={value!r}")
    if "kind" not in record and not isinstance(record["step"], int):
        raise ValueError("no step")


def _is_count(value: object) -> bool:
    return type(value) is int and -1 <= value < _MOST  # -1: no round yet


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in cast("list[object]", value))


def _is_number(value: object) -> bool:
    """Return whether a metric is a number or a string such as "nan"; raises ValueError for other strings."""
    if isinstance(value, str):
        float(value)
        return True
    return isinstance(value, (float, int)) and not isinstance(value, bool) and -(2**63) < value < 2**63


_USUAL: Mapping[str, Callable[[object], bool]] = {
    **dict.fromkeys(("kind", "digest", "member_id", "state", "reason", "why", "outer/digest", "text"), _is_text),
    **dict.fromkeys(("members", "member_ids", "late"), _is_list_of_texts),
    **dict.fromkeys(("step", "round", "epoch", "starts", "total_steps", "parameters"), _is_count),
    **dict.fromkeys(("outer/round", "outer/epoch", "eval/step"), _is_count),
}
"""Type checks by field."""
