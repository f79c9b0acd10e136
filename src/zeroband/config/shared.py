"""What all nodes of a run must agree on: compared at join, key by key. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

from pydantic import BaseModel

from zeroband.config.data import OWN_WHERE_PRIVATE
from zeroband.config.keys import Path, dotted, is_shared
from zeroband.config.schema import RunConfig


def shared_items(config: RunConfig) -> dict[str, Any]:
    """The values that all nodes must share, by dotted key; plain JSON values, a section that is off as None."""
    own = tuple(f"data.{name}." for name in OWN_WHERE_PRIVATE) if config.data.private else ()
    found = _shared(config, config.model_dump(mode="json"), ())
    return {key: value for key, value in found if not f"{key}.".startswith(own)}


def _shared(section: BaseModel, plain: Mapping[str, Any], path: Path) -> Iterator[tuple[str, Any]]:
    """Keys and values of a section, which is `plain` as JSON."""
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
    """SHA-256 of the shared values, as hexadecimal."""
    canonical = json.dumps(shared_items(config), separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()
