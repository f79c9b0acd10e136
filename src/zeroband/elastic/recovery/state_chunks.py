"""A state as hashed chunks, and a donor's manifest of them. Pure; no sockets."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Annotated, Any

from blake3 import blake3
from pydantic import Field, TypeAdapter, ValidationError

from zeroband.config.ranges import Round
from zeroband.errors import RecoveryFailed

CHUNK_BYTES = 8 << 20
"""Large enough to hide a request's round trip, small enough to refetch."""

STRETCH = 8
"""Chunks per section that are hashed at a time, just before a joiner fetches them: the state may change before the
others are requested."""

MAX_CHUNK_BYTES = 64 << 20
"""Larger chunks are refused: a joiner holds one per connection in memory."""

MAX_SECTION_BYTES = 1 << 40
"""A section of unknown length is refused above this."""

_HASH_BYTES = 16
_SHOWN = 60
"""Most characters of a donor's value in a message."""


_Text = Annotated[str, Field(max_length=120)]


@dataclass(frozen=True)
class Section:
    """A section in a manifest."""

    bytes: Annotated[int, Field(ge=0, le=MAX_SECTION_BYTES)]
    hashes: tuple[_Text, ...]
    """Hashes of consecutive chunks, from the manifest's first one on."""


@dataclass(frozen=True, order=True)
class Chunk:
    """A chunk of a section; all but the last one have `chunk_bytes`."""

    section: str
    index: int

    def __str__(self) -> str:
        return f"chunk {self.index} of {self.section}"


@dataclass(frozen=True)
class StateManifest:
    """A donor's claim of a state, with the hashes of a stretch, as it is sent. Donors agree if their `claim` is equal.

    The ranges hold for what `parse_manifest` returns.
    """

    round: Round
    state_digest: _Text
    """Digest of the outer state after the round."""
    record: Mapping[str, Any]
    chunk_bytes: Annotated[int, Field(ge=1, le=MAX_CHUNK_BYTES)]
    first: Annotated[int, Field(ge=0, le=MAX_SECTION_BYTES)]
    """Number of the first listed chunk in each section."""
    sections: Mapping[str, Section]

    @cached_property
    def claim(self) -> str:
        """Hash of the manifest."""
        return chunk_hash(self.to_json())

    @cached_property
    def lengths(self) -> dict[str, int]:
        """Bytes of each section."""
        return {name: section.bytes for name, section in self.sections.items()}

    @property
    def whole(self) -> StateManifest:
        """The manifest without hashes: equal for all stretches of a state."""
        sections = {name: replace(section, hashes=()) for name, section in self.sections.items()}
        return replace(self, first=0, sections=sections)

    @property
    def total_bytes(self) -> int:
        return sum(self.lengths.values())

    def chunks(self) -> Iterator[Chunk]:
        """Yield all chunks by section, listed or not."""
        for section, length in self.lengths.items():
            yield from (Chunk(section, index) for index in range(-(-length // self.chunk_bytes)))

    def listed(self) -> dict[Chunk, str]:
        """Return the listed hashes by chunk."""
        return {
            Chunk(section, index): listed
            for section, held in self.sections.items()
            for index, listed in enumerate(held.hashes, self.first)
        }

    def part(self, chunk: Chunk, section: memoryview) -> memoryview:
        """Return the bytes of a chunk within its section."""
        return section[chunk.index * self.chunk_bytes : (chunk.index + 1) * self.chunk_bytes]

    def to_json(self) -> bytes:
        """Encode canonically: equal manifests give equal bytes."""
        content = json.loads(json.dumps(asdict(self)))  # keys become strings before they are sorted
        return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()

    def difference(self, other: StateManifest) -> str:
        """Describe the first difference of another donor's manifest from this one, the lead's; empty: none."""
        for name in ("round", "state_digest", "chunk_bytes", "lengths", "first"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return f"its {name} is {theirs!r:.{_SHOWN}}, the lead's is {ours!r:.{_SHOWN}}"
        listed = other.listed()
        for chunk, ours in self.listed().items():
            if listed.get(chunk) != ours:
                return f"its {chunk} has hash {listed.get(chunk)}, the lead's has {ours}"
        return "" if self.claim == other.claim else f"its record is {other.record!r:.{_SHOWN}}, not the lead's"


_MANIFEST = TypeAdapter(StateManifest)


def stretch_of(section_bytes: int, chunk_bytes: int, first: int) -> range:
    """Return the numbers of a section's chunks in the stretch from `first`."""
    return range(first, max(first, min(first + STRETCH, -(-section_bytes // chunk_bytes))))


def chunk_hash(data: bytes | memoryview) -> str:
    """Hash a chunk: 128 bits of BLAKE3, which releases the GIL and takes a seventh of BLAKE2b's time."""
    return blake3(data).hexdigest(length=_HASH_BYTES)


def parse_manifest(data: bytes, lengths: Mapping[str, int] | None) -> StateManifest:
    """Decode a donor's manifest; `lengths`: expected bytes of each section, None: any.

    Raises RecoveryFailed unless all values have the right type, are in range, and are consistent.
    """
    try:
        manifest = _MANIFEST.validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise RecoveryFailed(f"it answers nonsense: {where:.{_SHOWN}}: {first['msg']:.200}") from error
    if lengths is not None and manifest.lengths != lengths:
        raise RecoveryFailed(
            f"it serves sections of {manifest.lengths!r:.{_SHOWN}} bytes, this node needs {dict(lengths)}"
        )
    for name, section in manifest.sections.items():
        needed = len(stretch_of(section.bytes, manifest.chunk_bytes, manifest.first))
        if len(section.hashes) != needed:
            raise RecoveryFailed(
                f"it lists {len(section.hashes)} chunks of {name!r:.{_SHOWN}} from {manifest.first}, "
                f"{section.bytes} bytes have {needed}"
            )
    return manifest
