"""Files that hold token ids: prepared sets, and what other trainers' tools wrote. Reads their headers and indices.

Every format comes down to files in an order, each with ids of one type from a byte on; other facts (hashes,
borders of documents) come with that. Sources of the formats: docs/data.md.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from zeroband.config.data import TokensSource
from zeroband.config.section import FileBelow
from zeroband.data.block_cache import KeptFile
from zeroband.data.shard_set import BLOCK_TOKENS, HASHES, MANIFEST, NPY_HEADER_BYTES, ShardSet
from zeroband.data.stored_tokens import Borders, TokenFile, TokenFiles, room_problem
from zeroband.data.token_storage import FileInPlace, StoredNumbers, TokenStorage
from zeroband.data.tokenizer import ByteTokenizer, Tokenizer
from zeroband.errors import ConfigError, StorageLost

_SAMPLED_BYTES = 1 << 20
"""From each end of a file of another trainer, which go into its fingerprint."""
_AT_ONCE = 16
_SMALL_BYTES = 64 << 20
_PIECE_BYTES = 4 << 20

_LLM_C_HEADER = 256
_LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""Type of the ids by magic number and version."""

_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_TYPES = {4: "<i4", 5: "<i8", 8: "<u2"}

_LITDATA_TENSORS = {13: "<i2", 14: "<i2", 15: "<i4", 16: "<i4", 17: "<i8", 18: "<i8", 20: "<u2"}
_LITDATA_ARRAYS = {1: "<i2", 2: "<i4", 3: "<i8", 5: "<u2", 6: "<u4"}
"""Types by the numbers that litdata gives to those of torch and of numpy."""


WholeFile = FileInPlace | KeptFile

Keeper = Callable[[str, str, int], WholeFile]
"""Has a file on this machine, or a mount. Given: its key in the cache, its path, and its size in bytes."""


def open_files(
    source: TokensSource, storage: TokenStorage, keep: Keeper, tokenizer: Tokenizer, *, vocab_size: int
) -> TokenFiles:
    """Read what tells of the files of a set. `tokenizer`: data.tokenizer; `vocab_size`: ids that have room.

    Raises: ConfigError for files that are not what data.source says; StorageLost as the storage does.
    """
    if source.format == "zeroband":
        return _prepared(source, storage, keep)
    found = {"nanogpt": _nanogpt, "llm.c": _llm_c, "megatron": _megatron, "litdata": _litdata}[source.format]
    files, dtype, borders = found(source, storage, keep, vocab_size)
    empty = [file for file in files if file.tokens < 1]
    if empty or not files:
        raise ConfigError(
            f"data.source.path={source.path!r}: no ids in {storage.name(empty[0].path) if empty else 'it'}"
        )
    vocabulary = vocab_size if isinstance(tokenizer, ByteTokenizer) else tokenizer.vocab_size
    _require_type_holds(vocabulary, dtype, storage.name(files[0].path))
    ends = _ends(storage, files, dtype)
    for file, end in zip(files, ends, strict=True):
        if problem := room_problem(np.frombuffer(end, dtype), vocab_size, storage.name(file.path)):
            raise ConfigError(problem)
    content = hashlib.blake2b(json.dumps([dtype.str, [f.tokens for f in files]]).encode(), digest_size=16)
    for end in ends:
        content.update(end)
    is_delimited = source.format == "llm.c"  # a document begins with its delimiter, which need not be our tokenizer's
    return TokenFiles(
        files,
        dtype,
        BLOCK_TOKENS,
        int(np.frombuffer(ends[0][: dtype.itemsize], dtype)[0]) if is_delimited else tokenizer.end_of_document,
        content.hexdigest(),
        vocab_size,
        documents=None if borders is None else len(borders),
        borders=borders,
    )


def require_there(source: TokensSource) -> None:
    """Raise ConfigError where a source names no such files on this machine, or files that are no set."""
    storage = TokenStorage(source.path, 0.0)
    try:
        match source.format:
            case "zeroband":
                _manifest_of(source, storage)
            case "litdata":
                _litdata_index(source, storage)
            case "megatron":
                _found(source, storage, _megatron_pattern(storage))
            case _:
                _named(source, storage)
    except StorageLost as lost:
        raise ConfigError(f"data.source.path={source.path!r}: {lost}") from lost
    finally:
        storage.close()


# -- sets of this package ------------------------------------------------------------------------------------------


