"""The tokenised corpus of a machine: one flat array of ids on disk, built once and mapped by every process.

A cache entry is `<key>.tokens` (the raw ids), for conversations `<key>.marks` (a byte for each id), and `<key>.json`
(its manifest, written last: an entry without one does not exist). The key is made of everything the ids depend on, so
an entry is never stale; old entries are not removed.
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
from types import TracebackType
from typing import Any, NamedTuple, TextIO, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, TypeAdapter

from zeroband.config.data import ChatSource, DataConfig, DocumentSource, SyntheticTokensSource, TokensSource
from zeroband.data.chat import BEGINS, LEARNED, ChatEncoder, Marks, pack
from zeroband.data.open_tokens import open_tokens
from zeroband.data.packing import fill_bins
from zeroband.data.pieces import BadRow, BadRows, Document, OnBad, refuse, usable
from zeroband.data.shard_set import ids_dtype
from zeroband.data.sources import conversations, documents, source_identity
from zeroband.data.synthetic_tokens import SyntheticTokens
from zeroband.data.token_store import TokenStore
from zeroband.data.tokenizer import Ids, Tokenizer, tokenizer_of
from zeroband.errors import ConfigError
from zeroband.observe.log import get_logger

_FORMAT = 1
_CHUNK_CHARACTERS = 1 << 20
_CHUNK_DOCUMENTS = 1024
_PACKED_TOKENS = 1 << 22
"""Ids whose documents are packed at a time."""

_POLL_S = 0.1

_log = get_logger(__name__)

_T = TypeVar("_T")

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
    """Documents without any text, or whose text gives no ids; they are left out."""
    vocab_size: int
    end_of_document: int
    fingerprint: str
    """Hash of the ids and marks: equal on two machines only if they hold the same corpus."""
    learned: int | None = None
    """How many ids are marked to be learned; None where all are, and nothing is marked."""
    padding: int = 0
    """Ids that stand between documents so that samples do not cut them."""
    cut_documents: int = 0
    """Conversations that are longer than a sample."""
    bad_rows: int = 0
    """Rows that were left out because they cannot be used (data.skip_bad_rows)."""
    packed_length: int | None = None
    """seq_length that documents were packed for (best-fit); None: they lie end to end."""


class MappedTokens(TokenStore):
    """A cache entry, mapped: all processes of a machine share its pages."""

    def __init__(self, path: Path, manifest: TokenManifest) -> None:
        self.manifest = manifest
        self.end_of_document, self.fingerprint = manifest.end_of_document, manifest.fingerprint
        self.dtype: Dtype = np.dtype(manifest.dtype)
        self.packed_length = manifest.packed_length
        self.is_plain = manifest.learned is None and manifest.packed_length is None
        self._tokens: npt.NDArray[np.unsignedinteger] = np.memmap(
            path, dtype=manifest.dtype, mode="r", shape=(manifest.tokens,)
        )

    def __len__(self) -> int:
        return self.manifest.tokens

    def read(self, start: int, stop: int) -> npt.NDArray[np.unsignedinteger]:
        """Tokens start..stop-1 without a copy, not writable."""
        assert 0 <= start <= stop <= len(self), (start, stop, len(self))
        return self._tokens[start:stop]


class MarkedTokens(MappedTokens):
    """A cache entry of conversations: where they begin and what is learned of them lies beside their ids."""

    def __init__(self, path: Path, manifest: TokenManifest) -> None:
        super().__init__(path, manifest)
        self._marks: Marks = np.memmap(_marks(path), dtype=np.uint8, mode="r", shape=(manifest.tokens,))

    def begins(self, start: int, ids: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.bool_]:
        return (self._marks[start : start + len(ids)] & BEGINS) != 0

    def is_learned(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        return (self._marks[start:stop] & LEARNED) != 0


def prepare(
    config: DataConfig,
    seed: int,
    on_progress: OnProgress | None = None,
    *,
    local_rank: int = 0,
    local_world_size: int = 1,
) -> TokenStore:
    """Open the tokens of a run, building them first where they come of text and this machine does not have them yet.

    May be called by all local ranks at once: one builds, the others wait for as long as it lives. No collective inside.
    Which rank this is decides what of ids that lie elsewhere it fetches ahead.
    Raises: ConfigError for a source, tokenizer or cache folder that cannot be used, a corpus without text, and a
    conversation that cannot be written or has nothing to learn; StorageLost where a storage of text or ids does not
    answer for data.retry_s.
    """
    tokenizer = tokenizer_of(config)
    if isinstance(config.source, SyntheticTokensSource):
        return SyntheticTokens(config.source, seed, tokenizer.vocab_size)
    if isinstance(config.source, TokensSource):
        return open_tokens(
            config,
            config.source,
            tokenizer,
            cache_dir=config.cache_dir or default_cache_dir(),
            local_rank=local_rank,
            local_world_size=local_world_size,
        )
    entry = _entry_of(config, config.source, seed, tokenizer)
    folder = entry.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        store = _open(entry)
        if store is None:
            with _only_one_builds(entry, ids_dtype(tokenizer.vocab_size), on_progress):
                bad = BadRows()
                corpus = _chunks_of(config, config.source, seed, tokenizer, bad if config.skip_bad_rows else refuse)
                store = _open(entry) or _build(entry, config, tokenizer, corpus, bad, on_progress)
    except OSError as e:
        raise ConfigError(f"data.cache_dir={str(folder)!r} cannot hold the tokenised corpus: {e}") from e
    return store


def is_prepared(config: DataConfig, seed: int) -> bool:
    """Whether this machine has all that `prepare` would build. Raises ConfigError as `prepare` does."""
    if isinstance(config.source, SyntheticTokensSource | TokensSource):
        return True
    return _open(_entry_of(config, config.source, seed, tokenizer_of(config))) is not None


def _entry_of(config: DataConfig, source: DocumentSource | ChatSource, seed: int, tokenizer: Tokenizer) -> Path:
    """Where the ids of a corpus lie, or would."""
    identity = [_FORMAT, tokenizer.fingerprint, source_identity(source, seed, config.retry_s)]
    if isinstance(source, ChatSource):
        identity += [tokenizer.chat_template, config.seq_length, tokenizer.release]  # special tokens are read, too
    elif config.packing == "best-fit":
        identity += ["best-fit", config.seq_length]
    if config.skip_bad_rows:
        identity += ["skip_bad_rows"]
    key = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16).hexdigest()
    return (config.cache_dir or default_cache_dir()) / f"{key}.tokens"


def default_cache_dir() -> Path:
    """`zeroband` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zeroband"


