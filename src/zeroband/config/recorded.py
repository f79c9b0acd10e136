"""The configuration that a run's record in the store holds: its shared keys, as text, read back."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from zeroband.config.keys import Path, SchemaKeys, dotted, is_shared, schema_keys
from zeroband.config.layers import NONE
from zeroband.config.load import load_config
from zeroband.config.schema import RunConfig
from zeroband.config.shared import shared_items
from zeroband.errors import ConfigError


def recorded_config(record: Mapping[str, str], own: Sequence[str], environ: Mapping[str, str]) -> RunConfig:
    """Make the configuration of a node that joins the run of this record.

    `record`: text by dotted key, as nodes write it. `own`: this node's arguments, for what nodes do not share; a shared
    key is the record's whatever they say. Raises ConfigError, also where the record cannot be read back to the letter,
    or names a key that each node sets for itself: what others wrote sets nothing of this machine.
    """
    schema = schema_keys()
    own_keys = sorted(key for key, text in record.items() if not _may_be_told(tuple(key.split(".")), text, schema))
    if own_keys:
        raise ConfigError(
            f"the run's record names what each node sets for itself: {', '.join(own_keys[:5])}; no node of this "
            "version writes that, so somebody else did: start the run anew, with a run.token or another one"
        )
    config = load_config([*own, *shared_flags(record)], environ)
    ours = {key: str(value) for key, value in shared_items(config).items()}
    wrong = sorted(key for key, value in ours.items() if record.get(key) != value)
    if wrong:
        raise ConfigError(
            f"the run's record cannot be turned into a configuration here: {', '.join(wrong[:5])}; start this node "
            "with the configuration of the others, by zeroband launch"
        )
    return config


def shared_flags(record: Mapping[str, str]) -> list[str]:
    """The record's keys that the schema knows as flags of a command line; a list of tables is one flag."""
    schema = schema_keys()
    flags: list[str] = []
    tables: dict[Path, dict[str, dict[str, Any]]] = {}
    for key, text in record.items():
        if tuple(key.split(".")) in schema:
            flags.append(f"--{key}={_text(text)}")
        elif found := _place(key, record, schema):
            place, row, inner = found
            _put(tables.setdefault(place, {}).setdefault(row, {}), inner, _value(text))
    return [*flags, *(f"--{dotted(path)}={json.dumps(list(rows.values()))}" for path, rows in tables.items())]


def _may_be_told(path: Path, text: str, schema: SchemaKeys) -> bool:
    """Whether all nodes share this key, as far as the schema knows it; of a whole section only that it is off."""
    if path in schema.sections and text.lower() != NONE:
        return False
    for at in (path[:length] for length in range(1, len(path) + 1)):
        if at in schema.sections and not is_shared(schema.sections[at].field):
            return False
        if at in schema.keys and not any(known.is_shared for known in schema.keys[at]):
            return False
    return True


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
        if any(known.is_list for known in schema.keys.get(place, ())):
            below = key.removeprefix(f"{dotted(place)}.")
            names = [name for name in record.values() if record.get(f"{dotted(place)}.{name}.name") == name]
            names = [name for name in names if below.startswith(f"{name}.")]  # a name may have dots
            row = max(names, key=len, default=path[length])
            return place, row, tuple(below.removeprefix(f"{row}.").split("."))
    return None


def _put(table: dict[str, Any], path: Path, value: Any) -> None:
    for part in path[:-1]:
        inner: Any = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"the run's record has {part!r} as a value and as a table, with {dotted(path)!r} in it")
        table = cast("dict[str, Any]", inner)
    if value is not None:
        table[path[-1]] = value


def _value(text: str) -> Any:
    """A value of a table: lists and tables as such, all else as text, which the schema takes for what it is."""
    if text.lower() == NONE:
        return None
    try:
        return json.loads(_text(text)) if text[:1] in ("[", "{") else text
    except (ValueError, RecursionError):
        return text


def _text(text: str) -> str:
    """A list or table as JSON, which a flag takes; anything else as it is."""
    if text[:1] not in ("[", "{"):
        return text
    try:
        return json.dumps(ast.literal_eval(text))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # a text that only looks like one
        return text
