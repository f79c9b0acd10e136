"""The schema as dotted keys: what can be set, in which section, and the nearest key to a misspelt one. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from zeroband.config.schema import RunConfig
from zeroband.config.section import NODE_LOCAL, TAG, Section, meanings

Path = tuple[str, ...]
"""Parts of a dotted key: ("train", "micro_bs")."""

_MOST_GUESSES = 3


class Variant(NamedTuple):
    """One type of a tagged section."""

    section: Path
    tag: str

    def __str__(self) -> str:
        return f'{dotted(self.section)}.{TAG}="{self.tag}"'


@dataclass(frozen=True)
class ConfigKey:
    """A value that can be set, or a section. Keys of several variants of a section may share a path."""

    path: Path
    parent: type[Section]
    field: FieldInfo
    variant: Variant | None
    """Variant of the parent section that has the key; None: all."""
    variants: Mapping[str, type[Section]]
    """Schemas of a section by tag, under "" if it has no tag; empty for a value."""

    @property
    def meaning(self) -> str:
        """The text below it in its parent section; empty if it has none."""
        return meanings(self.parent).get(self.path[-1], "")

    @property
    def default_tag(self) -> str | None:
        """The default variant; None if it must be named, or there is only one."""
        return getattr(self.field.get_default(), TAG, None)

    @property
    def is_shared(self) -> bool:
        """Whether all nodes of a run must agree on it."""
        return is_shared(self.field)

    @property
    def kinds(self) -> frozenset[Any]:
        return kinds_of(self.field)


@dataclass(frozen=True)
class SchemaKeys:
    """All keys and sections, in the order of the schema."""

    keys: Mapping[Path, tuple[ConfigKey, ...]]
    sections: Mapping[Path, ConfigKey]

    def __contains__(self, path: Path) -> bool:
        return path in self.keys or path in self.sections

    def holds_secret(self, path: Path) -> bool:
        """Whether a key, or one within a section, is secret."""
        return any(SecretStr in key.kinds for at, keys in self.keys.items() if at[: len(path)] == path for key in keys)

    def kinds(self, path: Path) -> frozenset[Any]:
        """Return the types of a key over all variants; empty for an unknown key."""
        found = (self.sections[path],) if path in self.sections else self.keys.get(path, ())
        return frozenset[Any]().union(*(key.kinds for key in found))

    def nearest(self, name: str) -> list[str]:
        """Return what a misspelt key may have meant, likeliest first: one similar key, or those with its last part."""
        known = [key for key in map(dotted, (*self.keys, *self.sections)) if not name.startswith(f"{key}.")]
        siblings = [key for key in known if key.partition(".")[0] == name.partition(".")[0] != name]
        guesses = (
            _closest(name, known, cutoff=0.85),
            _with_leaf(_leaf(name), siblings),
            _with_leaf(_close_leaf(name, siblings, cutoff=0.75), siblings)[:1],
            _with_leaf(_leaf(name), known),
            _closest(name, known, cutoff=0.75),
            _closest(name, _with_leaf(_close_leaf(name, known, cutoff=0.7), known), cutoff=0.0),
            [str(Variant(path, name)) for path, section in self.sections.items() if name in section.variants],
        )
        return next((guess for guess in guesses if guess), [])[:_MOST_GUESSES]


@cache
def schema_keys() -> SchemaKeys:
    """Return the keys and sections of the configuration."""
    keys: dict[Path, tuple[ConfigKey, ...]] = {}
    sections: dict[Path, ConfigKey] = {}
    for key in _walk(RunConfig, (), None):
        if key.variants:
            sections[key.path] = key
        else:
            keys[key.path] = (*keys.get(key.path, ()), key)
    return SchemaKeys(keys, sections)


def dotted(path: Path) -> str:
    """Join a path to a dotted key."""
    return ".".join(path)


def is_shared(field: FieldInfo) -> bool:
    """Whether all nodes of a run must agree on a field."""
    return field.json_schema_extra != NODE_LOCAL


def kinds_of(field: FieldInfo) -> frozenset[Any]:
    """Return the types of a field: int, bool, NoneType, SecretStr, tuple for a list, dict for a free table."""
    return frozenset(get_origin(member) or member for member in member_types(field.annotation))


def member_types(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union without annotations; for another type, that type."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return member_types(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return tuple(inner for member in get_args(annotation) for inner in member_types(member))
    return (annotation,)


def tables_of(annotation: Any) -> list[type[Section]]:
    """Return the section of a list of tables, in a list; empty for other types."""
    members = [
        inner for member in member_types(annotation) if get_origin(member) is tuple for inner in get_args(member)
    ]
    return [member for member in members if _is_section(member)]


def variants_of(field: FieldInfo) -> Mapping[str, type[Section]]:
    """Return the sections that a field may hold, by tag; empty for a value."""
    return {_tag_of(member): member for member in member_types(field.annotation) if _is_section(member)}


def _walk(parent: type[Section], path: Path, variant: Variant | None) -> Iterator[ConfigKey]:
    for name, field in parent.model_fields.items():
        key = ConfigKey((*path, name), parent, field, variant, variants_of(field))
        yield key
        for tag, section in key.variants.items():
            yield from _walk(section, key.path, Variant(key.path, tag) if tag else variant)


def _is_section(member: Any) -> bool:
    return isinstance(member, type) and issubclass(member, Section)


def _tag_of(section: type[Section]) -> str:
    field = section.model_fields.get(TAG)
    return get_args(field.annotation)[0] if field else ""


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _with_leaf(leaf: str, known: Collection[str]) -> list[str]:
    """Return the keys with this last part, shortest first."""
    return sorted((key for key in known if leaf and _leaf(key) == leaf), key=lambda key: (key.count("."), key))


def _close_leaf(name: str, known: Collection[str], *, cutoff: float) -> str:
    """Return the last part of a key that is closest to a name's; empty if none is."""
    return next(iter(_closest(_leaf(name), {_leaf(key) for key in known}, cutoff=cutoff)), "")


def _closest(name: str, known: Collection[str], *, cutoff: float) -> list[str]:
    return difflib.get_close_matches(name, sorted(known), n=1, cutoff=cutoff)