def _open(entry: Path) -> MappedTokens | None:
    """The entry if it is committed and whole, else None."""
    try:
        manifest = TypeAdapter(TokenManifest).validate_json(entry.with_suffix(".json").read_bytes(), strict=True)
        is_whole = entry.stat().st_size == manifest.tokens * np.dtype(manifest.dtype).itemsize
        if manifest.learned is not None:
            is_whole &= _marks(entry).stat().st_size == manifest.tokens
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return _mapped(entry, manifest) if is_whole else None


def _mapped(entry: Path, manifest: TokenManifest) -> MappedTokens:
    return MappedTokens(entry, manifest) if manifest.learned is None else MarkedTokens(entry, manifest)


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


class _Chunk(NamedTuple):
    """A part of a corpus in its place, as it is written to the disk."""

    ids: npt.NDArray[np.uint32]
    marks: Marks | None
    """None: all ids are learned."""
    documents: int
    empty: int = 0
    padding: int = 0
    cut: int = 0


class _Column:
    """One of the files of an entry while it is built, and the hash of what is in it."""

    def __init__(self, path: Path, identity: str) -> None:
        self._out = path.open("wb")
        self.digest = hashlib.blake2b(identity.encode(), digest_size=16)

    def append(self, values: npt.NDArray[np.unsignedinteger]) -> None:
        content = values.tobytes()
        self.digest.update(content)
        self._out.write(content)

    def __enter__(self) -> _Column:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        with self._out:
            if kind is None:
                self._out.flush()
                os.fsync(self._out.fileno())


