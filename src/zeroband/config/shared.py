"""What all nodes of a run must agree on: compared at join, key by key. Pure."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import BaseModel

from zeroband.config.keys import Path, dotted, is_shared
from zeroband.config.schema import RunConfig


def shared_items(config: RunConfig) -> dict[str, Any]:
    """The values that all nodes must share, by dotted key; plain JSON values, a section that is off as None."""
    items: dict[str, Any] = {}
    _collect(config, (), items)
    return items


def _collect(section: BaseModel, path: Path, items: dict[str, Any]) -> None:
    plain = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if not is_shared(field):
            continue
        if isinstance(value, BaseModel):
            _collect(value, (*path, name), items)
        else:
            items[dotted((*path, name))] = plain[name]


def shared_digest(config: RunConfig) -> str:
    """SHA-256 of the shared values, as hexadecimal."""
    canonical = json.dumps(shared_items(config), separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
