"""Entries of a node's stream of facts: lines of its log files with their positions. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from zeroband.observe.events import EVENTS
from zeroband.observe.jsonl import FilePlace

SHORT_LINE_BYTES = 4096
"""A longer line is published without its optional long values."""


class FactLine(NamedTuple):
    """One line of a log file."""

    name: str
    """Name of the file."""
    place: FilePlace
    """Position of its end."""
    record: Mapping[str, Any] | None
    """None: the line is invalid."""


@dataclass(frozen=True)
class FactBatch:
    """Lines of one node in order of time, published as one entry."""

    lines: Sequence[FactLine] = ()
    places: Mapping[str, FilePlace] = field(default_factory=dict[str, FilePlace])
    """Position in each file after these lines."""

    def to_text(self) -> str:
        lines = [[line.name, *line.place, line.record] for line in self.lines]
        return json.dumps([self.places, lines], separators=(",", ":"))

    @staticmethod
    def of_text(text: str) -> FactBatch:
        """The inverse of `to_text`. Raises ValueError."""
        try:
            places, lines = json.loads(text)
            return FactBatch(
                tuple(FactLine(str(name), _place(file, end), _record(record)) for name, file, end, record in lines),
                {str(name): _place(*place) for name, place in places.items()},
            )
        except (TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"no facts: {text:.200}") from error


def _place(file: object, offset: object) -> FilePlace:
    if not isinstance(file, str) or type(offset) is not int or offset < 0:
        raise ValueError(f"no place of a file: {file!r:.100}, {offset!r:.100}")
    return FilePlace(file, offset)


def _record(value: object) -> dict[str, Any] | None:
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"no record: {value!r:.100}")
    return cast("dict[str, Any] | None", value)


def shortened(record: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the lists and long texts that are optional for a record's kind of event; of mappings keep the plain values.

    `left_out` names the dropped ones.
    """
    usual = EVENTS[record["kind"]].fields if record.get("kind") in EVENTS else ()
    kept: dict[str, Any] = {}
    left_out: list[str] = []
    for name, value in record.items():
        if name in usual or _is_plain(value):
            kept[name] = value
            continue
        left_out.append(name)
        if isinstance(value, dict):
            parts = cast("dict[str, Any]", value)
            kept[name] = {part: inner for part, inner in parts.items() if _is_plain(inner)}
    return kept | {"left_out": left_out} if left_out else kept


def _is_plain(value: object) -> bool:
    return not isinstance(value, (dict, list)) and not (isinstance(value, str) and len(value) > SHORT_LINE_BYTES // 4)
