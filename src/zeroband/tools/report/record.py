"""What a report is made of, read from a run directory line by line, however long the run was.

Whatever cannot be read is said, never raised: a report of a run that was killed is worth the most.
"""

from __future__ import annotations

import heapq
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from zeroband.config.problems import MASK
from zeroband.observe.commands import command
from zeroband.observe.events import EVENTS_FILE
from zeroband.observe.facts import Fact, is_node_folder
from zeroband.observe.history import RunHistory
from zeroband.observe.metrics import METRICS_FILE
from zeroband.tools.data.audit import Audit, audit, read_left_out, read_rounds

CONFIG_FILE, SAMPLE_FILE = "config.toml", "sample.txt"
AUDITED_BYTES = 32 * 2**20
"""Most bytes of events that are audited here: the audit holds every round in memory, some 15 times as much."""

_SAMPLE_CHARS = 4000
_SECRET_NAMES = ("token", "password", "secret", "api_key", "credentials")
_NO_SECRETS = ("_file", "_url")

FlatConfig = Mapping[str, str]
"""Values as the TOML file has them, by dotted key."""


@dataclass(frozen=True)
class RunRecord:
    """Everything that a report shows."""

    run_id: str
    place: str
    history: RunHistory
    made_at_s: float
    version: str = ""
    configs: Mapping[str, FlatConfig] = field(default_factory=dict[str, FlatConfig])
    """By node; without secrets."""
    audit: Audit | None = None
    audit_missing: str = ""
    """Why there is no audit."""
    sample: tuple[str, str] | None = None
    """Node and text."""
    skipped_lines: int = 0
    problems: Sequence[str] = ()
    """What could not be read, in words."""

    def value(self, key: str) -> str | None:
        """What the nodes have set for a key: that of the first which says it."""
        return next((config[key] for config in self.configs.values() if key in config), None)


def read_record(run_dir: Path, *, now_s: float, version: str = "") -> RunRecord:
    """Read all of it. `now_s`: wall clock, shown as when the report was made."""
    history, problems, skipped = RunHistory(run_dir.name), list[str](), 0
    folders = sorted(path for path in run_dir.iterdir() if is_node_folder(path))
    configs: dict[str, FlatConfig] = {}
    sample: tuple[str, str] | None = None
    for folder in folders:
        history.appeared(folder.name)
        counted = _Lines(folder)
        for record in counted:
            history.add(Fact(folder.name, record))
        skipped += counted.skipped
        problems += counted.problems
        try:
            if (folder / CONFIG_FILE).exists():
                configs[folder.name] = read_config(folder / CONFIG_FILE)
            if sample is None and (folder / SAMPLE_FILE).exists():
                written = (folder / SAMPLE_FILE).read_text(encoding="utf-8", errors="replace")
                sample = (folder.name, written[:_SAMPLE_CHARS])
        except (OSError, ValueError) as error:
            problems.append(f"{folder.name}: {error}")
    found, missing = _audit(run_dir, folders)
    return RunRecord(
        run_id=run_dir.name,
        place=str(run_dir),
        history=history,
        made_at_s=now_s,
        version=version,
        configs=configs,
        audit=found,
        audit_missing=missing,
        sample=sample,
        skipped_lines=skipped + sum(history.odd_lines().values()),
        problems=problems,
    )


class _Lines:
    """The records of a node's two files in the order of their times, read as they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.skipped = 0
        self.problems: list[str] = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        files = (self._records(self._folder / name) for name in (EVENTS_FILE, METRICS_FILE))
        yield from heapq.merge(*files, key=_at_s)

    def _records(self, path: Path) -> Iterator[dict[str, Any]]:
        try:
            with path.open("rb") as file:
                for line in file:
                    try:
                        value: object = json.loads(line)
                    except (ValueError, RecursionError):
                        value = None
                    if isinstance(value, dict):
                        yield cast("dict[str, Any]", value)
                    elif line.strip():
                        self.skipped += 1
        except FileNotFoundError:
            return
        except OSError as error:
            self.problems.append(f"{path.parent.name}/{path.name}: {error.strerror}")


def _at_s(record: dict[str, Any]) -> float:
    at_s = record.get("at_s")
    return float(at_s) if isinstance(at_s, (int, float)) else 0.0


def _audit(run_dir: Path, folders: Sequence[Path]) -> tuple[Audit | None, str]:
    """Replay the ledgers; or why that is not possible."""
    size = sum((folder / EVENTS_FILE).stat().st_size for folder in folders if (folder / EVENTS_FILE).exists())
    if size > AUDITED_BYTES:
        return None, f"the events are too large to replay here; run `{command('data', 'audit', run_dir)}`"
    try:
        rounds = read_rounds(run_dir)
        if not rounds:
            return None, "no round was recorded: a node that trains alone keeps no ledger between nodes"
        return audit(rounds, read_left_out(run_dir)), ""
    except (OSError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        return None, f"the recorded rounds cannot be replayed ({type(error).__name__}: {error})"


def read_config(path: Path) -> dict[str, str]:
    """A resolved configuration, flat, without secrets. Raises OSError, ValueError where it is no TOML."""
    flat: dict[str, str] = {}
    _flatten(tomllib.loads(path.read_text(encoding="utf-8")), "", flat)
    return flat


def _flatten(table: Mapping[str, Any], prefix: str, flat: dict[str, str]) -> None:
    for name, value in table.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            _flatten(cast("dict[str, Any]", value), f"{key}.", flat)
        else:
            flat[key] = MASK if is_secret(name) and value not in ("none", "None") else _shown(value)


def is_secret(name: str) -> bool:
    """Whether a key of this name holds a secret."""
    is_named = name in _SECRET_NAMES or name.endswith(tuple(f"_{one}" for one in _SECRET_NAMES))
    return is_named and not name.endswith(_NO_SECRETS)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        parts = cast("dict[str, Any]", value).items()
        return ", ".join(f"{name}={MASK if is_secret(name) else _shown(part)}" for name, part in parts)
    if isinstance(value, list):
        return "; ".join(_shown(part) for part in cast("list[Any]", value))
    return str(value).lower() if isinstance(value, bool) else str(value)
