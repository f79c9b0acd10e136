"""Formats of stored token ids: prepared sets and the formats of other trainers. Reads headers and indices.

Each format is reduced to an ordered list of files with a byte offset and a common dtype, plus optional metadata
(hashes, document starts). References: docs/data.md.
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from zeroband.config.data import DataConfig, TokensSource
from zeroband.config.section import FileBelow
from zeroband.data.block_cache import CACHED, BlockCache, cache_dir_of
from zeroband.data.fetching import FetchedTokens
from zeroband.data.retries import refusing
from zeroband.data.shard_set import BLOCK_TOKENS, HASHES, MANIFEST, NPY_HEADER_BYTES, ShardSet, first_problem
from zeroband.data.stored_tokens import (
    DocumentStarts,
    Ids,
    Integers,
    LocalTokens,
    StoredTokens,
    TokenFile,
    TokenFiles,
    vocabulary_problem,
)
from zeroband.data.token_storage import TokenStorage
from zeroband.data.tokenizer import ByteTokenizer, Tokenizer, described
from zeroband.errors import ConfigError, StorageLost

_SAMPLED_BYTES = 1 << 20
"""Sampled at both ends of each file, for the fingerprint of a set without hashes."""
_THREADS = 16
_SMALL_BYTES = 64 << 20

_LLM_C_HEADER = 256
_LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""Dtype by magic number and version."""

_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_TYPES = {4: "<i4", 5: "<i8", 8: "<u2"}

_LITDATA_TENSORS = {13: "<i2", 14: "<i2", 15: "<i4", 16: "<i4", 17: "<i8", 18: "<i8", 20: "<u2"}
_LITDATA_ARRAYS = {1: "<i2", 2: "<i4", 3: "<i8", 5: "<u2", 6: "<u4"}
"""Dtypes by litdata's numbers for the types of torch and numpy."""


def open_tokens(
    data: DataConfig, tokenizer: Tokenizer, *, local_rank: int = 0, local_world_size: int = 1
) -> StoredTokens:
    """Open stored ids: read their metadata, start no thread. Called by each local rank.

    Raises: ConfigError if they are missing or do not match data.source, data.tokenizer or data.packing; StorageLost if
    storage does not answer within data.retry_s.
    """
    source, vocab_size = data.source, max(tokenizer.vocab_size, data.vocab_size or 0)
    assert isinstance(source, TokensSource), source
    opener = _Opener(data, TokenStorage(source.path, data.retry_s), local_rank, local_world_size)
    with refusing(f"data.source.path={source.path!r}"):
        if source.format == "zeroband":
            manifest = _manifest_of(source, opener.storage)
            _require_tokenizer(data, source, manifest, tokenizer, vocab_size)
            files = _prepared(source, manifest, opener)
        else:
            files = _of_others(source, opener, tokenizer, vocab_size)
    _require_packing(data, source, files)
    return opener.ids(files)


class _Opener:
    """Opens the arrays of a set: in place on this machine, else through caches that share data.cache_gb."""

    def __init__(self, data: DataConfig, storage: TokenStorage, local_rank: int, local_world_size: int) -> None:
        self.storage = storage
        self._cache_gb, self._root = data.cache_gb, cache_dir_of(data) / CACHED
        self._capacity_bytes = data.cache_gb * 1e9
        """Not taken by integers yet."""
        self._local_rank, self._local_world_size = local_rank, local_world_size
        self._open_remote = functools.partial(
            FetchedTokens, storage=storage, local_rank=local_rank, local_world_size=local_world_size
        )

    def integers(self, name: str, *arrays: TokenFile) -> StoredTokens:
        """Open arrays of 8-byte integers, numbered through. `name`: of their cache."""
        files = TokenFiles(arrays, np.dtype("<u8"), BLOCK_TOKENS, 0, "", 1 << 64)
        if self.storage.is_local:
            return LocalTokens(files, self.storage)
        size = 8 * files.starts[-1]
        self._capacity_bytes -= size
        if self._capacity_bytes <= 0:
            raise ConfigError(
                f"data.cache_gb={self._cache_gb:g} is too small: {self.storage.name(arrays[0].path)} and similar files "
                f"need {self._cache_gb * 1e9 - self._capacity_bytes:.0f} bytes, and blocks need more; raise it"
            )
        return self._open_remote(files, cache=BlockCache(self._root, name, size, evicts=False), memory_bytes=0)

    def ids(self, files: TokenFiles) -> StoredTokens:
        """Open the ids of a set, once its integers are open."""
        if self.storage.is_local:
            return LocalTokens(files, self.storage)
        # the folder is named by what determines the bytes of a block and what they were checked for
        identity = f"{files.fingerprint}/{files.dtype.str}/{files.block_tokens}/{files.vocab_size}"
        name = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
        is_first, ranks = self._local_rank == 0, self._local_world_size
        cache = BlockCache(self._root, name, self._capacity_bytes, evicts=is_first, ranks=ranks)
        return self._open_remote(files, cache=cache)


