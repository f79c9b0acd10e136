"""Headers of safetensors files: put in front of float32 tensors, and refused when damaged. Knows no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from zeroband.checkpoint.authenticity import FileHash
from zeroband.checkpoint.storage import read_exactly
from zeroband.errors import CheckpointDamaged

_LENGTH_BYTES = 8
_ALIGNMENT = 8
_MAX_BYTES = 100 << 20
"""safetensors' own bound."""


def safetensors_header(tensors: Iterable[tuple[str, Sequence[int]]]) -> bytes:
    """What stands in front of float32 tensors that follow one another in this order.

    Source: the safetensors format, 8 bytes of length (little endian), JSON, blanks up to a multiple of 8.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in tensors:
        size = 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    name: str
    shape: tuple[int, ...]
    size: int
    """Length in bytes."""


def parse_safetensors_header(text: bytes, data_bytes: int) -> list[StoredTensor]:
    """The float32 tensors of a file, in the order of their data, which they fill without gaps.

    `text`: the header without its length. Raises ValueError for anything else.
    """
    try:
        entries = cast("dict[str, dict[str, Any]]", json.loads(text))
        entries.pop("__metadata__", None)
        spans = [(*map(int, e["data_offsets"]), name, tuple(map(int, e["shape"]))) for name, e in entries.items()]
        dtypes = {entry["dtype"] for entry in entries.values()}
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"its header is no safetensors header: {error!r:.100}") from error
    if dtypes - {"F32"}:
        raise ValueError(f"it holds {', '.join(sorted(map(str, dtypes)))}, not float32 alone")
    tensors: list[StoredTensor] = []
    at = 0
    for start, stop, name, shape in sorted(spans):
        if start != at or stop - start != 4 * math.prod(shape):
            raise ValueError(f"its tensor {name} does not begin or end where it should")
        tensors.append(StoredTensor(name, shape, stop - start))
        at = stop
    if at != data_bytes:
        raise ValueError(f"its tensors take {at} bytes, it has {data_bytes}")
    return tensors


def read_header(file: BinaryIO, size: int, seen: FileHash) -> list[StoredTensor]:
    """Read a safetensors file up to its data; `seen` hashes what was read. Raises CheckpointDamaged, EOFError."""
    length_field = bytearray(_LENGTH_BYTES)
    read_exactly(file, [memoryview(length_field)])
    length = int.from_bytes(length_field, "little")
    if length > min(_MAX_BYTES, size - _LENGTH_BYTES):
        raise CheckpointDamaged(f"its header would have {length} bytes, the file has {size}")
    text = bytearray(length)
    read_exactly(file, [memoryview(text)])
    seen.update(length_field)
    seen.update(text)
    try:
        return parse_safetensors_header(bytes(text), size - _LENGTH_BYTES - length)
    except ValueError as error:
        raise CheckpointDamaged(str(error)) from error
