"""The contents of a report, read from a run directory in bounded memory.

Unreadable parts are reported instead of raised: a report matters most for a run that failed.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from zeroband.config.section import MASK
from zeroband.observe.events import EVENTS_FILE
from zeroband.observe.facts import CONFIG_FILE, FolderFacts
from zeroband.observe.history import RunHistory
from zeroband.observe.words import command
from zeroband.tools.board.document import RunContext
from zeroband.tools.board.state import read_setting
from zeroband.tools.data.audit import Audit, audit, read_left_out, read_rounds

AUDITED_BYTES = 32 * 2**20
"""Maximum size of events for an audit, which needs about 15 times as much memory."""

_CHUNK_BYTES = 1 << 20
_SECRET_NAMES = ("token", "password", "secret", "api_key", "credentials")
_NO_SECRETS = ("_file", "_url")
_USER_OF_URL = re.compile(r"(?<=://)[^/\s@'\"]*@")
_SECRET_OF_QUERY = re.compile(
    r"(?i)([?&][^=&\s]*(?:token|signature|secret|password|credential|key|sig)[^=&\s]*=)[^&\s'\"]+"
)
_NO_TEXT = re.compile(r"[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

FlatConfig = Mapping[str, str]
"""Values as text, by dotted key."""


@dataclass(frozen=True)
class RunRecord:
    """The contents of a report."""

    run_id: str
    history: RunHistory
    made_at_s: float
    setting: RunContext
    configs: Mapping[str, FlatConfig] = field(default_factory=dict[str, FlatConfig])
    """By node; without secrets."""
    audit: Audit | None = None
    audit_missing: str = ""
    """Why there is no audit."""
    skipped_lines: int = 0
    problems: Sequence[str] = ()
    """What could not be read."""

    def value(self, key: str) -> str | None:
        """Return the value of a key in the first configuration that has it."""
        return next((config[key] for config in self.configs.values() if key in config), None)


def read_record(
    run_dir: Path, *, now_s: float, price_per_hour: float | None = None, currency: str = "USD"
) -> RunRecord:
    """Read a run. `now_s`: wall clock, shown as the time of the report."""
    history, configs = RunHistory(run_dir.name), dict[str, FlatConfig]()
    facts = FolderFacts(run_dir, most_bytes=_CHUNK_BYTES)
    history.take(facts.node_ids(), facts.read())
    while facts.has_more:
        history.take((), facts.read())
    problems = list(facts.unread())
    folders = [run_dir / node_id for node_id in facts.node_ids()]
    for folder in folders:
        try:
            if (folder / CONFIG_FILE).exists():
                configs[folder.name] = read_config(folder / CONFIG_FILE)
        except (OSError, ValueError) as error:
            problems.append(f"{folder.name}: {error}")
    found, missing = _audit(run_dir, folders)
    return RunRecord(
        run_id=run_dir.name,
        history=history,
        made_at_s=now_s,
        setting=read_setting(RunContext(price_per_hour=price_per_hour, currency=currency), facts),
        configs=configs,
        audit=found,
        audit_missing=missing,
        skipped_lines=sum(facts.skipped_lines().values()) + history.invalid_lines,
        problems=problems,
    )


def _audit(run_dir: Path, folders: Sequence[Path]) -> tuple[Audit | None, str]:
    """Replay the ledgers, or return why that is impossible."""
    size = sum((folder / EVENTS_FILE).stat().st_size for folder in folders if (folder / EVENTS_FILE).exists())
    if size > AUDITED_BYTES:
        return None, f"the events are too large to replay here; run `{command('data', 'audit', run_dir)}`"
    try:
        rounds = read_rounds(run_dir)
        if not rounds:
            return None, "no round was recorded: a single node has no ledger"
        return audit(rounds, read_left_out(run_dir)), ""
    except (OSError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        return None, f"the recorded rounds cannot be replayed ({type(error).__name__}: {error})"


def read_config(path: Path) -> dict[str, str]:
    """Read a resolved configuration, flat, without secrets. Raises OSError, ValueError for invalid TOML."""
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
    """Return whether a key of this name holds a secret."""
    is_named = name in _SECRET_NAMES or name.endswith(tuple(f"_{one}" for one in _SECRET_NAMES))
    return is_named and not name.endswith(_NO_SECRETS)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        parts = cast("dict[str, Any]", value).items()
        return ", ".join(f"{name}={MASK if is_secret(name) else _shown(part)}" for name, part in parts)
    if isinstance(value, list):
        return "; ".join(_shown(part) for part in cast("list[Any]", value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def without_secrets(value: Any) -> Any:
    """Remove users, passwords and signatures of URLs from JSON values, and replace control characters by U+FFFD."""
    if isinstance(value, str):
        return _NO_TEXT.sub("\ufffd", _SECRET_OF_QUERY.sub(rf"\g<1>{MASK}", _USER_OF_URL.sub(f"{MASK}@", value)))
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {without_secrets(key): without_secrets(item) for key, item in items}
    if isinstance(value, (list, tuple)):
        return [without_secrets(item) for item in cast("Sequence[Any]", value)]
    return value
