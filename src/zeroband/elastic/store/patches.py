"""What of a sealed record is another than in the one before it, for readers who hold that one. Pure.

A record of many members is long, and from round to round most of it stays. A patch is `TAG MAC ROUND VERSION ID
SESSIONS TEXT`: the tag of the record before, the head of the new one, and a JSON object of the values that are others.
It need not be trusted: what comes out has its seal.
"""

from __future__ import annotations

import json
from typing import Any

_MAC_BYTES = 32
_HEAD_PARTS = 5
"""Parts of a sealed record before its text."""


def tag_of(raw: bytes) -> bytes:
    """Tells a sealed record from another one, as the scripts do: its MAC, and its length."""
    return raw[:_MAC_BYTES] + str(len(raw)).encode() if raw else b""


def patch_of(before: str, after: str) -> str:
    """What makes the second record of the first one; empty where nothing does, or nothing that is shorter."""
    if not before:
        return ""
    *head, text = after.split(" ", _HEAD_PARTS)
    patch = " ".join((*head, json.dumps(_changed(_values(before), json.loads(text)), sort_keys=True)))
    is_shorter = len(patch) < len(after) and patched(before.encode(), patch.encode()).decode() == after
    return f"{tag_of(before.encode()).decode()} {patch}" if is_shorter else ""


def patched(before: bytes, patch: bytes) -> bytes:
    """The record that a patch, without its tag, makes of the one before. Raises ValueError for what is no patch."""
    try:
        *head, text = patch.decode().split(" ", _HEAD_PARTS)
        values = _merged(_values(before.decode()), json.loads(text))
    except RecursionError as error:
        raise ValueError("a patch of too many levels") from error
    return " ".join((*head, json.dumps(values, sort_keys=True))).encode()


def _values(record: str) -> Any:
    return json.loads(record.split(" ", _HEAD_PARTS)[-1])


def _changed(before: Any, after: Any) -> Any:
    """The values of an object that are others."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return after
    return {key: _changed(before.get(key), value) for key, value in after.items() if value != before.get(key)}


def _merged(before: Any, changed: Any) -> Any:
    """The object `before` with the values of `changed` in it."""
    if not isinstance(before, dict) or not isinstance(changed, dict):
        return changed
    return {**before, **{key: _merged(before.get(key), value) for key, value in changed.items()}}
