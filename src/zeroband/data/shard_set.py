"""A prepared corpus: shards of token ids, the hashes of their blocks, and the manifest that names them.

Layout of the folder, at a path or any fsspec URL (docs/data.md):

    manifest.json     written last: a folder without one holds no corpus
    hashes.npy        (blocks,) uint64: xxh3-64 of each block, shard after shard
    *.npy             one shard: (tokens,) uint16 or uint32, documents end to end, the end-of-document id behind each

A block is `block_tokens` ids of one shard, the last one of a shard perhaps fewer: what is fetched, verified and
shuffled as one. Knows the layout, and writes the content of files into drafts and pieces; who has them decides where
these go.
"""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from types import TracebackType
from typing import Any, BinaryIO, cast

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
"""Bytes before the ids of a shard: numpy pads the header of an array of one dimension to as many."""
_PIECE_IDS = 1 << 22

Ids = npt.NDArray[np.unsignedinteger]


@dataclass(frozen=True)
class Shard:
    """One file of ids."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: FileBelow
    """Name of its file in the folder; a slash in it is a folder."""
    tokens: int
    documents: int


@dataclass(frozen=True)
class ShardSet:
    """What a manifest says."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    format: int
    dtype: str
    """`<u2` or `<u4`, as numpy writes it."""
    block_tokens: int
    tokens: int
    documents: int
    empty_documents: int
    """Documents without any text, which are left out."""
    filtered_documents: int
    """Documents that were left out for their length."""
    duplicate_documents: int
    """Documents that were left out because an equal one came before."""
    vocab_size: int
    end_of_document: int
    tokenizer: str
    """Name of the tokenizer, or the folder it was in."""
    tokenizer_fingerprint: str
    packed_length: int | None
    """data.seq_length that documents were packed for (best-fit); None: they are concatenated as they came."""
    padding: int
    """Ids that fill up packed samples."""
    sources: tuple[str, ...]
    """What it was made of, as the user wrote it."""
    hashes: str
    """BLAKE2b-128 of the content of hashes.npy, hexadecimal."""
    shards: tuple[Shard, ...]
    tokenizer_release: str | None = None
    """Versions of the libraries that made the ids, for messages."""
    plan: str | None = None
    """Digest of the sources, their stamps and the options that it was made of, where `zeroband data prepare` did."""

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"format {self.format}, this version reads {FORMAT}")
        if self.dtype not in ("<u2", "<u4") or self.block_tokens < 1:
            raise ValueError(f"ids of type {self.dtype!r} in blocks of {self.block_tokens}")
        if self.vocab_size > 1 << (8 * np.dtype(self.dtype).itemsize) or self.end_of_document >= self.vocab_size:
            raise ValueError(
                f"ids below {self.vocab_size}, the end of a document {self.end_of_document}, in {self.dtype}"
            )
        if self.tokens != sum(shard.tokens for shard in self.shards) or any(s.tokens < 1 for s in self.shards):
            raise ValueError(f"{self.tokens} tokens in all, and other numbers in the shards")
        if self.documents != sum(shard.documents for shard in self.shards):
            raise ValueError(f"{self.documents} documents in all, and other numbers in the shards")

    @cached_property
    def fingerprint(self) -> str:
        """Equal for two sets only if they hold the same ids in the same shards."""
        content = [self.dtype, self.block_tokens, self.vocab_size, self.end_of_document, self.packed_length]
        content += [self.hashes, [shard.tokens for shard in self.shards]]
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()

    @property
    def n_blocks(self) -> int:
        return sum(blocks_of(shard.tokens, self.block_tokens) for shard in self.shards)

    def to_json(self) -> bytes:
        """The content of manifest.json."""
        return json.dumps(asdict(self), indent=1).encode() + b"\n"

    @staticmethod
    def of_json(content: bytes) -> ShardSet:
        """The inverse. Raises ValueError with one line of what is wrong."""
        try:
            return TypeAdapter(ShardSet).validate_json(content)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from error


def blocks_of(tokens: int, block_tokens: int) -> int:
    """Blocks of a shard."""
    return -(-tokens // block_tokens)


def block_hash(block: npt.NDArray[np.unsignedinteger]) -> int:
    """The hash of the ids of a block, of dtype `<u2` or `<u4`."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(block).tobytes())


def block_hashes(ids: npt.NDArray[np.unsignedinteger], block_tokens: int) -> npt.NDArray[np.uint64]:
    """The hashes of the blocks of a shard."""
    starts = range(0, len(ids), block_tokens)
    return np.array([block_hash(ids[start : start + block_tokens]) for start in starts], dtype=np.uint64)


def hashes_digest(hashes: Sequence[int] | npt.NDArray[np.uint64]) -> str:
    """`ShardSet.hashes` of these."""
    return hashlib.blake2b(np.asarray(hashes, dtype="<u8").tobytes(), digest_size=16).hexdigest()


def ids_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The smallest type that holds every id; little-endian."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def npy_header(values: int, dtype: np.dtype[Any]) -> bytes:
    """What stands before the values of a `.npy` file of one dimension. Shapes: NPY_HEADER_BYTES bytes."""
    header = io.BytesIO()
    described = {"descr": dtype.str, "fortran_order": False, "shape": (values,)}
    np.lib.format.write_array_header_1_0(header, described)
    assert header.tell() == NPY_HEADER_BYTES, header.tell()
    return header.getvalue()


def npy_pieces(values: npt.NDArray[Any]) -> Iterator[bytes]:
    """The content of a `.npy` file that holds these values, a few megabytes at a time. Shapes: values (n,)."""
    yield npy_header(len(values), values.dtype)
    for start in range(0, len(values), _PIECE_IDS):
        yield values[start : start + _PIECE_IDS].tobytes()


class ShardDraft:
    """Ids in a file of the temporary folder, which has no name and so is gone with its process.

    Raises OSError where that folder is full.
    """

    def __init__(self, dtype: np.dtype[np.unsignedinteger]) -> None:
        self._dtype = dtype
        self._file = cast(BinaryIO, tempfile.TemporaryFile(buffering=0))  # noqa: SIM115  closed by __exit__
        self.tokens = 0

    def append(self, ids: Sequence[Ids]) -> None:
        """Write arrays of ids one behind the other."""
        if ids:
            values = np.concatenate(ids).astype(self._dtype, copy=False)
            content = memoryview(values.tobytes())
            while content:
                content = content[self._file.write(content) :]
            self.tokens += len(values)

    @property
    def ids(self) -> Ids:
        """All that was appended, mapped. Shapes: (tokens,) of the draft's dtype."""
        if not self.tokens:
            return np.empty(0, dtype=self._dtype)
        return np.memmap(self._file, dtype=self._dtype, mode="r", shape=(self.tokens,))

    def __enter__(self) -> ShardDraft:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