def _require_tokenizer(
    data: DataConfig, source: TokensSource, manifest: ShardSet, tokenizer: Tokenizer, vocab_size: int
) -> None:
    if not tokenizer.matches(manifest.tokenizer_fingerprint):
        here = described(data.tokenizer, tokenizer.release)
        used = described(manifest.tokenizer, manifest.tokenizer_release)
        raise ConfigError(
            f"data.tokenizer={here} does not produce the ids of {source.path!r}, which were made by {used}; set "
            "data.tokenizer to that tokenizer and release, or prepare the data again"
        )
    if manifest.vocab_size > vocab_size:
        raise ConfigError(
            f"{source.path!r} has a vocabulary of {manifest.vocab_size} ids, and the model one of {vocab_size}; set "
            f"data.vocab_size to {manifest.vocab_size}"
        )


def _require_packing(data: DataConfig, source: TokensSource, files: TokenFiles) -> None:
    is_packed = data.packing == "best-fit"
    if files.packed_length is None and is_packed:
        raise ConfigError(
            f"data.packing='best-fit', but the ids of {source.path!r} are not packed; prepare them with "
            f'--pack best-fit --seq-length {data.seq_length}, or set data.packing = "concatenate"'
        )
    if files.packed_length is not None and not (is_packed and files.packed_length == data.seq_length):
        raise ConfigError(
            f"the ids of {source.path!r} are packed for samples of {files.packed_length} tokens, but data.packing="
            f'{data.packing!r} and data.seq_length={data.seq_length}; set data.packing = "best-fit" and '
            f"data.seq_length = {files.packed_length}, or prepare the data again"
        )


def require_set(source: TokensSource) -> None:
    """Raise ConfigError unless the source names files of its format; checks names and manifests only."""
    storage = TokenStorage(source.path, 0.0)
    try:
        match source.format:
            case "zeroband":
                _manifest_of(source, storage)
            case "litdata":
                _litdata_index(source, storage)
            case "megatron":
                _matching(source, storage, _megatron_pattern(storage))
            case _:
                _named(source, storage)
    except StorageLost as lost:
        raise ConfigError(f"data.source.path={source.path!r}: {lost}") from lost
    finally:
        storage.close()


# -- prepared sets -------------------------------------------------------------------------------------------------


def _manifest_of(source: TokensSource, storage: TokenStorage) -> ShardSet:
    folder = storage.root.rstrip("/")
    remark = f"; preparation writes {MANIFEST} last, and files of other trainers need data.source.format"
    with refusing(f"data.source.path={source.path!r} is not a prepared set", remark):
        content = _read_small(storage, f"{folder}/{MANIFEST}")
    try:
        return ShardSet.of_json(content)
    except ValueError as error:
        raise ConfigError(f"{storage.name(folder)}/{MANIFEST} is not a valid manifest: {error}") from error


