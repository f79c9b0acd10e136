"""Turns pydantic's errors into the user's terms: key, value, origin and allowed values. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from zeroband.config.keys import Path, Variant, dotted, kinds_of, schema_keys, tables_of, variants_of
from zeroband.config.schema import RunConfig
from zeroband.config.section import MASK, NAME_PATTERN, TAG, Section
from zeroband.config.sources import Settings


@dataclass(frozen=True)
class _KeyLocation:
    """The meaning of one of pydantic's error locations."""

    name: str
    """As the user writes it, with list indexes and without variant tags."""
    path: Path
    """The schema key that it is, or is within."""
    tags: tuple[str, ...]
    """The types of a section to choose from."""
    table: type[Section] | None
    """The section of the table of a list that it is within."""


def describe(error: ValidationError, settings: Settings) -> str:
    """Return one line per problem."""
    return "\n".join(line for detail in error.errors() for line in _lines(detail, settings))


def _lines(detail: ErrorDetails, settings: Settings) -> Iterator[str]:
    at, value, message = _place_of(detail["loc"]), detail["input"], detail["msg"]
    origin = _from(at.path, settings)
    match detail["type"]:
        case "value_error":  # a rule over several keys, whose message names them
            yield message.removeprefix("Value error, ")
        case "extra_forbidden" if at.table is not None:
            close = difflib.get_close_matches(at.name.rpartition(".")[2], at.table.model_fields, n=1, cutoff=0.6)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(at.table.model_fields)}"
            yield f"unknown key {at.name}{origin}: {hint}"
        case "extra_forbidden":
            yield from _misplaced(at.path, value, settings)
        case "missing" if at.table is not None:
            yield f"{at.name} is missing{origin}"
        case "missing":
            variant = _chosen(at.path[:-1], settings)
            yield f"{at.name} is missing" + (f"; {variant} needs it" if variant else "")
        case "union_tag_invalid" | "union_tag_not_found":
            tag = cast("dict[str, Any]", value).get(TAG) if isinstance(value, dict) else None
            allowed, origin = ", ".join(f'"{known}"' for known in at.tags), _from((*at.path, TAG), settings)
            if tag is None:
                yield f"{at.name}.{TAG} is missing{origin}; allowed: {allowed}"
            else:
                yield f"{at.name}.{TAG}={tag!r}{origin}; allowed: {allowed}"
        case kind:
            shown = MASK if schema_keys().holds_secret(at.path) else repr(value)
            said = _objection(kind, detail, at) or f"{message[0].lower()}{message[1:]}"
            yield f"{at.name}={shown}{origin}: {said}"


def _objection(kind: str, detail: ErrorDetails, at: _KeyLocation) -> str | None:
    """Describe a problem for which pydantic's message is less helpful."""
    value, section = detail["input"], schema_keys().sections.get(at.path)
    if kind == "string_pattern_mismatch" and detail.get("ctx", {}).get("pattern") == NAME_PATTERN:
        return "a name is 1 to 64 letters, digits, dots, dashes and underscores"
    if kind == "tuple_type" and isinstance(value, str):
        return "not a JSON list"
    if kind == "dict_type":
        return "not a JSON object {...}; in a file it is a table"
    if section is None:
        return None
    if isinstance(value, str) and value in section.variants:
        return f'{at.name} is a section; did you mean {at.name}.{TAG} = "{value}"?'
    return f"{at.name} is a section; set its keys, such as {at.name}.{'KEY' if '' in section.variants else TAG}"


def _place_of(location: Sequence[int | str]) -> _KeyLocation:
    name, path = "", Path()
    section: type[Section] | None = RunConfig
    table: type[Section] | None = None
    variants: Mapping[str, type[Section]] = {}
    field: FieldInfo | None = None
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
            section = table = next(iter(tables_of(field.annotation)), table) if field else table
        elif part in variants:
            section, variants = variants[part], {}
            table = table and section
        elif section is not None:
            name = f"{name}.{part}" if name else part
            path = path if table else (*path, part)
            field = section.model_fields.get(part)
            variants = variants_of(field) if field else {}
            section = variants.get("")
        elif field and dict in kinds_of(field):  # else it names one of several types that a value may have
            name = f"{name}.{part}"
    return _KeyLocation(name, path, tuple(variants), table)


def _from(path: Path, settings: Settings) -> str:
    """Return the origin of a value, or of the section that holds it."""
    for length in range(len(path), 0, -1):
        if origin := settings.origins.get(path[:length]):
            return f" (from {origin})"
    return ""


def _misplaced(path: Path, value: Any, settings: Settings) -> Iterator[str]:
    """Describe keys of another variant than the chosen one; unknown keys were refused before."""
    schema = schema_keys()
    if path in schema.sections and isinstance(value, dict) and value:
        for name, inner in cast("dict[str, Any]", value).items():
            yield from _misplaced((*path, name), inner, settings)
        return
    found = schema.keys.get(path) or (schema.sections[path],)
    owners = [key.variant for key in found if key.variant]
    chosen = _chosen(owners[0].section, settings)
    yield f"{dotted(path)}{_from(path, settings)} belongs to {' or '.join(map(str, owners))}; chosen is {chosen}"


def _chosen(section: Path, settings: Settings) -> Variant | None:
    """Return the chosen variant of a section; None without variants."""
    tag = settings.get((*section, TAG))
    return Variant(section, tag) if tag else None
