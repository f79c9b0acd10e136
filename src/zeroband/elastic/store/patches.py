"""Patches from one sealed record to the next, for readers that have the previous one. Pure.

A record of many members is long and changes little from round to round. A patch is `TAG MAC ROUND VERSION ID SESSIONS
TEXT`: the tag of the previous record, the header of the new one, and a JSON object of the changed values. It need not
be trusted, since the result has a seal.
"""

from __future__ import annotations

import json
from typing import Any

_MAC_BYTES = 32
_HEAD_PARTS = 5
"""Fields of a sealed record before its text."""


def tag_of(raw: bytes) -> bytes:
    """Identify a sealed record by its MAC and length, as the scripts do."""
    return raw[:_MAC_BYTES] + str(len(raw)).encode() if raw else b""


def patch_of(before: str, after: str) -> str:
    """Return the patch from one record to another; empty if none reproduces it, or none is shorter than it."""
    if not before:
        return ""
    *head, text = after.split(" ", _HEAD_PARTS)
    patch = " ".join((*head, json.dumps(_changed(_values(before), json.loads(text)), sort_keys=True)))
    is_shorter = len(patch) < len(after) and patched(before.encode(), patch.encode()).decode() == after
    return f"{tag_of(before.encode()).decode()} {patch}" if is_shorter else ""


def patched(before: bytes, patch: bytes) -> bytes:
    """Apply a patch without its tag. Raises ValueError if it is malformed."""
    try:
        *head, text = patch.decode().split(" ", _HEAD_PARTS)
        values = _merged(_values(before.decode()), json.loads(text))
    except RecursionError as error:
        raise ValueError("a patch is nested too deeply") from error
    return " ".join((*head, json.dumps(values, sort_keys=True))).encode()


def _values(record: str) -> Any:
    return json.loads(record.split(" ", _HEAD_PARTS)[-1])


def _changed(before: Any, after: Any) -> Any:
    """The values of an object that changed, recursively."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return after
    return {key: _changed(before.get(key), value) for key, value in after.items() if value != before.get(key)}


def _merged(before: Any, changed: Any) -> Any:
    """The inverse of `_changed`."""
    if not isinstance(before, dict) or not isinstance(changed, dict):
        return changed
    return {**before, **{key: _merged(before.get(key), value) for key, value in changed.items()}}