def _prepared(source: TokensSource, manifest: ShardSet, opener: _Opener) -> TokenFiles:
    storage = opener.storage
    folder = storage.root.rstrip("/")
    if not manifest.shards:
        raise ConfigError(f"data.source.path={source.path!r} holds no tokens; prepare text that has some")
    path, count = f"{folder}/{HASHES}", manifest.n_blocks
    if storage.size(path) != NPY_HEADER_BYTES + 8 * count:
        raise ConfigError(f"{storage.name(path)} does not match {MANIFEST}; restore the original file")
    hashes = opener.integers(f"{manifest.fingerprint}.npy", TokenFile(path, NPY_HEADER_BYTES, count))
    if _digest_of(hashes) != manifest.hashes:
        hashes.forget()  # it may have been damaged on its way into the cache
        if _digest_of(hashes) != manifest.hashes:
            raise ConfigError(f"{storage.name(path)} does not match {MANIFEST}; restore the original file")
    return TokenFiles(
        tuple(TokenFile(f"{folder}/{shard.name}", NPY_HEADER_BYTES, shard.tokens) for shard in manifest.shards),
        np.dtype(manifest.dtype),
        manifest.block_tokens,
        manifest.end_of_document,
        manifest.fingerprint,
        manifest.vocab_size,
        documents=manifest.documents,
        packed_length=manifest.packed_length,
        hashes=Integers(hashes, 0, count),
    )


def _digest_of(hashes: StoredTokens) -> str:
    """Compute `ShardSet.hashes`."""
    digest = hashlib.blake2b(digest_size=16)
    for piece in _pieces(hashes):
        digest.update(piece.tobytes())
    return digest.hexdigest()


def _pieces(integers: StoredTokens) -> Iterator[Ids]:
    """Yield all integers in order; _THREADS blocks are read, and held in memory, at a time."""

    def read(start: int) -> Ids:
        return integers.read(start, min(start + BLOCK_TOKENS, len(integers)))

    with ThreadPoolExecutor(_THREADS) as pool:
        for first in range(0, len(integers), _THREADS * BLOCK_TOKENS):
            stop = min(first + _THREADS * BLOCK_TOKENS, len(integers))
            yield from pool.map(read, range(first, stop, BLOCK_TOKENS))


def _read_small(storage: TokenStorage, path: str) -> bytes:
    """Read a file into memory. Raises: ConfigError if it is larger than any manifest."""
    if (size := storage.size(path)) > _SMALL_BYTES:
        raise ConfigError(f"{storage.name(path)} exceeds {_SMALL_BYTES} bytes, so it is not a list of files")
    return storage.read(path, 0, size) if size else b""


# -- formats of other trainers -------------------------------------------------------------------------------------


def _of_others(source: TokensSource, opener: _Opener, tokenizer: Tokenizer, vocab_size: int) -> TokenFiles:
    """Read the metadata of another trainer's files. `vocab_size`: size of the model's vocabulary."""
    storage = opener.storage
    read_layout = {"nanogpt": _nanogpt, "llm.c": _llm_c, "megatron": _megatron, "litdata": _litdata}[source.format]
    files, dtype, document_starts = read_layout(source, opener, vocab_size)
    empty = [file for file in files if file.tokens < 1]
    if empty or not files:
        raise ConfigError(
            f"data.source.path={source.path!r}: no ids in {storage.name(empty[0].path) if empty else 'it'}"
        )
    tokenizer_size = vocab_size if isinstance(tokenizer, ByteTokenizer) else tokenizer.vocab_size
    _require_type_holds(tokenizer_size, dtype, storage.name(files[0].path))
    samples = _samples(storage, files, dtype)
    for file, sample in zip(files, samples, strict=True):
        if problem := vocabulary_problem(np.frombuffer(sample, dtype), vocab_size, storage.name(file.path)):
            raise ConfigError(problem)
    content = hashlib.blake2b(json.dumps([dtype.str, [f.tokens for f in files]]).encode(), digest_size=16)
    for sample in samples:
        content.update(sample)
    end_of_document = tokenizer.end_of_document
    if source.format == "llm.c":  # the delimiter precedes each document, and may differ from the tokenizer's
        end_of_document = int(np.frombuffer(samples[0][: dtype.itemsize], dtype)[0])
    return TokenFiles(
        files,
        dtype,
        BLOCK_TOKENS,
        end_of_document,
        content.hexdigest(),
        vocab_size,
        documents=None if document_starts is None else len(document_starts),
        document_starts=document_starts,
    )


