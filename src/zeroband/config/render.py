"""Renders the configuration as TOML that loads again, and the schema as `--help`. Pure."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from types import NoneType
from typing import Annotated, Any, Literal, cast, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from zeroband.config.keys import ConfigKey, Path, Variant, dotted, schema_keys, tables_of
from zeroband.config.schema import RunConfig
from zeroband.config.section import MASK, NONE, TAG, Section, meanings
from zeroband.config.sources import ENV_DELIMITER, ENV_PREFIX

_WIDTH = 110
_BOUNDS = {Gt: (">", "gt"), Ge: (">=", "ge"), Lt: ("<", "lt"), Le: ("<=", "le")}
_NAMES: dict[Any, str] = {bool: "boolean", int: "integer", float: "number", str: "text", SecretStr: "secret"}


def render_toml(config: RunConfig) -> str:
    """Render every value as TOML that loads again; secrets only as comments."""
    lines = [f"{name} = {_toml(value)}" for name, value in _values(config) if not isinstance(value, BaseModel)]
    for name, value in _values(config):
        if isinstance(value, BaseModel):
            lines += _table(value, (name,))
    return "\n".join(lines) + "\n"


def _values(section: BaseModel) -> list[tuple[str, Any]]:
    return [(name, getattr(section, name)) for name in type(section).model_fields]


def _table(section: BaseModel, path: Path) -> Iterator[str]:
    yield from ("", f"[{dotted(path)}]")
    for name, value in _values(section):
        if isinstance(value, SecretStr):
            variable = ENV_PREFIX + ENV_DELIMITER.join((*path, name)).upper()
            yield f'# {name} = "{MASK}"  # a secret; set it again as {variable}'
        elif not isinstance(value, BaseModel):
            yield f"{name} = {_toml(value)}"
    for name, value in _values(section):
        if isinstance(value, BaseModel):
            yield from _table(value, (*path, name))


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(_toml(part) for part in cast(Sequence[Any], value))}]"
    if isinstance(value, BaseModel):  # a table of a list, where a key that is not set is left out
        return _toml({name: inner for name, inner in _values(value) if inner is not None})
    if isinstance(value, dict):
        table = cast(dict[str, Any], value)
        return f"{{ {', '.join(f'{_toml(key)} = {_toml(inner)}' for key, inner in table.items())} }}" if table else "{}"
    if value is None:
        return _toml(NONE)
    assert isinstance(value, str | PurePath), f"no TOML for {value!r}"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def help_text() -> str:
    """Render every key with its type, default and meaning, by section."""
    schema = schema_keys()
    groups: dict[Path, list[str]] = {(): []}
    for path, section in schema.sections.items():
        groups[path] = _section_help(section)
    for path, keys in schema.keys.items():
        section = schema.sections.get(path[:-1])
        groups[path[:-1]] += _tag_help(path, section) if section and path[-1] == TAG else _key_help(path, keys)
    return "\n".join([textwrap.dedent(_USAGE).strip(), "", *(line for group in groups.values() for line in group), ""])


_USAGE = f"""
    usage: train.py [@FILE.toml ...] [--SECTION.KEY VALUE ...] [--dry-run] [--help]

    Values come from the files, left to right, then from the environment, then from flags; the last one wins.
      @FILE.toml, @ FILE.toml     TOML with the sections and keys below
      {ENV_PREFIX}SECTION{ENV_DELIMITER}KEY      environment, for example {ENV_PREFIX}TRAIN{ENV_DELIMITER}MICRO_BS=4
      --section.key VALUE         flags, also --section.key=VALUE, and with - for _; the value of a boolean is
                                  optional, and --no-section.key sets it to false
      --dry-run                   print the resolved configuration, and exit

    Lists are JSON or a,b,c; "{NONE}" switches a value or a section off. A section has only the keys of its {TAG}.
    Keys marked * may differ between the nodes of one run; all others are compared when a node joins.
"""


def _section_help(section: ConfigKey) -> list[str]:
    doc = section.meaning
    default = f" (default: {NONE})" if NoneType in section.kinds else ""
    return ["", f"[{dotted(section.path)}]{default}", *_wrapped(doc, indent=2)]


def _key_help(path: Path, keys: Sequence[ConfigKey]) -> list[str]:
    first = keys[0]
    mark = "" if first.is_shared else " *"
    type_name = _type_name(first.field.annotation, first.field.metadata)
    owners: dict[str, list[Variant]] = {}  # variants of a section may have the key with other defaults and meanings
    for key in keys:
        owners.setdefault(f"{key.meaning} {_default(key.field)}", []).extend(filter(None, [key.variant]))
    lines = [f"  --{dotted(path)}{mark}  {type_name}"]
    for text, variants in owners.items():
        only = f"{dotted(variants[0].section)}.{TAG} = {' | '.join(v.tag for v in variants)}: " if variants else ""
        lines += _wrapped(only + text, indent=6)
    for table in tables_of(first.field.annotation):
        for name, field in table.model_fields.items():
            lines.append(f"      {name}  {_type_name(field.annotation, field.metadata)}")
            lines += _wrapped(f"{meanings(table)[name]} {_default(field)}", indent=10)
    return lines


def _tag_help(path: Path, section: ConfigKey) -> list[str]:
    default = f"(default: {section.default_tag})" if section.default_tag else "(required in this section)"
    return [
        f"  --{dotted(path)}  {' | '.join(section.variants)}",
        *_wrapped(f"Selects the keys of this section. {default}", indent=6),
    ]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "(required)"
    value = field.get_default()
    return f"(default: {NONE if value is None else _toml(value)})"


def _type_name(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Return a type in the user's words, with its bounds: `integer > 0 or none`."""
    bounds = ",".join(_bounds(metadata))
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *inner_metadata = get_args(annotation)
        return _type_name(inner, (*inner_metadata, *metadata))
    if annotation is NoneType:
        return NONE
    if origin is Literal:
        return " | ".join(str(choice) for choice in get_args(annotation))
    if origin is tuple:
        members = [member for member in get_args(annotation) if member is not Ellipsis]
        count = "" if Ellipsis in get_args(annotation) else f", {len(members)} of them"
        name = _type_name(members[0])
        return f"list of {'tables' if name == 'table' else name}{count}{bounds}"
    if origin is dict:
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "table"
    if all(isinstance(member, type) and issubclass(member, Section) for member in get_args(annotation) or [None]):
        return "table, as the section of this name"
    if get_args(annotation):
        return " or ".join(
            _type_name(member, () if member is NoneType else metadata) for member in get_args(annotation)
        )
    return _NAMES.get(annotation, str(getattr(annotation, "__name__", annotation)).lower()) + bounds


def _bounds(metadata: Sequence[Any]) -> Iterator[str]:
    for item in metadata:
        if isinstance(item, MinLen):
            yield f" at least {item.min_length}"
        elif type(item) in _BOUNDS:
            sign, attribute = _BOUNDS[type(item)]
            yield f" {sign} {getattr(item, attribute)}"


def _wrapped(text: str, *, indent: int) -> list[str]:
    pad = " " * indent
    return textwrap.wrap(
        " ".join(text.split()), _WIDTH, initial_indent=pad, subsequent_indent=pad, break_on_hyphens=False
    )
