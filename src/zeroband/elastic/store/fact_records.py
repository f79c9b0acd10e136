"""What a node's stream of facts consists of, as text: lines that it recorded, with their places in its files. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from zeroband.observe.events import EVENTS
from zeroband.observe.jsonl import FilePlace

SHORT_LINE_BYTES = 4096
"""A longer line is told without its long values that are not always part of its kind of event."""


class FactLine(NamedTuple):
    """One line of a file."""

    name: str
    """Name of the file."""
    place: FilePlace
    """Its end."""
    record: Mapping[str, Any] | None
    """None: it is no record."""


@dataclass(frozen=True)
class FactBatch:
    """What is told at once: lines of one node, in the order of their times."""

    lines: Sequence[FactLine] = ()
    places: Mapping[str, FilePlace] = field(default_factory=dict[str, FilePlace])
    """How far each of the node's files is told when these lines are."""

    def to_text(self) -> str:
        """As it is kept."""
        lines = [[line.name, *line.place, line.record] for line in self.lines]
        return json.dumps([self.places, lines], separators=(",", ":"))

    @staticmethod
    def of_text(text: str) -> FactBatch:
        """The inverse of `to_text`. Raises ValueError for what it does not give."""
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
    """A record that takes much room, without the lists and texts that its kind of event does not always have.

    Of a mapping what is plain in it stays. `left_out` names what is gone.
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
