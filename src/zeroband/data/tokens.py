"""The tokenised corpus of a machine: one flat array of ids on disk, built once and mapped by every process.

A cache entry is `<key>.tokens` (the raw ids) and `<key>.json` (its manifest, written last: an entry without one does
not exist). The key is made of everything the ids depend on, so an entry is never stale; old entries are not removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, TypeAdapter

from zeroband.config.data import DataConfig, DocumentSource, SyntheticTokensSource
from zeroband.data.sources import Document, documents, source_identity
from zeroband.data.synthetic_tokens import SyntheticTokens
from zeroband.data.tokenizer import Tokenizer, tokenizer_of
from zeroband.errors import ConfigError

_FORMAT = 1
_CHUNK_CHARACTERS = 1 << 20
_CHUNK_DOCUMENTS = 1024
_POLL_S = 0.1

Dtype = np.dtype[np.unsignedinteger]

OnProgress = Callable[[int], None]
"""Told the tokens written so far, by this process or by the one that it waits for."""


@dataclass(frozen=True)
class TokenManifest:
    """What a cache entry holds."""

    format: int
    dtype: str
    tokens: int
    documents: int
    empty_documents: int
    """Documents without any text; they are left out."""
    vocab_size: int
    end_of_document: int
    fingerprint: str
    """Hash of the ids: equal on two machines only if they hold the same corpus."""


class TokenStore(Protocol):
    """The documents of a corpus one after the other, an end-of-document id behind each."""

    end_of_document: int
    fingerprint: str
    """Hash of the content: nodes of one run compare it when they join."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> npt.NDArray[np.unsignedinteger]:
        """Tokens start..stop-1. Shapes: (stop - start,) uint16 or uint32; perhaps not writable."""
        ...


class MappedTokens(TokenStore):
    """A cache entry, mapped: all processes of a machine share its pages."""

    def __init__(self, path: Path, manifest: TokenManifest) -> None:
        self.manifest = manifest
        self.end_of_document, self.fingerprint = manifest.end_of_document, manifest.fingerprint
        self._tokens: npt.NDArray[np.unsignedinteger] = np.memmap(
            path, dtype=manifest.dtype, mode="r", shape=(manifest.tokens,)
        )

    def __len__(self) -> int:
        return self.manifest.tokens

    def read(self, start: int, stop: int) -> npt.NDArray[np.unsignedinteger]:
        """Tokens start..stop-1 without a copy, not writable."""
        assert 0 <= start <= stop <= len(self), (start, stop, len(self))
        return self._tokens[start:stop]


def prepare(config: DataConfig, seed: int, on_progress: OnProgress | None = None) -> TokenStore:
    """Open the tokens of a run, building them first where they come of text and this machine does not have them yet.

    May be called by all local ranks at once: one builds, the others wait for as long as it lives. No collective inside.
    Raises: ConfigError for a source, tokenizer or cache folder that cannot be used, and for a corpus without text.
    """
    tokenizer = tokenizer_of(config)
    if isinstance(config.source, SyntheticTokensSource):
        return SyntheticTokens(config.source, seed, tokenizer.vocab_size)
    entry = _entry_of(config, config.source, seed, tokenizer)
    folder = entry.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        store = _open(entry)
        if store is None:
            with _only_one_builds(entry, _dtype(tokenizer), on_progress):
                store = _open(entry) or _build(entry, tokenizer, documents(config.source, seed), on_progress)
    except OSError as e:
        raise ConfigError(f"data.cache_dir={str(folder)!r} cannot hold the tokenised corpus: {e}") from e
    return store


def is_prepared(config: DataConfig, seed: int) -> bool:
    """Whether this machine has all that `prepare` would build. Raises ConfigError as `prepare` does."""
    if isinstance(config.source, SyntheticTokensSource):
        return True
    return _open(_entry_of(config, config.source, seed, tokenizer_of(config))) is not None


def _entry_of(config: DataConfig, source: DocumentSource, seed: int, tokenizer: Tokenizer) -> Path:
    """Where the ids of a corpus lie, or would."""
    identity = [_FORMAT, tokenizer.fingerprint, source_identity(source, seed)]
    key = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16).hexdigest()
    return (config.cache_dir or default_cache_dir()) / f"{key}.tokens"