def _build(
    entry: Path,
    config: DataConfig,
    tokenizer: Tokenizer,
    corpus: Iterable[_Chunk],
    bad: BadRows,
    on_progress: OnProgress | None,
) -> MappedTokens:
    dtype = ids_dtype(tokenizer.vocab_size)
    is_marked, tokens, learned = isinstance(config.source, ChatSource), 0, 0
    counted = np.zeros(4, dtype=np.int64)
    with ExitStack() as stack:
        ids = stack.enter_context(_Column(_partial(entry), f"{dtype.str}/{tokenizer.vocab_size}/"))
        marks = stack.enter_context(_Column(_partial(_marks(entry)), "marks/")) if is_marked else None
        for chunk in corpus:
            ids.append(chunk.ids.astype(dtype))
            if marks is not None and chunk.marks is not None:
                marks.append(chunk.marks)
                learned += int(np.count_nonzero(chunk.marks & LEARNED))
            tokens += len(chunk.ids)
            counted += (chunk.documents, chunk.empty, chunk.padding, chunk.cut)
            if on_progress is not None:
                on_progress(tokens)
    n_documents, n_empty, padding, cut = counted.tolist()
    if not tokens:
        raise ConfigError(f"data.source: no text to train on ({n_empty} documents, all of them empty{bad})")
    if marks is not None:
        ids.digest.update(marks.digest.digest())
        _partial(_marks(entry)).replace(_marks(entry))
    manifest = TokenManifest(
        format=_FORMAT,
        dtype=dtype.str,
        tokens=tokens,
        documents=n_documents,
        empty_documents=n_empty,
        vocab_size=tokenizer.vocab_size,
        end_of_document=tokenizer.end_of_document,
        fingerprint=ids.digest.hexdigest(),
        learned=None if marks is None else learned,
        padding=padding,
        cut_documents=cut,
        bad_rows=bad.count,
        packed_length=None if is_marked else _packed_length(config),
    )
    _commit(entry, manifest)
    if cut:
        fields = {"cut": cut, "of": n_documents}
        _log.warning("conversations that are longer than data.seq_length are cut", extra={"fields": fields})
    tell_bad_rows(bad)
    return _mapped(entry, manifest)


