"""The on-disk layout of a prepared corpus: shards of token ids, block hashes, and a manifest.

At a path or any fsspec URL (docs/data.md):

    manifest.json     written last; without it the set is incomplete
    hashes.npy        (blocks,) uint64: xxh3-64 of each block, shard after shard
    *.npy             a shard: (tokens,) uint16 or uint32, documents end to end, each followed by an end-of-document id

A block is `block_tokens` ids of one shard (the last may be shorter): the unit of fetching, verification and shuffling.
Produces the content of files; callers choose where it is written.
"""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import ConfigDict, TypeAdapter, ValidationError

from zeroband.config.section import FileBelow

FORMAT = 1
MANIFEST = "manifest.json"
HASHES = "hashes.npy"
BLOCK_TOKENS = 1 << 16
NPY_HEADER_BYTES = 128
"""Bytes before the ids of a shard: numpy's padded header of a one-dimensional array."""
_PIECE_IDS = 1 << 22

Ids = npt.NDArray[np.unsignedinteger]


@dataclass(frozen=True)
class Shard:
    """One file of ids."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: FileBelow
    """File name relative to the set; may contain subfolders."""
    tokens: int
    documents: int


@dataclass(frozen=True)
class ShardSet:
    """Content of a manifest."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    format: int
    dtype: str
    """`<u2` or `<u4`."""
    block_tokens: int
    tokens: int
    documents: int
    empty_documents: int
    """Documents skipped because they have no text."""
    filtered_documents: int
    """Documents skipped for their length."""
    duplicate_documents: int
    """Documents skipped because an equal one came before."""
    vocab_size: int
    end_of_document: int
    tokenizer: str
    """Name or folder of the tokenizer."""
    tokenizer_fingerprint: str
    packed_length: int | None
    """data.seq_length used for best-fit packing; None if documents are concatenated."""
    padding: int
    """Ids that pad packed samples."""
    sources: tuple[str, ...]
    """Sources as given by the user."""
    hashes: str
    """BLAKE2b-128 of the content of hashes.npy, hexadecimal."""
    shards: tuple[Shard, ...]
    tokenizer_release: str | None = None
    """Versions of the tokenizer's libraries, for messages."""
    plan: str | None = None
    """Digest of sources, their stamps and options, if written by `zeroband data prepare`."""

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"format {self.format}, this version reads {FORMAT}")
        if self.dtype not in ("<u2", "<u4") or self.block_tokens < 1:
            raise ValueError(f"ids of type {self.dtype!r} in blocks of {self.block_tokens}")
        if self.vocab_size > 1 << (8 * np.dtype(self.dtype).itemsize) or self.end_of_document >= self.vocab_size:
            raise ValueError(
                f"ids below {self.vocab_size} and end of document {self.end_of_document} do not fit {self.dtype}"
            )
        if self.tokens != sum(shard.tokens for shard in self.shards) or any(s.tokens < 1 for s in self.shards):
            raise ValueError(f"the total of {self.tokens} tokens does not match the shards")
        if self.documents != sum(shard.documents for shard in self.shards):
            raise ValueError(f"the total of {self.documents} documents does not match the shards")

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the ids and their division into shards."""
        content = [self.dtype, self.block_tokens, self.vocab_size, self.end_of_document, self.packed_length]
        content += [self.hashes, [shard.tokens for shard in self.shards]]
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()

    @property
    def n_blocks(self) -> int:
        return sum(blocks_of(shard.tokens, self.block_tokens) for shard in self.shards)

    def to_json(self) -> bytes:
        """Return the content of manifest.json."""
        return json.dumps(asdict(self), indent=1).encode() + b"\n"

    @staticmethod
    def of_json(content: bytes) -> ShardSet:
        """Parse manifest.json. Raises ValueError with a one-line message."""
        try:
            return TypeAdapter(ShardSet).validate_json(content)
        except ValidationError as error:
            raise ValueError(first_problem(error)) from error


def first_problem(error: ValidationError) -> str:
    """Describe the first invalid field of a JSON file in one line."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else first["msg"]


def blocks_of(tokens: int, block_tokens: int) -> int:
    """Return the number of blocks of a shard."""
    return -(-tokens // block_tokens)


def block_hashes(ids: npt.NDArray[np.unsignedinteger], block_tokens: int) -> npt.NDArray[np.uint64]:
    """Hash each block of a shard, whose ids have dtype `<u2` or `<u4`."""
    blocks = (ids[start : start + block_tokens].tobytes() for start in range(0, len(ids), block_tokens))
    return np.array([*map(xxhash.xxh3_64_intdigest, blocks)], dtype=np.uint64)


def hashes_digest(hashes: Sequence[int] | npt.NDArray[np.uint64]) -> str:
    """Compute `ShardSet.hashes`."""
    return hashlib.blake2b(np.asarray(hashes, dtype="<u8").tobytes(), digest_size=16).hexdigest()


def ids_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Return the smallest little-endian type that holds every id."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def npy_header(values: int, dtype: np.dtype[Any]) -> bytes:
    """Return the header of a one-dimensional `.npy` file, NPY_HEADER_BYTES long."""
    header = io.BytesIO()
    described = {"descr": dtype.str, "fortran_order": False, "shape": (values,)}
    np.lib.format.write_array_header_1_0(header, described)
    assert header.tell() == NPY_HEADER_BYTES, header.tell()
    return header.getvalue()


def npy_pieces(values: npt.NDArray[Any]) -> Iterator[bytes]:
    """Yield the content of a `.npy` file of these values, a few megabytes at a time. Shapes: values (n,)."""
    yield npy_header(len(values), values.dtype)
    for start in range(0, len(values), _PIECE_IDS):
        yield values[start : start + _PIECE_IDS].tobytes()


class ShardDraft:
    """Ids in an anonymous temporary file, which disappears with its process. Raises OSError if the disk is full."""

    def __init__(self, dtype: np.dtype[np.unsignedinteger]) -> None:
        self._dtype = dtype
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        self.close = self._file.close
        self._tokens = 0

    def append(self, ids: Sequence[Ids]) -> None:
        """Append arrays of ids."""
        if ids:
            values = np.concatenate(ids).astype(self._dtype, copy=False)
            self._file.write(values.tobytes())
            self._tokens += len(values)

    @property
    def ids(self) -> Ids:
        """All ids, memory-mapped. Shapes: (tokens,) of the draft's dtype."""
        if not self._tokens:
            return np.empty(0, dtype=self._dtype)
        self._file.flush()
        return np.memmap(self._file, dtype=self._dtype, mode="r", shape=(self._tokens,))