def default_cache_dir() -> Path:
    """`zeroband` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zeroband"


def _open(entry: Path) -> MappedTokens | None:
    """The entry if it is committed and whole, else None."""
    try:
        manifest = TypeAdapter(TokenManifest).validate_json(entry.with_suffix(".json").read_bytes(), strict=True)
        size = entry.stat().st_size
    except (FileNotFoundError, ValueError):
        return None
    if size != manifest.tokens * np.dtype(manifest.dtype).itemsize:
        return None
    return MappedTokens(entry, manifest)


@contextmanager
def _only_one_builds(entry: Path, dtype: Dtype, on_progress: OnProgress | None) -> Generator[None]:
    """Hold the entry's lock, which the kernel frees when its holder dies; while waiting, show the holder's progress."""
    with entry.with_suffix(".lock").open("w") as lock:
        while not _try_lock(lock):
            if on_progress is not None:
                on_progress(_size(_partial(entry)) // dtype.itemsize)
            time.sleep(_POLL_S)
        yield


def _try_lock(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _build(
    entry: Path, tokenizer: Tokenizer, corpus: Iterable[Document], on_progress: OnProgress | None
) -> MappedTokens:
    dtype = _dtype(tokenizer)
    digest = hashlib.blake2b(f"{dtype.str}/{tokenizer.vocab_size}/".encode(), digest_size=16)
    n_tokens = n_documents = n_empty = 0
    with _partial(entry).open("wb") as out:
        for chunk in _chunks(corpus):
            full = [document for document in chunk if document.text]
            ids = _encode(tokenizer, full).astype(dtype).tobytes()
            digest.update(ids)
            out.write(ids)
            n_tokens += len(ids) // dtype.itemsize
            n_documents += len(full)
            n_empty += len(chunk) - len(full)
            if on_progress is not None:
                on_progress(n_tokens)
        out.flush()
        os.fsync(out.fileno())
    if not n_tokens:
        raise ConfigError(f"data.source: no text to train on ({n_empty} documents, all of them empty)")
    manifest = TokenManifest(
        format=_FORMAT,
        dtype=dtype.str,
        tokens=n_tokens,
        documents=n_documents,
        empty_documents=n_empty,
        vocab_size=tokenizer.vocab_size,
        end_of_document=tokenizer.end_of_document,
        fingerprint=digest.hexdigest(),
    )
    _commit(entry, manifest)
    return MappedTokens(entry, manifest)


def _commit(entry: Path, manifest: TokenManifest) -> None:
    """Give the finished ids their name, then the manifest its own: that second rename makes the entry exist."""
    _partial(entry).replace(entry)
    draft = entry.with_suffix(".json.part")
    with draft.open("w") as out:
        json.dump(asdict(manifest), out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    draft.replace(entry.with_suffix(".json"))


def _chunks(corpus: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in groups large enough for a call of the tokenizer and small enough for the memory."""
    chunk: list[Document] = []
    characters = 0
    for document in corpus:
        chunk.append(document)
        characters += len(document.text)
        if characters >= _CHUNK_CHARACTERS or len(chunk) >= _CHUNK_DOCUMENTS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _encode(tokenizer: Tokenizer, chunk: Sequence[Document]) -> npt.NDArray[np.uint32]:
    """Ids of a group of documents with the end-of-document id behind each."""
    if not chunk:
        return np.empty(0, dtype=np.uint32)
    try:
        encoded = tokenizer.encode_batch([document.text for document in chunk])
    except UnicodeError as e:
        raise ConfigError(_unicode_message(tokenizer, chunk)) from e
    end = np.array([tokenizer.end_of_document], dtype=np.uint32)
    return np.concatenate([part for ids in encoded for part in (ids, end)])


def _unicode_message(tokenizer: Tokenizer, chunk: Sequence[Document]) -> str:
    for document in chunk:
        try:
            tokenizer.encode(document.text)
        except UnicodeError as e:
            return f"data.source: {document.where}: not text that data.tokenizer can take: {e}"
    raise AssertionError("a group of documents failed to encode, and none of them alone does")


def _dtype(tokenizer: Tokenizer) -> Dtype:
    """The smallest type that holds every id; little-endian, so that the fingerprint is the same everywhere."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


def _partial(entry: Path) -> Path:
    """Where an entry is built, under the lock: what a killed build leaves is overwritten by the next."""
    return entry.with_suffix(".part")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


@dataclass(frozen=True)
class Corpus:
    """The data that a model is trained on."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    data: DataConfig
    seed: int
    """Seed of the order, and of synthetic text."""
    fingerprint: str
    """Fingerprint of the tokens."""
    tokenizer_fingerprint: str

    def to_record(self) -> dict[str, Any]:
        """Plain JSON values; the section as the node that writes has it, with its paths."""
        return TypeAdapter(Corpus).dump_python(self, mode="json")

    @staticmethod
    def of_record(record: Mapping[str, Any]) -> Corpus:
        """The inverse. Raises ValueError."""
        return TypeAdapter(Corpus).validate_python(record)
