"""What a checkpoint consists of: names of its files, the share of each writer, headers of safetensors files. No torch.

<path>/<run.id>/owner.json, latest
<path>/<run.id>/marks/<node id>.<random>                             of the nodes that write here, empty
<path>/<run.id>/step_00000123/manifest.json                         last; without it the rest does not count
                              outer/model.safetensors               outer parameters, Hugging Face Llama names
                              outer/momentum.safetensors, ...       one for each other section of the outer state
                              nodes/<node id>/inner.safetensors     its inner optimizer
                              nodes/<node id>/rank_0.safetensors    of a loop of one's own, what each rank has
                              nodes/<node id>/state.json            its counters and random states
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from zeroband.checkpoint.manifest import FileHash
from zeroband.checkpoint.storage import read_exactly
from zeroband.errors import CheckpointDamaged
from zeroband.state.slot import Slot

MANIFEST, LATEST, OWNER = "manifest.json", "latest", "owner.json"
TEMPORARY = ".tmp"
PARTS = "parts"
MARKS = "marks"
MAX_FILE_BYTES = 5_000_000_000
"""Larger sections are split into several files with an index, as Hugging Face does."""

_LENGTH_BYTES = 8
_ALIGNMENT = 8
_MAX_BYTES = 100 << 20
"""Limit of the safetensors format."""

_STEP = re.compile(r"^step_(\d{8,})$")


def folder_of(step: int) -> str:
    """Return the folder of the checkpoint at an inner step."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """Return the inner step of a final folder; None for temporary and other names."""
    match = _STEP.match(name)
    return int(match[1]) if match else None


def hub_name(name: str) -> str:
    """Return a parameter's name in Hugging Face's Llama checkpoints."""
    return name if name.startswith("lm_head.") else f"model.{name}"


@dataclass(frozen=True)
class OuterFile:
    """A file of the outer state: a header, and a range of one section's flat buffer."""

    path: str
    section: str
    slots: tuple[Slot, ...]
    """Contiguous parameters of the flat buffer."""

    @property
    def start(self) -> int:
        return self.slots[0].start

    @property
    def stop(self) -> int:
        return self.slots[-1].start + self.slots[-1].numel

    @property
    def data_bytes(self) -> int:
        return 4 * (self.stop - self.start)

    def header(self) -> bytes:
        return safetensors_header([(hub_name(slot.name), slot.shape) for slot in self.slots])


@dataclass(frozen=True)
class OuterPlan:
    """The files of the outer state, equal on every node of a run."""

    files: tuple[OuterFile, ...]
    indices: Mapping[str, bytes]
    """Index files of sections that are split."""

    @property
    def paths(self) -> tuple[str, ...]:
        return (*(file.path for file in self.files), *self.indices)

    def share(self, members: Sequence[str]) -> dict[str, tuple[OuterFile, ...]]:
        """Assign the files to members: the largest first, each to the member with the least bytes."""
        held: dict[str, list[OuterFile]] = {member: [] for member in members}
        for file in sorted(self.files, key=lambda file: (-file.data_bytes, file.path)):
            least = min(members, key=lambda member: (sum(f.data_bytes for f in held[member]), members.index(member)))
            held[least].append(file)
        return {member: tuple(files) for member, files in held.items()}


def plan_outer(slots: Sequence[Slot], sections: Sequence[str], *, max_bytes: int) -> OuterPlan:
    """Split each section into files of at most `max_bytes`; a larger tensor gets a file of its own.

    The first section holds the parameters.
    """
    cuts = cut(slots, max_bytes)
    files: list[OuterFile] = []
    indices: dict[str, bytes] = {}
    for section in sections:
        stem = "model" if section == sections[0] else section
        names = file_names(stem, len(cuts))
        if len(cuts) > 1:
            indices[f"outer/{stem}.safetensors.index.json"] = index_of(names, cuts)
        files += [OuterFile(f"outer/{name}", section, cut) for name, cut in zip(names, cuts, strict=True)]
    return OuterPlan(tuple(files), indices)


def file_names(stem: str, n: int) -> list[str]:
    """Return the names of the n files of a set of tensors."""
    if n == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{n:05d}.safetensors" for number in range(1, n + 1)]


def index_of(names: Sequence[str], cuts: Sequence[Sequence[Slot]], *, itemsize: int = 4) -> bytes:
    """Return the index file of a set of tensors."""
    weights = {hub_name(slot.name): name for name, held in zip(names, cuts, strict=True) for slot in held}
    total = itemsize * sum(slot.numel for held in cuts for slot in held)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weights}, indent=2).encode()


def cut(slots: Sequence[Slot], max_bytes: int, *, itemsize: int = 4) -> list[tuple[Slot, ...]]:
    """Return the slots of each file, in order; a tensor that exceeds the limit gets a file of its own."""
    cuts: list[list[Slot]] = [[]]
    size = 0
    for slot in slots:
        slot_bytes = itemsize * slot.numel
        if cuts[-1] and size + slot_bytes > max_bytes:
            cuts.append([])
            size = 0
        cuts[-1].append(slot)
        size += slot_bytes
    return [tuple(cut) for cut in cuts]


def inner_header(slots: Sequence[Slot], buffers: Sequence[str]) -> bytes:
    """Return the header of an inner optimizer's flat buffers, whose tensors are `buffer.parameter`."""
    return safetensors_header([(f"{buffer}.{slot.name}", slot.shape) for buffer in buffers for slot in slots])


def safetensors_header(tensors: Iterable[tuple[str, Sequence[int]]]) -> bytes:
    """Return the header of consecutive float32 tensors.

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
    """In bytes."""


def parse_safetensors_header(text: bytes, data_bytes: int) -> list[StoredTensor]:
    """Return a file's float32 tensors in data order, without gaps.

    `text`: the header without its length. Raises ValueError for anything else.
    """
    try:
        entries = cast("dict[str, dict[str, Any]]", json.loads(text))
        entries.pop("__metadata__", None)
        spans = [(*map(int, e["data_offsets"]), name, tuple(map(int, e["shape"]))) for name, e in entries.items()]
        dtypes = {entry["dtype"] for entry in entries.values()}
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"its header is not valid safetensors: {error!r:.100}") from error
    if dtypes - {"F32"}:
        raise ValueError(f"it holds {', '.join(sorted(map(str, dtypes)))}, not float32 alone")
    tensors: list[StoredTensor] = []
    at = 0
    for start, stop, name, shape in sorted(spans):
        if start != at or stop - start != 4 * math.prod(shape):
            raise ValueError(f"its tensor {name} has invalid offsets")
        tensors.append(StoredTensor(name, shape, stop - start))
        at = stop
    if at != data_bytes:
        raise ValueError(f"its tensors take {at} bytes, it has {data_bytes}")
    return tensors


def read_header(file: BinaryIO, size: int, seen: FileHash) -> list[StoredTensor]:
    """Read a safetensors file up to its data; `seen` hashes it. Raises CheckpointDamaged, EOFError."""
    length_field = bytearray(_LENGTH_BYTES)
    read_exactly(file, memoryview(length_field))
    length = int.from_bytes(length_field, "little")
    if length > min(_MAX_BYTES, size - _LENGTH_BYTES):
        raise CheckpointDamaged(f"its header would have {length} bytes, the file has {size}")
    text = bytearray(length)
    read_exactly(file, memoryview(text))
    seen.update(length_field)
    seen.update(text)
    try:
        return parse_safetensors_header(bytes(text), size - _LENGTH_BYTES - length)
    except ValueError as error:
        raise CheckpointDamaged(str(error)) from error