def _commit(entry: Path, manifest: TokenManifest) -> None:
    """Give the finished ids their name, then the manifest its own: that second rename makes the entry exist."""
    _partial(entry).replace(entry)
    draft = entry.with_suffix(".json.part")
    with draft.open("w") as out:
        json.dump(asdict(manifest), out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    draft.replace(entry.with_suffix(".json"))


def tell_bad_rows(bad: BadRows) -> None:
    """Log how many rows were left out, and the first one."""
    if bad.count:
        fields = {"count": bad.count, "first": bad.first}
        _log.warning("left out of the data: rows that cannot be used", extra={"fields": fields})


def _chunks_of(
    config: DataConfig, source: DocumentSource | ChatSource, seed: int, tokenizer: Tokenizer, on_bad: OnBad
) -> Iterator[_Chunk]:
    if isinstance(source, ChatSource):
        return _chats(source, tokenizer, config.seq_length, config.retry_s, on_bad)
    texts = _texts(documents(source, seed, config.retry_s, on_bad), tokenizer, on_bad)
    packed_length = _packed_length(config)
    return texts if packed_length is None else _packed(texts, packed_length, tokenizer.end_of_document)


def _packed_length(config: DataConfig) -> int | None:
    return config.seq_length if config.packing == "best-fit" else None


def _texts(corpus: Iterable[Document], tokenizer: Tokenizer, on_bad: OnBad) -> Iterator[_Chunk]:
    end = np.array([tokenizer.end_of_document], dtype=np.uint32)
    for chunk in in_chunks(corpus, lambda document: len(document.text)):
        encoded = encode_documents(tokenizer, [document for document in chunk if document.text], on_bad)
        full = [ids for ids in encoded if ids is not None and len(ids)]
        ids = [part for one in full for part in (one, end)]
        joined = np.concatenate(ids) if ids else np.empty(0, dtype=np.uint32)
        yield _Chunk(joined, None, len(full), empty=len(chunk) - len(full) - sum(ids is None for ids in encoded))


def _packed(chunks: Iterable[_Chunk], size: int, end: int) -> Iterator[_Chunk]:
    """Chunks whose documents are packed into samples of `size` ids; many at a time, so that they fit well."""
    for group in _groups(chunks):
        ids = np.concatenate([chunk.ids for chunk in group])
        ends = np.flatnonzero(ids == end) + 1
        lengths = np.diff(ends, prepend=0).tolist()
        bins = [part for parts in fill_bins(ids, lengths, size, end) for part in parts]
        packed = np.concatenate(bins) if bins else ids
        n_documents, empty = sum(chunk.documents for chunk in group), sum(chunk.empty for chunk in group)
        yield _Chunk(packed, None, n_documents, empty=empty, padding=len(packed) - len(ids))


def _groups(chunks: Iterable[_Chunk]) -> Iterator[list[_Chunk]]:
    group: list[_Chunk] = []
    for chunk in chunks:
        group.append(chunk)
        if sum(len(one.ids) for one in group) >= _PACKED_TOKENS:
            yield group
            group = []
    if group:
        yield group


def _chats(
    source: ChatSource, tokenizer: Tokenizer, seq_length: int, retry_s: float, on_bad: OnBad
) -> Iterator[_Chunk]:
    encoder = ChatEncoder(tokenizer)
    read = conversations(source, retry_s, on_bad)
    written = (chats for one in read for chats in usable(functools.partial(encoder.encode, one), on_bad))
    chats = itertools.chain.from_iterable(written)
    packed = pack(chats, seq_length, tokenizer.end_of_document)
    while some := list(itertools.islice(packed, _CHUNK_DOCUMENTS)):
        ids, marks = (np.concatenate(parts) for parts in zip(*some, strict=True))
        said = [chat for chat in some if (chat.marks & LEARNED).any()]
        yield _Chunk(
            ids,
            marks,
            documents=len(said),
            padding=sum(len(chat.ids) for chat in some) - sum(len(chat.ids) for chat in said),
            cut=sum(len(chat.ids) > seq_length + 1 for chat in said),
        )
    if encoder.without_thoughts:
        fields = {"count": len(encoder.without_thoughts), "first": encoder.without_thoughts[0]}
        _log.warning("the chat template leaves out what the assistant thought", extra={"fields": fields})


def in_chunks(corpus: Iterable[_T], size_of: Callable[[_T], int]) -> Iterator[list[_T]]:
    """Documents in groups large enough for a call of the tokenizer and small enough for the memory."""
    chunk: list[_T] = []
    characters = 0
    for document in corpus:
        chunk.append(document)
        characters += size_of(document)
        if characters >= _CHUNK_CHARACTERS or len(chunk) >= _CHUNK_DOCUMENTS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def encode_documents(tokenizer: Tokenizer, documents: Sequence[Document], on_bad: OnBad = refuse) -> list[Ids | None]:
    """Ids of each of a group of documents, none where the tokenizer leaves nothing of a text; None for a bad one.

    Raises: ConfigError naming the one that the tokenizer does not take, unless `on_bad` leaves it out.
    """
    if not documents:
        return []
    try:
        return [*tokenizer.encode_batch([document.text for document in documents])]
    except ConfigError:
        raise
    except Exception:  # noqa: BLE001 - a tokenizer raises what it likes
        found = [[*usable(functools.partial(_encoded, tokenizer, document), on_bad)] for document in documents]
        return [ids[0] if ids else None for ids in found]


def _encoded(tokenizer: Tokenizer, document: Document) -> Ids:
    try:
        return tokenizer.encode(document.text)
    except Exception as e:
        raise BadRow(f"data.source: {document.where}: not text that data.tokenizer can take: {e}") from e


def _marks(entry: Path) -> Path:
    """Where the marks of the ids of an entry lie."""
    return entry.with_suffix(".marks")


def _partial(path: Path) -> Path:
    """Where a file of an entry is built, under the lock: what a killed build leaves is overwritten by the next."""
    return path.with_suffix(f"{path.suffix}.part")


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
    tokenizer_release: str = ""
    """Versions of the libraries that made the ids, for messages."""

    @property
    def order(self) -> Mapping[str, Any]:
        """What the list of samples follows from, by the key that sets it."""
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
        """Plain JSON values; the section as the node that writes has it, with its paths."""
        return TypeAdapter(Corpus).dump_python(self, mode="json")

    @staticmethod
    def of_record(record: Mapping[str, Any]) -> Corpus:
        """The inverse. Raises ValueError."""
        return TypeAdapter(Corpus).validate_python(record)
