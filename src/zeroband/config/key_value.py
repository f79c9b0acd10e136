"""KEY=VALUE as users write it where the schema does not know the keys. Pure."""

from __future__ import annotations

import json
from typing import Any


def key_value(text: str) -> tuple[str, Any]:
    """The two sides; a value that is no JSON is text. Raises ValueError where one of them is missing."""
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise ValueError(f"{text!r} is no KEY=VALUE")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value
