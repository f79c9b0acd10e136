"""Layers of settings become one: a later layer wins, and a section that changes its type starts anew. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from zeroband.config.keys import TAG, Path, SchemaKeys
from zeroband.config.layers import Setting


def merge(layers: Iterable[Iterable[Setting]], schema: SchemaKeys) -> dict[Path, Setting]:
    """The settings that hold, by key, after all layers from the weakest to the strongest."""
    merged: dict[Path, Setting] = {}
    for layer in layers:
        for setting in sorted(layer, key=lambda setting: setting.path[-1] != TAG):  # a new type before its keys
            _set(merged, setting, schema)
    return merged


def _set(merged: dict[Path, Setting], setting: Setting, schema: SchemaKeys) -> None:
    path = setting.path
    section = schema.sections.get(path[:-1])
    if path[-1] == TAG and section is not None:
        before = merged.get(path)
        if setting.value != (before.value if before else section.default_tag):
            _drop_below(merged, path[:-1])
    for length in range(1, len(path)):
        above = merged.get(path[:length])
        if above is not None and above.value != {}:
            del merged[path[:length]]  # the section was off, and is on again
    if setting.value != {}:
        _drop_below(merged, path)
    elif path in merged and merged[path].value == {}:
        return
    merged[path] = setting


def _drop_below(merged: dict[Path, Setting], path: Path) -> None:
    for below in [key for key in merged if key[: len(path)] == path and key != path]:
        del merged[below]


def nested(merged: Mapping[Path, Setting], schema: SchemaKeys) -> dict[str, Any]:
    """The settings as nested tables for validation. A section gets the tag of its default where it has none."""
    root: dict[str, Any] = {}
    for path, setting in sorted(merged.items()):
        table = root
        for length, name in enumerate(path[:-1], start=1):
            if name not in table:
                table[name] = _new_table(path[:length], schema)
            table = table[name]
        is_section = path in schema.sections and setting.value == {}
        table[path[-1]] = _new_table(path, schema) if is_section else setting.value
    return root


def _new_table(path: Path, schema: SchemaKeys) -> dict[str, Any]:
    tag = schema.sections[path].default_tag
    return {TAG: tag} if tag else {}
