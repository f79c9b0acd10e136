"""The configuration that a run's record in the store holds: its shared keys, as text, read back.

Whoever can write to the store of a run without a token may write such a record. So it sets only keys that the schema
declares to be shared, which `shared_items` writes; it names no file of this machine, and no code.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, cast

from pydantic_settings import InitSettingsSource

from zeroband.config.data import HuggingFaceSource
from zeroband.config.keys import Path, SchemaKeys, dotted, is_shared, kinds_of, schema_keys, tables_of, variants_of
from zeroband.config.load import given_settings, load_config
from zeroband.config.schema import RunConfig
from zeroband.config.section import NONE, Section
from zeroband.config.shared import shared_items
from zeroband.config.sources import Settings
from zeroband.errors import ConfigError

MOST_BYTES = 1 << 20
"""Largest record, keys and values together; one of a large transformers configuration has some 20 kB."""


def recorded_config(record: Mapping[str, str], own: Sequence[str], environ: Mapping[str, str]) -> RunConfig:
    """Make the configuration of a node that joins the run of this record.

    `record`: text by dotted key, as nodes write it. `own`: this node's arguments, for what nodes do not share; a shared
    key is the record's whatever they say. Raises ConfigError, also where the record cannot be read back to the letter,
    or names a key that each node sets for itself: what others wrote sets nothing of this machine.
    """
    size = sum(len(key) + len(text) for key, text in record.items())
    if size > MOST_BYTES:
        raise ConfigError(f"the run's record has {size} characters, more than {MOST_BYTES}: no node writes such a one")
    if foreign := foreign_keys(record):
        raise ConfigError(
            f"the run's record names what each node sets for itself: {shown(', '.join(foreign[:5]))}; no node of this "
            "version writes that, so somebody else did: start the run anew, with a run.token or another one"
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
    """The keys of a record that no node writes, since each sets them for itself."""
    schema = schema_keys()
    return sorted(key for key, text in record.items() if not _may_be_told(key, text, record, schema))


def shown(text: str, most: int = 200) -> str:
    """What somebody wrote into the store, for a terminal: one line, without control characters, not longer than so."""
    line = "".join(character if character.isprintable() else "?" for character in text)
    return line if len(line) <= most else f"{line[:most]}... ({len(line)} characters)"


def _require_own_folders(config: RunConfig, given: Settings) -> None:
    """Refuse a folder of this machine as the run's data, unless this node's user names it, too."""
    rows = [row for row in _rows(given.get(("data", "sources"))) if isinstance(row.get("source"), dict)]
    named = {given.get(("data", "source", "name")), *(row["source"].get("name") for row in rows)}
    for source in (part.source for part in config.data.parts.values()):
        if isinstance(source, HuggingFaceSource) and source.name not in named and FilePath(source.name).exists():
            raise ConfigError(
                f"the run's data is {shown(source.name)!r}, which is a path on this machine; if it is to be trained "
                "on, name it here, too: --data.source.name, or [[data.sources]] in a file"
            )


class _Record(InitSettingsSource):
    """What a record sets, as a source of settings that is stronger than what this node says."""

    def origin(self, path: Path) -> str | None:
        return "the run's record"


def shared_tables(record: Mapping[str, str], given: Settings | None = None) -> dict[str, Any]:
    """The record's keys that the schema knows, as nested tables.

    `given`: this node's settings; tables of the same name keep from it what each node sets for itself.
    """
    schema = schema_keys()
    tables: dict[str, Any] = {}
    lists: dict[Path, dict[str, dict[str, Any]]] = {}
    for key, text in record.items():
        path = tuple(key.split("."))
        if path in schema:
            is_plain = not schema.kinds(path) & {tuple, dict}
            _put(tables, path, text if is_plain else _read(text))
        elif found := _place(key, record, schema):
            place, row, inner = found
            if row not in lists.setdefault(place, {}):
                ours = [one for one in _rows(given and given.get(place)) if one.get("name") == row]
                lists[place][row] = _own_part(ours[-1], _tables_at(place, schema)) if ours else {}
            if text.lower() != NONE:
                _put(lists[place][row], inner, _read(text))
    for place, rows in lists.items():
        _put(tables, place, list(rows.values()))
    return tables


def _rows(value: Any) -> list[dict[str, Any]]:
    """The tables of a list of them."""
    listed = cast("list[Any]", value) if isinstance(value, list) else []
    return [cast("dict[str, Any]", row) for row in listed if isinstance(row, dict)]


def _own_part(row: Mapping[str, Any], sections: Sequence[type[Section]]) -> dict[str, Any]:
    """What a table has that each node sets for itself."""
    own: dict[str, Any] = {}
    for name, value in row.items():
        fields = [section.model_fields[name] for section in sections if name in section.model_fields]
        inner = [variant for field in fields for variant in variants_of(field).values()]
        if inner and isinstance(value, dict):
            own[name] = _own_part(cast("dict[str, Any]", value), inner)
        elif fields and not any(map(is_shared, fields)):
            own[name] = value
    return own


def _tables_at(place: Path, schema: SchemaKeys) -> list[type[Section]]:
    """What the list of tables at a key is made of; of another key nothing."""
    return [section for known in schema.keys.get(place, ()) for section in tables_of(known.field.annotation)]


def _may_be_told(key: str, text: str, record: Mapping[str, str], schema: SchemaKeys) -> bool:
    """Whether all nodes share this key, as far as the schema knows it.

    Of a section only that it is off may be told, and of a list of tables that it is empty: else their keys are.
    """
    path = tuple(key.split("."))
    if path in schema.sections and text.lower() != NONE:
        return False
    if _tables_at(path, schema) and text != "[]":
        return False
    for at in (path[:length] for length in range(1, len(path) + 1)):
        if at in schema.sections and not is_shared(schema.sections[at].field):
            return False
        if at in schema.keys and not all(known.is_shared for known in schema.keys[at]):
            return False
        if at != path and (sections := _tables_at(at, schema)):
            found = _place(key, record, schema)
            return found is not None and _is_shared_in(sections, found[2])
    return True


def _is_shared_in(sections: Iterable[type[Section]], path: Path) -> bool:
    """Whether these sections have this key, and all nodes share it."""
    fields = [section.model_fields[path[0]] for section in sections if path[0] in section.model_fields]
    if not fields or not all(map(is_shared, fields)):
        return False
    inner = [variant for field in fields for variant in variants_of(field).values()]
    if not inner:
        return len(path) == 1 or any(dict in kinds_of(field) for field in fields)
    return len(path) > 1 and _is_shared_in(inner, path[1:])


def other_items(record: Mapping[str, str]) -> dict[str, str]:
    """What of a record is no key of the configuration: versions, and digests of what nodes read or compute."""
    schema = schema_keys()
    return {
        key: text
        for key, text in record.items()
        if tuple(key.split(".")) not in schema and _place(key, record, schema) is None
    }


def _place(key: str, record: Mapping[str, str], schema: SchemaKeys) -> tuple[Path, str, Path] | None:
    """The list that a key lies in, its table there, by name or number, and the key in that table."""
    path = tuple(key.split("."))
    for length in range(2, len(path) - 1):
        place = path[:length]
        if tuple in schema.kinds(place):
            rows = (".".join(path[length:end]) for end in range(len(path) - 1, length, -1))  # a name may have dots
            row = next((row for row in rows if record.get(f"{dotted(place)}.{row}.name") == row), path[length])
            return place, row, path[length + row.count(".") + 1 :]
    return None


def _put(table: dict[str, Any], path: Path, value: Any) -> None:
    for part in path[:-1]:
        inner: Any = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"the run's record has {part!r} as a value and as a table, with {dotted(path)!r} in it")
        table = cast("dict[str, Any]", inner)
    table[path[-1]] = value


def _read(text: str) -> Any:
    """Return a list or table as such; all else stays text, which the schema takes for what it is."""
    if text[:1] not in ("[", "{"):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # a text that only looks like one
        return text