def _manifest_of(source: TokensSource, storage: TokenStorage) -> ShardSet:
    folder = storage.root.rstrip("/")
    try:
        content = read_small(storage, f"{folder}/{MANIFEST}")
    except StorageLost as lost:
        if lost.can_pass:
            raise
        raise ConfigError(
            f"data.source.path={source.path!r} holds no prepared set: {lost}; a set has no {MANIFEST} before it is "
            "complete, and files of others need data.source.format"
        ) from lost
    try:
        return ShardSet.of_json(content)
    except ValueError as error:
        raise ConfigError(f"{storage.name(folder)}/{MANIFEST} is no manifest of a prepared set: {error}") from error


def _prepared(source: TokensSource, storage: TokenStorage, keep: Keeper) -> TokenFiles:
    manifest, folder = _manifest_of(source, storage), storage.root.rstrip("/")
    if not manifest.shards:
        raise ConfigError(f"data.source.path={source.path!r} holds no tokens; prepare text that has some")
    path, size = f"{folder}/{HASHES}", NPY_HEADER_BYTES + 8 * manifest.n_blocks
    file = _kept(keep, f"{manifest.fingerprint}.npy", path, size, lambda file: _digest_of(file) == manifest.hashes)
    if file is None:
        raise ConfigError(f"{storage.name(path)} is not the one of its {MANIFEST}; bring the file back as it was")
    return TokenFiles(
        tuple(TokenFile(f"{folder}/{shard.name}", NPY_HEADER_BYTES, shard.tokens) for shard in manifest.shards),
        np.dtype(manifest.dtype),
        manifest.block_tokens,
        manifest.end_of_document,
        manifest.fingerprint,
        manifest.vocab_size,
        documents=manifest.documents,
        tokenizer=manifest.tokenizer,
        tokenizer_fingerprint=manifest.tokenizer_fingerprint,
        tokenizer_release=manifest.tokenizer_release,
        packed_length=manifest.packed_length,
        hashes=StoredNumbers(file.read, "<u8", NPY_HEADER_BYTES, manifest.n_blocks),
    )


def _kept(keep: Keeper, key: str, path: str, size: int, is_right: Callable[[WholeFile], bool]) -> WholeFile | None:
    """A file as a whole; None where it is not right, and again when it was had anew: what was kept may be damaged."""
    for _ in range(2):
        file = keep(key, path, size)
        if is_right(file):
            return file
        file.drop()
    return None


def _digest_of(file: WholeFile) -> str:
    """`ShardSet.hashes` of the hashes in a file."""
    digest = hashlib.blake2b(digest_size=16)
    for start in range(NPY_HEADER_BYTES, file.size, _PIECE_BYTES):
        digest.update(file.read(start, min(start + _PIECE_BYTES, file.size)))
    return digest.hexdigest()


def read_small(storage: TokenStorage, path: str) -> bytes:
    """A file that fits into memory. Raises: ConfigError where it is too large for what it claims to be."""
    content = io.BytesIO()
    for piece in storage.whole(path):
        content.write(piece)
        if content.tell() > _SMALL_BYTES:
            raise ConfigError(f"{storage.name(path)} is larger than {_SMALL_BYTES} bytes, and no list of files")
    return content.getvalue()


# -- formats of others ---------------------------------------------------------------------------------------------


_Layout = tuple[tuple[TokenFile, ...], np.dtype[np.integer[Any]], Borders | None]
"""The files of a set, the type of their ids, and where documents begin if the ids do not tell."""