class _Layout(NamedTuple):
    """Files of a set and their common dtype, and the document index of formats that have one."""

    files: tuple[TokenFile, ...]
    dtype: np.dtype[np.integer[Any]]
    document_starts: DocumentStarts | None = None


def _nanogpt(source: TokensSource, opener: _Opener, vocab_size: int) -> _Layout:
    storage = opener.storage
    dtype = _configured_type(source, vocab_size)
    files: list[TokenFile] = []
    for path in _named(source, storage):
        size = storage.size(path)
        if size % dtype.itemsize:
            raise ConfigError(
                f"{storage.name(path)}: {size} bytes is not a multiple of {dtype.itemsize}-byte ids; set "
                "data.source.dtype"
            )
        if size >= 4 * _LLM_C_HEADER and _llm_c_type(storage.read(path, 0, 8)):
            raise ConfigError(f'{storage.name(path)} has the header of llm.c; set data.source.format = "llm.c"')
        files.append(TokenFile(path, 0, size // dtype.itemsize))
    return _Layout(tuple(files), dtype)


def _configured_type(source: TokensSource, vocab_size: int) -> np.dtype[np.integer[Any]]:
    dtype = source.dtype or ("uint16" if vocab_size <= 1 << 16 else "uint32")
    return np.dtype(dtype).newbyteorder("<")


def _llm_c_type(header: bytes) -> str | None:
    magic, version = struct.unpack("<ii", header)
    return _LLM_C.get((magic, version))


def _llm_c(source: TokensSource, opener: _Opener, vocab_size: int) -> _Layout:
    storage = opener.storage
    files: list[TokenFile] = []
    types = set[str]()
    for path in _named(source, storage):
        size, offset = storage.size(path), 4 * _LLM_C_HEADER
        kind = _llm_c_type(storage.read(path, 0, 8)) if size >= offset else None
        if kind is None:
            raise ConfigError(
                f"{storage.name(path)} is not a token file of llm.c: its header is neither 20240520, version 1, nor "
                "20240801, version 7; correct data.source.path or data.source.format"
            )
        types.add(kind)
        (tokens,) = struct.unpack("<i", storage.read(path, 8, 12))
        if size != offset + tokens * np.dtype(kind).itemsize:
            raise ConfigError(
                f"{storage.name(path)} has {size} bytes, which does not match the {tokens} ids in its header; copy it "
                "again"
            )
        files.append(TokenFile(path, offset, tokens))
    return _Layout(tuple(files), _one_type(source, types))


def _one_type(source: TokensSource, types: set[str]) -> np.dtype[np.integer[Any]]:
    if len(types) != 1:
        raise ConfigError(
            f"data.source.path={source.path!r}: files of different dtypes ({', '.join(sorted(types))}); name files of "
            "one dtype"
        )
    return np.dtype(types.pop())


def _megatron(source: TokensSource, opener: _Opener, vocab_size: int) -> _Layout:
    storage = opener.storage
    found = _matching(source, storage, _megatron_pattern(storage))
    indices = [_MegatronIndex(path, opener) for path in found]
    starts = np.cumsum([0, *(index.tokens for index in indices)]).tolist()
    files = tuple(TokenFile(f"{index.path.removesuffix('.idx')}.bin", 0, index.tokens) for index in indices)
    for file, index in zip(files, indices, strict=True):
        size = storage.size(file.path)
        if size != index.tokens * index.dtype.itemsize:
            raise ConfigError(
                f"{storage.name(file.path)} has {size} bytes, which does not match the {index.tokens} ids in its .idx; "
                "copy both again"
            )
    dtype = _one_type(source, {index.dtype.str for index in indices})
    return _Layout(files, dtype, DocumentStarts(indices, starts))


def _megatron_pattern(storage: TokenStorage) -> str:
    """Return the pattern of the .idx files; data.source.path may name them, the .bin files, or the common prefix."""
    return f"{storage.root.removesuffix('.bin').removesuffix('.idx')}.idx"


class _MegatronIndex:
    """First token of each document, from an .idx file.

    Layout: header, int32 length of each sequence, int64 byte offset of each sequence in the .bin, int64 first sequence
    of each document.
    """

    def __init__(self, path: str, opener: _Opener) -> None:
        storage = opener.storage
        self.path, self._name = path, storage.name(path)
        name, size = self._name, storage.size(path)
        if size < _MEGATRON_HEADER.size:
            raise ConfigError(f"{name} is not an index of Megatron: truncated header; copy it again")
        header = storage.read(path, 0, _MEGATRON_HEADER.size)
        magic, version, kind, sequences, boundaries = _MEGATRON_HEADER.unpack(header)
        if magic != _MEGATRON_MAGIC or version != 1:
            raise ConfigError(
                f"{name} is not an index of Megatron, version 1; correct data.source.path or data.source.format"
            )
        if kind not in _MEGATRON_TYPES:
            raise ConfigError(f"{name}: unsupported dtype {kind}; supported: 8 (uint16), 4 (int32) and 5 (int64)")
        self.dtype: np.dtype[np.integer[Any]] = np.dtype(_MEGATRON_TYPES[kind])
        offsets = _MEGATRON_HEADER.size + 4 * sequences
        if boundaries < 1 or sequences < 1 or size < offsets + 8 * (sequences + boundaries):
            raise ConfigError(
                f"{name} is not an index of Megatron: {size} bytes for {sequences} sequences; copy it again"
            )
        stamp = json.dumps(storage.stamp(path))  # a changed file gets another name in the cache
        arrays = [TokenFile(path, offsets, sequences), TokenFile(path, offsets + 8 * sequences, boundaries)]
        key = f"{hashlib.blake2b(stamp.encode(), digest_size=16).hexdigest()}.idx"
        integers = opener.integers(key, *arrays)
        if integers.is_remote:
            for _ in _pieces(integers):  # all of it: later, each sample would wait for its part
                pass
        self._offsets = Integers(integers, 0, sequences)
        self._first_sequences = Integers(integers, sequences, boundaries)
        (last_length,) = struct.unpack("<i", storage.read(path, offsets - 4, offsets))
        self.tokens = self._offsets[sequences - 1] // self.dtype.itemsize + last_length

    def __len__(self) -> int:
        return len(self._first_sequences) - 1

    def __getitem__(self, document: int) -> int:
        first = self._first_sequences[document]
        if first == len(self._offsets):  # trailing documents without a sequence
            return self.tokens
        start = self._offsets[first] // self.dtype.itemsize if 0 <= first < len(self._offsets) else -1
        if not 0 <= start <= self.tokens:
            raise StorageLost(f"{self._name} is damaged: document {document} starts outside its .bin; copy both again")
        return start


@dataclass(frozen=True)
class _LitdataChunk:
    filename: FileBelow
    chunk_size: int = Field(gt=0)
    dim: int | None = None


@dataclass(frozen=True)
class _LitdataSettings:
    data_format: list[str]
    compression: str | None = None
    encryption: dict[str, Any] | None = None


@dataclass(frozen=True)
class _LitdataIndex:
    __pydantic_config__ = ConfigDict(extra="ignore")
    chunks: list[_LitdataChunk]
    config: _LitdataSettings


def _litdata_index(source: TokensSource, storage: TokenStorage) -> _LitdataIndex:
    path = f"{storage.root.rstrip('/')}/index.json"
    with refusing(f"data.source.path={source.path!r} is not a folder of litdata"):
        content = _read_small(storage, path)
    try:
        return TypeAdapter(_LitdataIndex).validate_json(content)
    except ValidationError as error:
        raise ConfigError(f"{storage.name(path)} is not an index of litdata: {first_problem(error)}") from error


def _litdata(source: TokensSource, opener: _Opener, vocab_size: int) -> _Layout:
    storage = opener.storage
    index, folder = _litdata_index(source, storage), storage.root.rstrip("/")
    if index.config.compression or index.config.encryption:
        raise ConfigError(f"{storage.name(folder)}: chunks are compressed or encrypted; write them plain")
    if any(chunk.dim is None for chunk in index.chunks):
        raise ConfigError(
            f"{storage.name(folder)}: chunks were not written for litdata's TokensLoader; write one tensor per item"
        )
    dtype = _litdata_type(source, index.config.data_format, vocab_size, storage.name(folder))
    return _Layout(tuple(_litdata_files(index.chunks, folder)), dtype)


def _litdata_files(chunks: Iterable[_LitdataChunk], folder: str) -> Iterator[TokenFile]:
    """Yield the ids of each chunk, behind its header: number of items, then item offsets and end offset, as uint32."""
    for chunk in chunks:
        assert chunk.dim is not None, "checked by the caller"
        yield TokenFile(f"{folder}/{chunk.filename}", 4 * (chunk.chunk_size + 2), chunk.dim)


def _litdata_type(source: TokensSource, formats: list[str], vocab_size: int, name: str) -> np.dtype[np.integer[Any]]:
    kind, _, number = (formats[0] if len(formats) == 1 else "").partition(":")
    table = {"no_header_tensor": _LITDATA_TENSORS, "no_header_numpy": _LITDATA_ARRAYS}.get(kind)
    if table is None:
        raise ConfigError(f"{name}: items of {formats}; each item must be one tensor of ids")
    recorded = table.get(int(number)) if number.isdigit() else None
    if recorded is None and source.dtype is None:
        raise ConfigError(f"{name}: unknown dtype {formats[0]!r}; set data.source.dtype")
    configured = _configured_type(source, vocab_size)
    if recorded is None or source.dtype is None:
        return configured if recorded is None else np.dtype(recorded)
    if np.dtype(recorded).itemsize != configured.itemsize:
        raise ConfigError(
            f"data.source.dtype={source.dtype!r}, but the ids of {name} are {recorded}; drop data.source.dtype"
        )
    return configured


def _named(source: TokensSource, storage: TokenStorage) -> list[str]:
    if storage.is_local and Path(storage.root).is_dir():
        raise ConfigError(
            f"data.source.path={source.path!r} is a folder; name its files, such as {source.path}/train*.bin"
        )
    return _matching(source, storage, storage.root)


def _matching(source: TokensSource, storage: TokenStorage, pattern: str) -> list[str]:
    found = storage.matches(pattern)
    if not found:
        raise ConfigError(f"data.source.path: no file matches {source.path!r}")
    return found


def _samples(storage: TokenStorage, files: Sequence[TokenFile], dtype: np.dtype[Any]) -> list[bytes]:
    """Read both ends of each file, or all of a short one, in parallel."""

    def sample_of(file: TokenFile) -> bytes:
        size, most = file.tokens * dtype.itemsize, _SAMPLED_BYTES
        stop = file.offset + size
        if size <= 2 * most:
            return storage.read(file.path, file.offset, stop)
        return storage.read(file.path, file.offset, file.offset + most) + storage.read(file.path, stop - most, stop)

    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(sample_of, files))


def _require_type_holds(vocab_size: int, dtype: np.dtype[np.integer[Any]], name: str) -> None:
    """Raise ConfigError if the dtype cannot represent the whole vocabulary: ids would have wrapped silently."""
    limit = int(np.iinfo(dtype).max) + 1
    if vocab_size > limit:
        raise ConfigError(
            f"{name} holds {dtype.name}, ids below {limit}, but the vocabulary has {vocab_size}; correct "
            "data.source.dtype, or set data.tokenizer to the tokenizer that made the ids"
        )
