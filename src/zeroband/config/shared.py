"""The values that all nodes of a run must share: written to the run's record, compared at join, and read back.

Anyone who can write to the store of a run without a token can forge such a record. So it only sets keys that the schema
marks as shared, which name no local file and no code.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, NamedTuple, cast

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_settings import InitSettingsSource

from zeroband.config.data import PRIVATE_KEYS, HuggingFaceSource
from zeroband.config.keys import Path, dotted, is_shared, schema_keys, tables_of, variants_of
from zeroband.config.load import given_settings, load_config
from zeroband.config.schema import RunConfig
from zeroband.config.section import NONE, Section
from zeroband.config.sources import Settings
from zeroband.errors import ConfigError

MOST_BYTES = 1 << 20
"""Largest record, keys and values together; that of a large transformers configuration has about 20 kB."""

_MOST_PARTS = 64
"""Most letters of a name, and so most dotted parts."""


def shared_items(config: RunConfig) -> dict[str, Any]:
    """Return the shared values by dotted key, as plain JSON values; a section that is off is None."""
    own = tuple(f"data.{name}." for name in PRIVATE_KEYS) if config.data.private else ()
    found = _shared(config, config.model_dump(mode="json"), ())
    return {key: value for key, value in found if not f"{key}.".startswith(own)}


def _shared(section: BaseModel, plain: Mapping[str, Any], path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the shared keys and values of a section; `plain`: the section as JSON."""
    for name in (name for name, field in type(section).model_fields.items() if is_shared(field)):
        here, value, told = (*path, name), getattr(section, name), plain[name]
        tables = cast("tuple[Any, ...]", value) if isinstance(value, tuple) else ()
        if isinstance(value, BaseModel):
            yield from _shared(value, told, here)
        elif tables and isinstance(tables[0], BaseModel):  # by the name that each has, or by its place
            for number, table in enumerate(tables):
                yield from _shared(table, told[number], (*here, str(getattr(table, "name", number))))
        else:  # tables in one order of their keys, whichever they were written in
            in_order = sorted(cast("dict[str, Any]", told).items()) if isinstance(told, dict) else None
            yield dotted(here), told if in_order is None else dict(in_order)


