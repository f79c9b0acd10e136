"""Formatting for people: events, counts, lists, tables and commands."""

from __future__ import annotations

import shlex
import shutil
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zeroband.observe.events import EVENTS
from zeroband.observe.view import EventView, node_id_of_member

PROGRAM = "zeroband"

JOIN_WORDS: Mapping[str, str] = {
    "wait_old_lease": "waiting for its old lease to expire",
    "restore_local": "restoring the state left in memory",
    "discover": "looking up the run in the store",
    "pick_checkpoint": "agreeing with others on a checkpoint",
    "founding": "agreeing with the other founders",
    "fetching": "fetching the state from members",
    "announcing": "waiting for the next round",
    "catching_up": "replaying missed rounds",
    "rejoin": "rejoining as a new member",
    "roll_back": "rolling back to a checkpoint",
}
"""Descriptions of the join states."""

_MEMBERS = ("members", "member_ids", "waiting_for", "member_id")
_SHOWN_MEMBERS = 6
_UNITS = ("", "k", "M", "G", "T", "P")


def event_in_words(event: EventView) -> str:
    """Return an event as a sentence; missing fields are `?`, and an unknown kind is only named."""
    known = EVENTS.get(event.kind)
    if known is None:
        return f"{event.node_id}: {event.kind}"
    fields = {name: _in_words(name, value) for name, value in event.fields.items()}
    text = known.words.format_map(_Fields(fields | {"node": event.node_id}))
    return f"{text.rstrip('.')}."


def listed(names: Sequence[str], most: int = 4) -> str:
    """Return the first names, and the number of others."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def first_of(values: Sequence[object], most: int = 5) -> str:
    """Return the first values, with dots if there are more."""
    return ", ".join(map(str, values[:most])) + (", ..." if len(values) > most else "")


def human_count(count: float) -> str:
    """Format a count with three digits and a decimal prefix: 1234567 is `1.23M`."""
    for unit in _UNITS[:-1]:
        if abs(count) < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}{_UNITS[-1]}"


def human_bytes(size_bytes: float) -> str:
    """Format bytes with three digits and a decimal prefix: 1234567 is `1.23 MB`."""
    count = human_count(size_bytes)
    return f"{count[:-1]} {count[-1]}B" if count[-1] in _UNITS[1:] else f"{count} B"


def age(seconds: float) -> str:
    """Format a duration in its largest unit: 5400 is `2 h`."""
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table without a final newline."""
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in (head, *rows)]
    return "\n".join([f"| {lines[0]} |", f"|{'---|' * len(head)}", *(f"| {line} |" for line in lines[1:])])


def command(*words: object) -> str:
    """Return a `zeroband` command, quoted for a shell."""
    return shlex.join([PROGRAM, *map(str, words)])


def typed(*words: object) -> str:
    """Return a command that runs on this machine: `zeroband` if the PATH leads to this installation, else its path."""
    ours = Path(sysconfig.get_path("scripts")) / PROGRAM
    found = shutil.which(PROGRAM)
    if not ours.exists() or (found is not None and Path(found).resolve() == ours.resolve()):
        return command(*words)
    place = ours.relative_to(Path.cwd()) if ours.is_relative_to(Path.cwd()) else ours
    return shlex.join([str(place), *map(str, words)])


class _Fields(dict[str, str]):
    def __missing__(self, _key: str) -> str:
        return "?"


def _in_words(name: str, value: Any) -> str:
    if name in _MEMBERS:
        ids: Sequence[object] = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        return listed(sorted({node_id_of_member(str(one)) for one in ids}), _SHOWN_MEMBERS)
    if name in ("bytes", "of_bytes") and isinstance(value, int):
        return human_bytes(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(str, value[:_SHOWN_MEMBERS]))
    return "?" if value is None else str(value)
