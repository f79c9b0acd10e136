"""The token ids of a run: prepared beforehand (`token_files`), or tokenised here once per machine and cached.

A cache entry is `<key>.tokens` (raw ids), `<key>.marks` for conversations (one byte per id), and `<key>.json` (the
manifest, written last: without it the entry is incomplete). The key hashes everything that determines the ids, so
entries never become stale; old ones are not removed.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, TypeAdapter

from zeroband.config.data import ChatSource, DataConfig, DocumentSource, SyntheticTokensSource, TokensSource
from zeroband.data.block_cache import cache_dir_of
from zeroband.data.chat import DOCUMENT_START, TARGET, ChatEncoder, Marks, pack
from zeroband.data.listing import log_skipped
from zeroband.data.packing import fill_bins
from zeroband.data.readers import BadRow, BadRows, Document, OnBad, refuse, usable
from zeroband.data.shard_set import ids_dtype
from zeroband.data.sources import conversations, documents, source_identity
from zeroband.data.synthetic_tokens import SyntheticTokens
from zeroband.data.token_files import open_tokens
from zeroband.data.token_store import TokenStore
from zeroband.data.tokenizer import Ids, Tokenizer, tokenizer_of
from zeroband.errors import ConfigError
from zeroband.observe.log import get_logger

_FORMAT = 1
_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 1024
_PACKED_TOKENS = 1 << 22
"""Tokens whose documents are packed together."""

_POLL_S = 0.1

_log = get_logger(__name__)

_T = TypeVar("_T")

Dtype = np.dtype[np.unsignedinteger]

OnProgress = Callable[[int], None]
"""Called with the number of tokens written so far, by this process or by the one that it waits for."""


@dataclass
class TokenManifest:
    """Metadata of a cache entry; counts while it is built."""

    format: int
    dtype: str
    vocab_size: int
    end_of_document: int
    tokens: int = 0
    documents: int = 0
    empty_documents: int = 0
    """Documents skipped because they have no text or no tokens."""
    fingerprint: str = ""
    """Hash of ids and marks."""
    learned: int | None = None
    """Number of target tokens; None if all are targets and there are no marks."""
    padding: int = 0
    """Padding tokens between documents."""
    cut_documents: int = 0
    """Conversations longer than a sample."""
    bad_rows: int = 0
    """Unusable rows skipped (data.skip_bad_rows)."""
    packed_length: int | None = None
    """data.seq_length used for best-fit packing; None if documents are concatenated."""


class CachedTokens(TokenStore):
    """A memory-mapped cache entry; the processes of a machine share its pages."""

    def __init__(self, path: Path, manifest: TokenManifest) -> None:
        self.manifest = manifest
        self.end_of_document, self.fingerprint = manifest.end_of_document, manifest.fingerprint
        self.dtype: Dtype = np.dtype(manifest.dtype)
        self.packed_length = manifest.packed_length
        self.is_plain = manifest.learned is None and manifest.packed_length is None
        shape = (manifest.tokens,)
        self._tokens: npt.NDArray[np.unsignedinteger] = np.memmap(path, dtype=self.dtype, mode="r", shape=shape)
        is_marked = manifest.learned is not None
        self._marks: Marks | None = (
            np.memmap(_marks(path), dtype=np.uint8, mode="r", shape=shape) if is_marked else None
        )

    def __len__(self) -> int:
        return self.manifest.tokens

    def read(self, start: int, stop: int) -> npt.NDArray[np.unsignedinteger]:
        """Return tokens start..stop-1 as a read-only view."""
        assert 0 <= start <= stop <= len(self), (start, stop, len(self))
        return self._tokens[start:stop]

    def document_starts(self, start: int, ids: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.bool_]:
        if self._marks is None:
            return super().document_starts(start, ids)
        return (self._marks[start : start + len(ids)] & DOCUMENT_START) != 0

    def is_target(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        if self._marks is None:
            return super().is_target(start, stop)
        return (self._marks[start:stop] & TARGET) != 0


def prepare(
    config: DataConfig,
    seed: int,
    on_progress: OnProgress | None = None,
    *,
    local_rank: int = 0,
    local_world_size: int = 1,
) -> TokenStore:
    """Open the tokens of a run, tokenising its text first unless this machine has them cached.

    All local ranks may call it at once: one builds, the others wait while it lives. Uses no collectives. The rank
    determines its share of prefetching.
    Raises: ConfigError for an unusable source, tokenizer, cache folder or conversation, and a corpus without text;
    StorageLost if storage does not answer within data.retry_s.
    """
    tokenizer = tokenizer_of(config)
    if isinstance(config.source, SyntheticTokensSource):
        return SyntheticTokens(config.source, seed, tokenizer.vocab_size)
    if isinstance(config.source, TokensSource):
        return open_tokens(config, tokenizer, local_rank=local_rank, local_world_size=local_world_size)
    entry = _entry_of(config, config.source, seed, tokenizer)
    folder = entry.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        store = _open(entry)
        if store is None:
            with _build_lock(entry, ids_dtype(tokenizer.vocab_size), on_progress):
                store = _open(entry) or _build(entry, config, config.source, seed, tokenizer, on_progress)
    except OSError as e:
        raise ConfigError(f"data.cache_dir={str(folder)!r}: cannot write the tokenised corpus: {e}") from e
    return store


def is_prepared(config: DataConfig, seed: int) -> bool:
    """Return whether `prepare` has nothing to build. Raises ConfigError as `prepare` does."""
    if isinstance(config.source, SyntheticTokensSource | TokensSource):
        return True
    return _open(_entry_of(config, config.source, seed, tokenizer_of(config))) is not None


def _entry_of(config: DataConfig, source: DocumentSource | ChatSource, seed: int, tokenizer: Tokenizer) -> Path:
    """Return the path of a corpus in the cache."""
    identity = [_FORMAT, tokenizer.fingerprint, source_identity(source, seed, config.retry_s)]
    if isinstance(source, ChatSource):
        # chats contain special tokens, whose encoding may change with the library's release
        identity += [tokenizer.chat_template, config.seq_length, tokenizer.release]
    elif config.packing == "best-fit":
        identity += ["best-fit", config.seq_length]
    if config.skip_bad_rows:
        identity += ["skip_bad_rows"]
    key = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16).hexdigest()
    return cache_dir_of(config) / f"{key}.tokens"


def _open(entry: Path) -> CachedTokens | None:
    """Open an entry; None if it is missing or incomplete."""
    try:
        manifest = TypeAdapter(TokenManifest).validate_json(entry.with_suffix(".json").read_bytes(), strict=True)
        is_complete = entry.stat().st_size == manifest.tokens * np.dtype(manifest.dtype).itemsize
        if manifest.learned is not None:
            is_complete &= _marks(entry).stat().st_size == manifest.tokens
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return CachedTokens(entry, manifest) if is_complete else None


@contextmanager
def _build_lock(entry: Path, dtype: Dtype, on_progress: OnProgress | None) -> Generator[None]:
    """Hold the entry's lock; while waiting for it, report the holder's progress. The kernel frees it on death."""
    with entry.with_suffix(".lock").open("w") as lock:
        while not _try_lock(lock):
            if on_progress is not None:
                partial = _partial(entry)
                on_progress(partial.stat().st_size // dtype.itemsize if partial.exists() else 0)
            time.sleep(_POLL_S)
        yield


def _try_lock(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _hashed(path: Path, digest: hashlib.blake2b) -> Generator[Callable[[npt.NDArray[np.unsignedinteger]], None]]:
    """Write a file of an entry; yields the function that appends values, and adds them to the digest."""
    with path.open("wb") as out:

        def append(values: npt.NDArray[np.unsignedinteger]) -> None:
            content = values.tobytes()
            digest.update(content)
            out.write(content)

        yield append
        out.flush()
        os.fsync(out.fileno())


_Part = tuple[npt.NDArray[np.uint32], Marks | None]
"""Consecutive ids of a corpus and their marks; None if all are targets."""


def _build(
    entry: Path,
    config: DataConfig,
    source: DocumentSource | ChatSource,
    seed: int,
    tokenizer: Tokenizer,
    on_progress: OnProgress | None,
) -> CachedTokens:
    dtype, bad = ids_dtype(tokenizer.vocab_size), BadRows()
    is_marked = isinstance(source, ChatSource)
    made = TokenManifest(_FORMAT, dtype.str, tokenizer.vocab_size, tokenizer.end_of_document)
    made.packed_length = None if is_marked else _packed_length(config)
    made.learned = 0 if is_marked else None
    digest = hashlib.blake2b(f"{dtype.str}/{tokenizer.vocab_size}/".encode(), digest_size=16)
    marks_digest = hashlib.blake2b(b"marks/", digest_size=16)
    with ExitStack() as stack:
        append = stack.enter_context(_hashed(_partial(entry), digest))
        mark = stack.enter_context(_hashed(_partial(_marks(entry)), marks_digest)) if is_marked else None
        for values, their_marks in _corpus(config, source, seed, tokenizer, made, bad):
            append(values.astype(dtype))
            if mark is not None and their_marks is not None:
                mark(their_marks)
                made.learned = (made.learned or 0) + int(np.count_nonzero(their_marks & TARGET))
            made.tokens += len(values)
            if on_progress is not None:
                on_progress(made.tokens)
    if not made.tokens:
        raise ConfigError(f"data.source: no text to train on ({made.empty_documents} documents, all empty{bad})")
    if is_marked:
        digest.update(marks_digest.digest())
        _partial(_marks(entry)).replace(_marks(entry))
    made.fingerprint, made.bad_rows = digest.hexdigest(), bad.count
    _commit(entry, made)
    if made.cut_documents:
        fields = {"cut": made.cut_documents, "of": made.documents}
        _log.warning("conversations longer than data.seq_length were cut", extra={"fields": fields})
    log_skipped("unusable rows", bad.count, bad.first)
    return CachedTokens(entry, made)


def _commit(entry: Path, manifest: TokenManifest) -> None:
    """Rename the ids, then the manifest; the second rename commits the entry."""
    _partial(entry).replace(entry)
    draft = entry.with_suffix(".json.part")
    with draft.open("w") as out:
        json.dump(asdict(manifest), out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    draft.replace(entry.with_suffix(".json"))


def _corpus(
    config: DataConfig,
    source: DocumentSource | ChatSource,
    seed: int,
    tokenizer: Tokenizer,
    counts: TokenManifest,
    bad: BadRows,
) -> Iterator[_Part]:
    on_bad = bad if config.skip_bad_rows else refuse
    if isinstance(source, ChatSource):
        return _chats(config, source, tokenizer, counts, on_bad)
    texts = _texts(documents(source, seed, config.retry_s, on_bad), tokenizer, counts, on_bad)
    packed_length = _packed_length(config)
    ids = texts if packed_length is None else _packed(texts, packed_length, tokenizer.end_of_document, counts)
    return ((part, None) for part in ids)


def _packed_length(config: DataConfig) -> int | None:
    return config.seq_length if config.packing == "best-fit" else None


def _texts(corpus: Iterable[Document], tokenizer: Tokenizer, counts: TokenManifest, on_bad: OnBad) -> Iterator[Ids]:
    end = np.array([tokenizer.end_of_document], dtype=np.uint32)
    for batch in in_batches(corpus, lambda document: document.size):
        encoded = encode_documents(tokenizer, [document for document in batch if document.text], on_bad)
        full = [ids for ids in encoded if ids is not None and len(ids)]
        counts.documents += len(full)
        counts.empty_documents += len(batch) - len(full) - sum(ids is None for ids in encoded)
        yield np.concatenate([part for ids in full for part in (ids, end)]) if full else np.empty(0, dtype=np.uint32)


def _packed(texts: Iterable[Ids], size: int, end: int, counts: TokenManifest) -> Iterator[Ids]:
    """Pack documents into samples of `size` ids; large groups leave little padding."""
    for group in in_batches(texts, len, batch_size=_PACKED_TOKENS):
        ids = np.concatenate(group)
        lengths = np.diff(np.flatnonzero(ids == end) + 1, prepend=0).tolist()
        bins = [part for parts in fill_bins(ids, lengths, size, end) for part in parts]
        packed = np.concatenate(bins) if bins else ids
        counts.padding += len(packed) - len(ids)
        yield packed


def _chats(
    config: DataConfig, source: ChatSource, tokenizer: Tokenizer, counts: TokenManifest, on_bad: OnBad
) -> Iterator[_Part]:
    encoder = ChatEncoder(tokenizer)
    read = conversations(source, config.retry_s, on_bad)
    encoded = (chats for one in read for chats in usable(functools.partial(encoder.encode, one), on_bad))
    packed = pack(itertools.chain.from_iterable(encoded), config.seq_length, tokenizer.end_of_document)
    while batch := list(itertools.islice(packed, _BATCH_DOCUMENTS)):
        ids, marks = (np.concatenate(parts) for parts in zip(*batch, strict=True))
        chats = [chat for chat in batch if (chat.marks & TARGET).any()]  # the others are padding
        counts.documents += len(chats)
        counts.padding += len(ids) - sum(len(chat.ids) for chat in chats)
        counts.cut_documents += sum(len(chat.ids) > config.seq_length + 1 for chat in chats)
        yield ids, marks
    if encoder.dropped_reasoning:
        fields = {"count": len(encoder.dropped_reasoning), "first": encoder.dropped_reasoning[0]}
        _log.warning("the chat template drops the assistant's reasoning_content", extra={"fields": fields})


def in_batches(
    corpus: Iterable[_T], size_of: Callable[[_T], int], *, batch_size: int | None = None
) -> Iterator[list[_T]]:
    """Yield documents in batches of at least `batch_size` in total; by default, batches for one tokenizer call."""
    batch: list[_T] = []
    size = 0
    for document in corpus:
        batch.append(document)
        size += size_of(document)
        if size >= (batch_size or _BATCH_CHARACTERS) or (batch_size is None and len(batch) >= _BATCH_DOCUMENTS):
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_documents(tokenizer: Tokenizer, documents: Sequence[Document], on_bad: OnBad = refuse) -> list[Ids | None]:
    """Return the ids of each document, possibly none; None for a bad document.

    Raises: ConfigError naming a document that cannot be tokenised, unless `on_bad` skips it.
    """
    if not documents:
        return []
    try:
        return [*tokenizer.encode_batch([document.text for document in documents])]
    except ConfigError:
        raise
    except Exception:  # noqa: BLE001 - tokenizers raise arbitrary exceptions
        found = [[*usable(functools.partial(_encoded, tokenizer, document), on_bad)] for document in documents]
        return [ids[0] if ids else None for ids in found]


def _encoded(tokenizer: Tokenizer, document: Document) -> Ids:
    try:
        return tokenizer.encode(document.text)
    except Exception as e:
        raise BadRow(f"data.source: {document.where}: data.tokenizer cannot encode this text: {e}") from e


def _marks(entry: Path) -> Path:
    return entry.with_suffix(".marks")


def _partial(path: Path) -> Path:
    """Return the path of an unfinished file; remains of a killed build are overwritten."""
    return path.with_suffix(f"{path.suffix}.part")


@dataclass(frozen=True)
class Corpus:
    """Identity of the data that a model is trained on."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    data: DataConfig
    seed: int
    """Seed of the sample order and of synthetic text."""
    fingerprint: str
    tokenizer_fingerprint: str
    tokenizer_release: str = ""
    """Versions of the tokenizer's libraries, for messages."""

    @property
    def order(self) -> Mapping[str, Any]:
        """Everything that determines the sequence of samples, by configuration key."""
        data = self.data
        return {
            "run.seed": self.seed,
            "data.seq_length": data.seq_length,
            "data.hold_out": data.hold_out,
            "data.packing": data.packing,
            "data.shuffle_blocks": data.shuffle_blocks,
            "data (tokens and their mixture)": self.fingerprint,
        }

    def to_record(self) -> dict[str, Any]:
        """Return plain JSON values, with the [data] section and paths of this node."""
        return TypeAdapter(Corpus).dump_python(self, mode="json")

    @staticmethod
    def of_record(record: Mapping[str, Any]) -> Corpus:
        """Parse the result of `to_record`. Raises ValueError."""
        return TypeAdapter(Corpus).validate_python(record)