def _nanogpt(source: TokensSource, storage: TokenStorage, keep: Keeper, vocab_size: int) -> _Layout:
    dtype = _asked_type(source, vocab_size)
    files: list[TokenFile] = []
    for path in _named(source, storage):
        size = storage.size(path)
        if size % dtype.itemsize:
            raise ConfigError(
                f"{storage.name(path)}: {size} bytes are no ids of {dtype.itemsize} bytes each; set data.source.dtype"
            )
        if size >= 4 * _LLM_C_HEADER and _llm_c_type(storage.read(path, 0, 8)):
            raise ConfigError(f'{storage.name(path)} begins as a file of llm.c does; set data.source.format = "llm.c"')
        files.append(TokenFile(path, 0, size // dtype.itemsize))
    return tuple(files), dtype, None


def _asked_type(source: TokensSource, vocab_size: int) -> np.dtype[np.integer[Any]]:
    asked = source.dtype or ("uint16" if vocab_size <= 1 << 16 else "uint32")
    return np.dtype(asked).newbyteorder("<")


def _llm_c_type(header: bytes) -> str | None:
    magic, version = struct.unpack("<ii", header)
    return _LLM_C.get((magic, version))


def _llm_c(source: TokensSource, storage: TokenStorage, keep: Keeper, vocab_size: int) -> _Layout:
    files: list[TokenFile] = []
    types = set[str]()
    for path in _named(source, storage):
        size, offset = storage.size(path), 4 * _LLM_C_HEADER
        kind = _llm_c_type(storage.read(path, 0, 8)) if size >= offset else None
        if kind is None:
            raise ConfigError(
                f"{storage.name(path)} is no file of ids of llm.c: it begins with neither of 20240520, version 1, and "
                "20240801, version 7; name other files, or another data.source.format"
            )
        types.add(kind)
        (tokens,) = struct.unpack("<i", storage.read(path, 8, 12))
        if size != offset + tokens * np.dtype(kind).itemsize:
            raise ConfigError(
                f"{storage.name(path)} has {size} bytes and not the {tokens} ids of its header; copy it anew"
            )
        files.append(TokenFile(path, offset, tokens))
    return tuple(files), _one_type(source, types), None


def _one_type(source: TokensSource, types: set[str]) -> np.dtype[np.integer[Any]]:
    if len(types) != 1:
        raise ConfigError(
            f"data.source.path={source.path!r}: files with ids of several types ({', '.join(sorted(types))}); name "
            "those of one"
        )
    return np.dtype(types.pop())


def _megatron(source: TokensSource, storage: TokenStorage, keep: Keeper, vocab_size: int) -> _Layout:
    found = _found(source, storage, _megatron_pattern(storage))
    indices = [_MegatronIndex(path, _whole_index(storage, keep, path), storage.name(path)) for path in found]
    starts = np.cumsum([0, *(index.tokens for index in indices)]).tolist()
    files = tuple(TokenFile(f"{index.path.removesuffix('.idx')}.bin", 0, index.tokens) for index in indices)
    for file, index in zip(files, indices, strict=True):
        size = storage.size(file.path)
        if size != index.tokens * index.dtype.itemsize:
            raise ConfigError(
                f"{storage.name(file.path)} has {size} bytes and not the {index.tokens} ids of its .idx; copy both anew"
            )
    dtype = _one_type(source, {index.dtype.str for index in indices})
    return files, dtype, Borders(indices, starts)


def _megatron_pattern(storage: TokenStorage) -> str:
    """The indices, whether they, what they index, or the name of both was given."""
    return f"{storage.root.removesuffix('.bin').removesuffix('.idx')}.idx"


def _whole_index(storage: TokenStorage, keep: Keeper, path: str) -> WholeFile:
    size = storage.size(path)
    stamp = [storage.name(path), size, storage.stamp(path)]  # the file of another time is another one
    key = f"{hashlib.blake2b(json.dumps(stamp).encode(), digest_size=16).hexdigest()}.idx"
    file = _kept(keep, key, path, size, lambda file: file.size == size)
    if file is None:
        raise ConfigError(f"{storage.name(path)} changes its size while it is read; copy it anew")
    return file


class _MegatronIndex:
    """An .idx: a header, length of each sequence, its place in the .bin, and the first sequence of each document."""

    def __init__(self, path: str, file: WholeFile, name: str) -> None:
        self.path, self._name = path, name
        if file.size < _MEGATRON_HEADER.size:
            raise ConfigError(f"{name} is no index of Megatron: it ends in its header; copy it anew")
        magic, version, kind, sequences, borders = _MEGATRON_HEADER.unpack(file.read(0, _MEGATRON_HEADER.size))
        if magic != _MEGATRON_MAGIC or version != 1:
            raise ConfigError(
                f"{name} is no index of Megatron, version 1; name other files, or another data.source.format"
            )
        if kind not in _MEGATRON_TYPES:
            raise ConfigError(f"{name}: ids of type {kind}; 8 (uint16), 4 (int32) and 5 (int64) can be read")
        self.dtype: np.dtype[np.integer[Any]] = np.dtype(_MEGATRON_TYPES[kind])
        places = _MEGATRON_HEADER.size + 4 * sequences
        if borders < 1 or sequences < 1 or file.size < places + 8 * (sequences + borders):
            raise ConfigError(
                f"{name} is no index of Megatron: {file.size} bytes for {sequences} sequences; copy it anew"
            )
        self._places = StoredNumbers(file.read, "<i8", places, sequences)
        self._firsts = StoredNumbers(file.read, "<i8", places + 8 * sequences, borders)
        (last,) = struct.unpack("<i", file.read(places - 4, places))
        self.tokens = self._places[sequences - 1] // self.dtype.itemsize + last

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def __getitem__(self, document: int) -> int:
        first = self._firsts[document]
        if first == len(self._places):  # documents without a sequence, at the end
            return self.tokens
        start = self._places[first] // self.dtype.itemsize if 0 <= first < len(self._places) else -1
        if not 0 <= start <= self.tokens:
            raise StorageLost(
                f"{self._name} is damaged: document {document} begins nowhere in its .bin; copy both anew"
            )
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
    try:
        return TypeAdapter(_LitdataIndex).validate_json(read_small(storage, path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{storage.name(path)} is no index of litdata: {where}: {first['msg']}") from error
    except StorageLost as lost:
        if lost.can_pass:
            raise
        raise ConfigError(f"data.source.path={source.path!r} is no folder of litdata: {lost}") from lost


def _litdata(source: TokensSource, storage: TokenStorage, keep: Keeper, vocab_size: int) -> _Layout:
    index, folder = _litdata_index(source, storage), storage.root.rstrip("/")
    if index.config.compression or index.config.encryption:
        raise ConfigError(f"{storage.name(folder)}: chunks that are compressed or encrypted; write them without")
    if any(chunk.dim is None for chunk in index.chunks):
        raise ConfigError(
            f"{storage.name(folder)}: chunks that are not for litdata's TokensLoader; write one tensor an item"
        )
    dtype = _litdata_type(source, index.config.data_format, vocab_size, storage.name(folder))
    return tuple(_litdata_files(index.chunks, folder)), dtype, None


def _litdata_files(chunks: Iterable[_LitdataChunk], folder: str) -> Iterator[TokenFile]:
    """A chunk has the number of its items, then where each begins and the last one ends, as uint32, and then ids."""
    for chunk in chunks:
        assert chunk.dim is not None, "was looked at"
        yield TokenFile(f"{folder}/{chunk.filename}", 4 * (chunk.chunk_size + 2), chunk.dim)


def _litdata_type(source: TokensSource, formats: list[str], vocab_size: int, name: str) -> np.dtype[np.integer[Any]]:
    kind, _, number = (formats[0] if len(formats) == 1 else "").partition(":")
    table = {"no_header_tensor": _LITDATA_TENSORS, "no_header_numpy": _LITDATA_ARRAYS}.get(kind)
    if table is None:
        raise ConfigError(f"{name}: items of {formats}, where one tensor of ids each is needed")
    told = table.get(int(number)) if number.isdigit() else None
    if told is None and source.dtype is None:
        raise ConfigError(f"{name}: ids of type {formats[0]!r}, which is not known here; set data.source.dtype")
    asked = _asked_type(source, vocab_size)
    if told is None or source.dtype is None:
        return asked if told is None else np.dtype(told)
    if np.dtype(told).itemsize != asked.itemsize:
        raise ConfigError(
            f"data.source.dtype={source.dtype!r}, and the ids of {name} are {told}; drop data.source.dtype"
        )
    return asked


def _named(source: TokensSource, storage: TokenStorage) -> list[str]:
    if storage.is_local and Path(storage.root).is_dir():
        raise ConfigError(
            f"data.source.path={source.path!r} is a folder; name its files, such as {source.path}/train*.bin"
        )
    return _found(source, storage, storage.root)


def _found(source: TokensSource, storage: TokenStorage, pattern: str) -> list[str]:
    found = storage.matches(pattern)
    if not found:
        raise ConfigError(f"data.source.path: no file matches {source.path!r}")
    return found


def _ends(storage: TokenStorage, files: Sequence[TokenFile], dtype: np.dtype[Any]) -> list[bytes]:
    """First and last part of each file, the whole of a short one; several at a time."""

    def end_of(file: TokenFile) -> bytes:
        size, most = file.tokens * dtype.itemsize, _SAMPLED_BYTES
        stop = file.offset + size
        if size <= 2 * most:
            return storage.read(file.path, file.offset, stop)
        return storage.read(file.path, file.offset, file.offset + most) + storage.read(file.path, stop - most, stop)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(end_of, files))


def _require_type_holds(vocabulary: int, dtype: np.dtype[np.integer[Any]], name: str) -> None:
    """Refuse ids of a type in which some of the vocabulary would have become others, unnoticed."""
    room = int(np.iinfo(dtype).max) + 1
    if vocabulary > room:
        raise ConfigError(
            f"{name} holds {dtype.name}, ids below {room}, and the vocabulary has {vocabulary}; correct "
            "data.source.dtype, or name the tokenizer that made the ids in data.tokenizer"
        )
