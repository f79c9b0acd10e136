"""What pydantic objects to, in the user's names: the key, the value, where it came from and what is allowed. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from zeroband.config.keys import TAG, Path, SchemaKeys, Variant, dotted, tables_of, variants_of
from zeroband.config.layers import Setting
from zeroband.config.section import NAME_PATTERN, Section

MASK = "**********"
"""Stands for a secret wherever values are shown."""

_VALUE_ERROR = "Value error, "


def describe(error: ValidationError, merged: Mapping[Path, Setting], schema: SchemaKeys) -> str:
    """One line for each thing that is wrong."""
    return "\n".join(_line(detail, merged, schema) for detail in error.errors())


def _line(detail: ErrorDetails, merged: Mapping[Path, Setting], schema: SchemaKeys) -> str:
    path, index = _split(detail["loc"], schema)
    name = dotted(path) + index
    origin = _origin(path, merged)
    if detail["type"] == "value_error":  # a rule over several keys, whose message names them
        return detail["msg"].removeprefix(_VALUE_ERROR)
    if any(isinstance(part, int) for part in detail["loc"][:-1]):
        return _line_of_table(detail, path, merged, schema)
    if detail["type"] == "extra_forbidden":
        return "\n".join(_misplaced(at, merged, schema) for at in sorted(merged) if at[: len(path)] == path)
    if detail["type"] == "missing":
        variant = _chosen(path[:-1], merged, schema)
        return f"{name} is missing" + (f"; {variant} needs it" if variant else "")
    if detail["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return _wrong_tag(path, merged, schema)
    shown = MASK if schema.holds_secret(path) else repr(detail["input"])
    if detail["type"] == "string_pattern_mismatch" and detail.get("ctx", {}).get("pattern") == NAME_PATTERN:
        return f"{name}={shown}{origin}: a name is 1 to 64 letters, digits, dots, dashes and underscores"
    if section := schema.sections.get(path):
        first = f"{name}.KEY" if "" in section.variants else f"{name}.{TAG}"
        return f"{name}={shown}{origin}: {name} is a section; set its keys, such as {first}"
    return f"{name}={shown}{origin}: {detail['msg'][0].lower()}{detail['msg'][1:]}"


def _line_of_table(detail: ErrorDetails, path: Path, merged: Mapping[Path, Setting], schema: SchemaKeys) -> str:
    """What is wrong inside one of the tables of a list."""
    at = next(place for place, part in enumerate(detail["loc"]) if isinstance(part, int))
    name, origin = f"{dotted(path[:at])}[{detail['loc'][at]}]", _origin(path[:at], merged)
    section = tables_of(schema.keys[path[:at]][0].field.annotation)[0]
    variants: Mapping[str, type[Section]] = {}
    for part in map(str, detail["loc"][at + 1 :]):
        if part in variants:
            section, variants = variants[part], {}
            continue
        name = f"{name}.{part}"
        if part in section.model_fields:
            variants = variants_of(section.model_fields[part])
    if detail["type"] == "extra_forbidden":
        close = difflib.get_close_matches(name.rpartition(".")[2], section.model_fields, n=1, cutoff=0.6)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(section.model_fields)}"
        return f"unknown key {name}{origin}: {hint}"
    if detail["type"] == "missing":
        return f"{name} is missing{origin}"
    if detail["type"] in ("union_tag_invalid", "union_tag_not_found"):
        allowed = ", ".join(f'"{tag}"' for tag in variants)
        return f"{name}.{TAG} is missing or unknown{origin}; allowed: {allowed}"
    return f"{name}={detail['input']!r}{origin}: {detail['msg'][0].lower()}{detail['msg'][1:]}"


def _split(location: Sequence[int | str], schema: SchemaKeys) -> tuple[Path, str]:
    """A location of pydantic's as our key, without the tags of variants, and the index into a list."""
    path: Path = ()
    index = ""
    for part in location:
        if isinstance(part, int):
            index += f"[{part}]"
        elif path not in schema.sections or part not in schema.sections[path].variants:
            path = (*path, part)
    return path, index


def _origin(path: Path, merged: Mapping[Path, Setting]) -> str:
    for length in range(len(path), 0, -1):
        if setting := merged.get(path[:length]):
            return f" (from {setting.origin})"
    return ""


def _misplaced(path: Path, merged: Mapping[Path, Setting], schema: SchemaKeys) -> str:
    """A key of another variant than the one that is chosen; keys that exist nowhere were refused before."""
    found = schema.keys.get(path) or (schema.sections[path],)
    owners = [key.variant for key in found if key.variant]
    chosen = _chosen(owners[0].section, merged, schema)
    return f"{dotted(path)}{_origin(path, merged)} belongs to {' or '.join(map(str, owners))}; chosen is {chosen}"


def _chosen(section: Path, merged: Mapping[Path, Setting], schema: SchemaKeys) -> Variant | None:
    """The variant of a section that holds; None for a section without variants."""
    setting = merged.get((*section, TAG))
    tag = setting.value if setting else getattr(schema.sections.get(section), "default_tag", None)
    return Variant(section, tag) if tag else None


def _wrong_tag(path: Path, merged: Mapping[Path, Setting], schema: SchemaKeys) -> str:
    name = f"{dotted(path)}.{TAG}"
    allowed = ", ".join(f'"{tag}"' for tag in schema.sections[path].variants)
    chosen = merged.get((*path, TAG))
    if chosen is None:
        return f"{name} is missing{_origin(path, merged)}; allowed: {allowed}"
    return f"{name}={chosen.value!r} (from {chosen.origin}); allowed: {allowed}"