def shared_digest(config: RunConfig) -> str:
    """Return the SHA-256 of the shared values as hexadecimal."""
    canonical = json.dumps(shared_items(config), separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def recorded_config(record: Mapping[str, str], own: Sequence[str], environ: Mapping[str, str]) -> RunConfig:
    """Build the configuration of a node that joins the run of this record.

    `record`: text by dotted key, as nodes write it. `own`: this node's arguments, for node-local keys; the record
    overrides shared ones. Raises ConfigError, also if the record does not read back exactly, or sets a node-local key:
    others must not control this machine.
    """
    size = sum(len(key) + len(text) for key, text in record.items())
    if size > MOST_BYTES:
        raise ConfigError(
            f"the run's record has {size} characters, more than {MOST_BYTES}: no node writes such a record"
        )
    if foreign := foreign_keys(record):
        raise ConfigError(
            f"the run's record names what each node sets for itself: {shown(', '.join(foreign[:5]))}; no node of this "
            "version writes that: start a new run, with a run.token or another one"
        )
    given = given_settings(own, environ)
    config = load_config(own, environ, over=[_Record(cast("Any", RunConfig), shared_tables(record, given))])
    ours = {key: str(value) for key, value in shared_items(config).items()}
    wrong = sorted(key for key, value in ours.items() if record.get(key) != value)
    if wrong:
        raise ConfigError(
            f"the run's record cannot be turned into a configuration here: {', '.join(wrong[:5])}; start this node "
            "with the configuration of the others, by zeroband launch"
        )
    _require_own_folders(config, given)
    return config


def foreign_keys(record: Mapping[str, str]) -> list[str]:
    """Return the node-local keys of a record, which no honest node writes."""
    return sorted(key for key, text in record.items() if not _is_told(_spot_of(key, record), text))


def other_items(record: Mapping[str, str]) -> dict[str, str]:
    """Return the record's entries that are no configuration keys: versions, and digests of inputs."""
    return {key: text for key, text in record.items() if not _spot_of(key, record).fields}


def shown(text: str, most: int = 200) -> str:
    """Make text from the store safe for a terminal: one line of limited length, without control characters."""
    line = "".join(character if character.isprintable() else "?" for character in text)
    return line if len(line) <= most else f"{line[:most]}... ({len(line)} characters)"


def _require_own_folders(config: RunConfig, given: Settings) -> None:
    """Refuse a local folder as the run's data unless this node's user names it as well."""
    rows = [row for row in _rows(given.get(("data", "sources"))) if isinstance(row.get("source"), dict)]
    named = {given.get(("data", "source", "name")), *(row["source"].get("name") for row in rows)}
    for source in (part.source for part in config.data.parts.values()):
        if isinstance(source, HuggingFaceSource) and source.name not in named and FilePath(source.name).exists():
            raise ConfigError(
                f"the run's data is {shown(source.name)!r}, which is a path on this machine; if it is to be trained "
                "on, name it here as well: --data.source.name, or [[data.sources]] in a file"
            )


class _Record(InitSettingsSource):
    """The record as a settings source that overrides this node's arguments."""

    def origin(self, path: Path) -> str | None:
        return "the run's record"


def shared_tables(record: Mapping[str, str], given: Settings | None = None) -> dict[str, Any]:
    """Return the record's known keys as nested tables.

    `given`: this node's settings; tables of the same name keep its node-local keys.
    """
    tables: dict[str, Any] = {}
    lists: dict[Path, dict[str, dict[str, Any]]] = {}
    for key, text in record.items():
        spot = _spot_of(key, record)
        if spot.fields and spot.row is None:
            is_listed = schema_keys().kinds(spot.path) & {tuple, dict}
            _put(tables, spot.path, _read(text) if is_listed else text)
        elif spot.fields and spot.row is not None:
            rows = lists.setdefault(spot.path, {})
            if spot.row not in rows:
                ours = [one for one in _rows(given and given.get(spot.path)) if one.get("name") == spot.row]
                rows[spot.row] = _own_part(ours[-1], spot.tables) if ours else {}
            if text.lower() != NONE:
                _put(rows[spot.row], spot.inner, _read(text))
    for place, rows in lists.items():
        _put(tables, place, list(rows.values()))
    return tables


class _Spot(NamedTuple):
    """Place of a record's key in the schema."""

    path: Path
    """Its path, or that of the list of tables that holds it."""
    fields: list[FieldInfo]
    """The fields that it sets, one per variant; empty if unknown."""
    is_told: bool
    """Whether it and all that holds it is shared."""
    row: str | None = None
    """Name or number of its table in the list; None outside of a list."""
    inner: Path = ()
    """Its path within that table."""
    tables: Sequence[type[Section]] = ()
    """Sections of the list."""


def _spot_of(key: str, record: Mapping[str, str]) -> _Spot:
    path, left = (), tuple(key.split("."))
    spot = _Spot((), [], True)
    sections: Sequence[type[Section]] = [RunConfig]
    while left:
        path, left = (*path, left[0]), left[1:]
        fields = [section.model_fields[path[-1]] for section in sections if path[-1] in section.model_fields]
        is_told = spot.is_told and all(map(is_shared, fields)) and bool(fields or spot.row is None)
        place = {"path": path} if spot.row is None else {"inner": (*spot.inner, path[-1])}
        spot = spot._replace(fields=fields, is_told=is_told, **place)
        if not fields:  # the schema ends here; the rest may be arbitrarily long
            break
        sections = [variant for field in fields for variant in variants_of(field).values()]
        tables = [table for field in fields for table in tables_of(field.annotation)]
        if left and tables:
            row = _row_of(left, f"{dotted(path)}.", record)
            left = left[row.count(".") + 1 :]
            spot = spot._replace(row=row, tables=tables, fields=[], is_told=is_told and bool(left))
            sections = tables
    return spot


def _row_of(left: Path, place: str, record: Mapping[str, str]) -> str:
    """Return the table that begins the rest of a key: by name, which may contain dots, else by number."""
    names = (".".join(left[:end]) for end in range(min(len(left) - 1, _MOST_PARTS), 0, -1))
    return next((name for name in names if record.get(f"{place}{name}.name") == name), left[0])


def _is_told(spot: _Spot, text: str) -> bool:
    """Whether nodes write this: of sections only that they are off, of lists of tables only that they are empty."""
    if any(map(variants_of, spot.fields)):
        return spot.is_told and text.lower() == NONE
    if any(tables_of(field.annotation) for field in spot.fields):
        return spot.is_told and text == "[]"
    return spot.is_told


def _rows(value: Any) -> list[dict[str, Any]]:
    """Return the tables of a list."""
    listed = cast("list[Any]", value) if isinstance(value, list) else []
    return [cast("dict[str, Any]", row) for row in listed if isinstance(row, dict)]


def _own_part(row: Mapping[str, Any], sections: Sequence[type[Section]]) -> dict[str, Any]:
    """Return the node-local values of a table."""
    own: dict[str, Any] = {}
    for name, value in row.items():
        fields = [section.model_fields[name] for section in sections if name in section.model_fields]
        inner = [variant for field in fields for variant in variants_of(field).values()]
        if inner and isinstance(value, dict):
            own[name] = _own_part(cast("dict[str, Any]", value), inner)
        elif fields and not any(map(is_shared, fields)):
            own[name] = value
    return own


def _put(table: dict[str, Any], path: Path, value: Any) -> None:
    for part in path[:-1]:
        inner: Any = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"the run's record has {part!r} as a value and as a table, with {dotted(path)!r} in it")
        table = cast("dict[str, Any]", inner)
    table[path[-1]] = value


def _read(text: str) -> Any:
    """Parse a list or table; other text stays as it is for the schema."""
    if text[:1] not in ("[", "{"):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # a text that only looks like one
        return text
