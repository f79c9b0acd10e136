"""What all nodes of a run must agree on: compared at join, key by key. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, cast

from pydantic import BaseModel

from zeroband.config.data import OWN_WHERE_PRIVATE
from zeroband.config.keys import Path, dotted, is_shared
from zeroband.config.schema import RunConfig


def shared_items(config: RunConfig) -> dict[str, Any]:
    """The values that all nodes must share, by dotted key; plain JSON values, a section that is off as None."""
    items: dict[str, Any] = {}
    _collect(config, (), items)
    if config.data.private:
        own = tuple(f"data.{name}." for name in OWN_WHERE_PRIVATE)
        items = {key: value for key, value in items.items() if not f"{key}.".startswith(own)}
    return items


def _collect(section: BaseModel, path: Path, items: dict[str, Any]) -> None:
    plain = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if not is_shared(field):
            continue
        if isinstance(value, BaseModel):
            _collect(value, (*path, name), items)
        elif tables := _tables(value):
            for key, table in tables.items():
                _collect(table, (*path, name, key), items)
        else:
            items[dotted((*path, name))] = _in_order(plain[name])


def _in_order(value: Any) -> Any:
    """A table with its keys in one order, whichever they were written in."""
    return dict(sorted(cast("dict[str, Any]", value).items())) if isinstance(value, dict) else value


def _tables(value: Any) -> Mapping[str, BaseModel]:
    """The tables of a list of them, by the name that each has, or by its place."""
    listed = (
        [item for item in cast("tuple[Any, ...]", value) if isinstance(item, BaseModel)]
        if isinstance(value, tuple)
        else []
    )
    return {str(getattr(item, "name", number)): item for number, item in enumerate(listed)}


def shared_digest(config: RunConfig) -> str:
    """SHA-256 of the shared values, as hexadecimal."""
    canonical = json.dumps(shared_items(config), separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()
