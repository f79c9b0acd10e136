"""The token ids of a run: those that were made before, where they lie, or made here of text, once for a machine.

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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, TypeAdapter

from zeroband.config.data import ChatSource, DataConfig, DocumentSource, SyntheticTokensSource, TokensSource
from zeroband.data.block_cache import CACHED, BlockCache, keep
from zeroband.data.chat import BEGINS, LEARNED, ChatEncoder, Marks, pack
from zeroband.data.fetching import FetchedTokens
from zeroband.data.listing import tell_left_out
from zeroband.data.packing import fill_bins
from zeroband.data.pieces import BadRow, BadRows, Document, OnBad, refuse, usable
from zeroband.data.shard_set import ids_dtype
from zeroband.data.sources import conversations, documents, source_identity
from zeroband.data.stored_tokens import LocalTokens, StoredTokens, TokenFiles
from zeroband.data.synthetic_tokens import SyntheticTokens
from zeroband.data.token_files import WholeFile, open_files
from zeroband.data.token_storage import FileInPlace, TokenStorage
from zeroband.data.token_store import TokenStore
from zeroband.data.tokenizer import Ids, Tokenizer, named, tokenizer_of
from zeroband.errors import ConfigError, StorageLost
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


class CachedTokens(TokenStore):
    """A cache entry, mapped: all processes of a machine share its pages.

    That of conversations says where they begin and what is learned of them in marks, a byte for each id.
    """

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
        """Tokens start..stop-1 without a copy, not writable."""
        assert 0 <= start <= stop <= len(self), (start, stop, len(self))
        return self._tokens[start:stop]

    def begins(self, start: int, ids: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.bool_]:
        if self._marks is None:
            return super().begins(start, ids)
        return (self._marks[start : start + len(ids)] & BEGINS) != 0

    def is_learned(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        if self._marks is None:
            return super().is_learned(start, stop)
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
        return open_tokens(config, tokenizer, local_rank=local_rank, local_world_size=local_world_size)
    entry = _entry_of(config, config.source, seed, tokenizer)
    folder = entry.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        store = _open(entry)
        if store is None:
            with _only_one_builds(entry, ids_dtype(tokenizer.vocab_size), on_progress):
                store = _open(entry) or _build(entry, config, config.source, seed, tokenizer, on_progress)
    except OSError as e:
        raise ConfigError(f"data.cache_dir={str(folder)!r} cannot hold the tokenised corpus: {e}") from e
    return store


def is_prepared(config: DataConfig, seed: int) -> bool:
    """Whether this machine has all that `prepare` would build. Raises ConfigError as `prepare` does."""
    if isinstance(config.source, SyntheticTokensSource | TokensSource):
        return True
    return _open(_entry_of(config, config.source, seed, tokenizer_of(config))) is not None


# -- ids that were made before --------------------------------------------------------------------------------------


def open_tokens(
    data: DataConfig, tokenizer: Tokenizer, *, local_rank: int = 0, local_world_size: int = 1
) -> StoredTokens:
    """Open ids that were made before; reads what describes them, and starts no thread. Called by each local rank.

    Raises: ConfigError where they are not there, not what data.source says, or not of data.tokenizer or data.packing;
    StorageLost where their storage does not answer for data.retry_s.
    """
    source, root = data.source, (data.cache_dir or default_cache_dir()) / CACHED
    assert isinstance(source, TokensSource), source
    storage = TokenStorage(source.path, data.retry_s)
    kept_bytes = dict[str, int]()

    def kept(key: str, path: str, size: int) -> WholeFile:
        """A file as a whole, where it lies or in the cache, of whose room it takes its part."""
        if storage.is_local:
            return FileInPlace(storage, path)
        kept_bytes[key] = size
        if sum(kept_bytes.values()) >= data.cache_gb * 1e9:
            raise ConfigError(
                f"data.cache_gb={data.cache_gb:g} has no room for the {sum(kept_bytes.values())} bytes of "
                f"{storage.name(path)} and its like, which are needed whole, and for blocks; raise it"
            )
        return keep(root, key, lambda: storage.whole(path))

    room = max(tokenizer.vocab_size, data.vocab_size or 0)
    try:
        files = open_files(source, storage, kept, tokenizer, vocab_size=room)
    except StorageLost as lost:
        if lost.can_pass:
            raise
        raise ConfigError(f"data.source.path={source.path!r}: {lost}") from lost
    _require_tokenizer(data, source, files, tokenizer)
    _require_packing(data, source, files)
    if storage.is_local:
        return LocalTokens(files, storage)
    room_bytes = data.cache_gb * 1e9 - sum(kept_bytes.values())
    cache = BlockCache(root, _folder_of(files), room_bytes, makes_room=local_rank == 0, ranks=local_world_size)
    return FetchedTokens(files, storage, cache, room_bytes, local_rank=local_rank, local_world_size=local_world_size)


def _folder_of(files: TokenFiles) -> str:
    """Name of the set's folder in the cache: blocks of another size or type are others."""
    identity = f"{files.fingerprint}/{files.dtype.str}/{files.block_tokens}"
    return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()


def _require_tokenizer(data: DataConfig, source: TokensSource, files: TokenFiles, tokenizer: Tokenizer) -> None:
    if files.tokenizer_fingerprint is not None and not tokenizer.gives_ids_of(files.tokenizer_fingerprint):
        here, made_by = named(data.tokenizer, tokenizer.release), named(files.tokenizer or "", files.tokenizer_release)
        raise ConfigError(
            f"data.tokenizer={here} does not give the ids of {source.path!r}, which were made by {made_by}; set "
            "data.tokenizer to it, with the release that made them, or prepare the data again"
        )
    room = max(tokenizer.vocab_size, data.vocab_size or 0)
    if files.vocab_size > room:
        raise ConfigError(
            f"{source.path!r} holds ids below {files.vocab_size}, and there is room for {room}; set data.vocab_size to "
            f"{files.vocab_size}"
        )


def _require_packing(data: DataConfig, source: TokensSource, files: TokenFiles) -> None:
    is_packed = data.packing == "best-fit"
    if files.packed_length is None and is_packed:
        raise ConfigError(
            f"data.packing='best-fit', and the ids of {source.path!r} were not packed; prepare them with "
            f'--pack best-fit --seq-length {data.seq_length}, or set data.packing = "concatenate"'
        )
    if files.packed_length is not None and not (is_packed and files.packed_length == data.seq_length):
        raise ConfigError(
            f"the ids of {source.path!r} were packed for samples of {files.packed_length} tokens, and data.packing="
            f'{data.packing!r} with data.seq_length={data.seq_length}; set data.packing = "best-fit" and '
            f"data.seq_length = {files.packed_length}, or prepare the data again"
        )


# -- ids that are made here, once ------------------------------------------------------------------------------------


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


def _open(entry: Path) -> CachedTokens | None:
    """The entry if it is committed and whole, else None."""
    try:
        manifest = TypeAdapter(TokenManifest).validate_json(entry.with_suffix(".json").read_bytes(), strict=True)
        is_whole = entry.stat().st_size == manifest.tokens * np.dtype(manifest.dtype).itemsize
        if manifest.learned is not None:
            is_whole &= _marks(entry).stat().st_size == manifest.tokens
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return CachedTokens(entry, manifest) if is_whole else None


@contextmanager
def _only_one_builds(entry: Path, dtype: Dtype, on_progress: OnProgress | None) -> Generator[None]:
    """Hold the entry's lock, which the kernel frees when its holder dies; while waiting, show the holder's progress."""
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


@dataclass
class _Counts:
    """What became of the documents of a corpus, so far."""

    documents: int = 0
    empty: int = 0
    padding: int = 0
    cut: int = 0
    bad: BadRows = field(default_factory=BadRows)


_Part = tuple[npt.NDArray[np.uint32], Marks | None]
"""Ids of a corpus in their order, and their marks; None: all are learned."""


def _build(
    entry: Path,
    config: DataConfig,
    source: DocumentSource | ChatSource,
    seed: int,
    tokenizer: Tokenizer,
    on_progress: OnProgress | None,
) -> CachedTokens:
    dtype = ids_dtype(tokenizer.vocab_size)
    counts, tokens, learned = _Counts(), 0, 0
    with ExitStack() as stack:
        ids = stack.enter_context(_Column(_partial(entry), f"{dtype.str}/{tokenizer.vocab_size}/"))
        is_marked = isinstance(source, ChatSource)
        marks = stack.enter_context(_Column(_partial(_marks(entry)), "marks/")) if is_marked else None
        for values, their_marks in _corpus(config, source, seed, tokenizer, counts):
            ids.append(values.astype(dtype))
            if marks is not None and their_marks is not None:
                marks.append(their_marks)
                learned += int(np.count_nonzero(their_marks & LEARNED))
            tokens += len(values)
            if on_progress is not None:
                on_progress(tokens)
    if not tokens:
        raise ConfigError(f"data.source: no text to train on ({counts.empty} documents, all of them empty{counts.bad})")
    if marks is not None:
        ids.digest.update(marks.digest.digest())
        _partial(_marks(entry)).replace(_marks(entry))
    manifest = TokenManifest(
        format=_FORMAT,
        dtype=dtype.str,
        tokens=tokens,
        documents=counts.documents,
        empty_documents=counts.empty,
        vocab_size=tokenizer.vocab_size,
        end_of_document=tokenizer.end_of_document,
        fingerprint=ids.digest.hexdigest(),
        learned=None if marks is None else learned,
        padding=counts.padding,
        cut_documents=counts.cut,
        bad_rows=counts.bad.count,
        packed_length=None if marks is not None else _packed_length(config),
    )
    _commit(entry, manifest)
    if counts.cut:
        fields = {"cut": counts.cut, "of": counts.documents}
        _log.warning("conversations that are longer than data.seq_length are cut", extra={"fields": fields})
    tell_left_out("rows that cannot be used", counts.bad.count, counts.bad.first)
    return CachedTokens(entry, manifest)


def _commit(entry: Path, manifest: TokenManifest) -> None:
    """Give the finished ids their name, then the manifest its own: that second rename makes the entry exist."""
    _partial(entry).replace(entry)
    draft = entry.with_suffix(".json.part")
    with draft.open("w") as out:
        json.dump(asdict(manifest), out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    draft.replace(entry.with_suffix(".json"))


def _corpus(
    config: DataConfig, source: DocumentSource | ChatSource, seed: int, tokenizer: Tokenizer, counts: _Counts
) -> Iterator[_Part]:
    on_bad = counts.bad if config.skip_bad_rows else refuse
    if isinstance(source, ChatSource):
        return _chats(config, source, tokenizer, counts, on_bad)
    texts = _texts(documents(source, seed, config.retry_s, on_bad), tokenizer, counts, on_bad)
    packed_length = _packed_length(config)
    whole = texts if packed_length is None else _packed(texts, packed_length, tokenizer.end_of_document, counts)
    return ((ids, None) for ids in whole)


def _packed_length(config: DataConfig) -> int | None:
    return config.seq_length if config.packing == "best-fit" else None


def _texts(corpus: Iterable[Document], tokenizer: Tokenizer, counts: _Counts, on_bad: OnBad) -> Iterator[Ids]:
    end = np.array([tokenizer.end_of_document], dtype=np.uint32)
    for chunk in in_chunks(corpus, lambda document: document.size):
        encoded = encode_documents(tokenizer, [document for document in chunk if document.text], on_bad)
        full = [ids for ids in encoded if ids is not None and len(ids)]
        counts.documents += len(full)
        counts.empty += len(chunk) - len(full) - sum(ids is None for ids in encoded)
        yield np.concatenate([part for one in full for part in (one, end)]) if full else np.empty(0, dtype=np.uint32)


def _packed(texts: Iterable[Ids], size: int, end: int, counts: _Counts) -> Iterator[Ids]:
    """Documents packed into samples of `size` ids; many at a time, so that they fit well."""
    for group in in_chunks(texts, len, most=_PACKED_TOKENS):
        ids = np.concatenate(group)
        lengths = np.diff(np.flatnonzero(ids == end) + 1, prepend=0).tolist()
        bins = [part for parts in fill_bins(ids, lengths, size, end) for part in parts]
        packed = np.concatenate(bins) if bins else ids
        counts.padding += len(packed) - len(ids)
        yield packed


def _chats(
    config: DataConfig, source: ChatSource, tokenizer: Tokenizer, counts: _Counts, on_bad: OnBad
) -> Iterator[_Part]:
    encoder = ChatEncoder(tokenizer)
    read = conversations(source, config.retry_s, on_bad)
    written = (chats for one in read for chats in usable(functools.partial(encoder.encode, one), on_bad))
    chats = itertools.chain.from_iterable(written)
    packed = pack(chats, config.seq_length, tokenizer.end_of_document)
    while some := list(itertools.islice(packed, _CHUNK_DOCUMENTS)):
        ids, marks = (np.concatenate(parts) for parts in zip(*some, strict=True))
        said = [chat for chat in some if (chat.marks & LEARNED).any()]
        counts.documents += len(said)
        counts.padding += len(ids) - sum(len(chat.ids) for chat in said)
        counts.cut += sum(len(chat.ids) > config.seq_length + 1 for chat in said)
        yield ids, marks
    if encoder.without_thoughts:
        fields = {"count": len(encoder.without_thoughts), "first": encoder.without_thoughts[0]}
        _log.warning("the chat template leaves out what the assistant thought", extra={"fields": fields})


def in_chunks(corpus: Iterable[_T], size_of: Callable[[_T], int], *, most: int | None = None) -> Iterator[list[_T]]:
    """Documents in groups large enough for a call of the tokenizer and small enough for the memory.

    most: size of a group, from which on it is full; None: that of text for a tokenizer.
    """
    chunk: list[_T] = []
    size = 0
    for document in corpus:
        chunk.append(document)
        size += size_of(document)
        if size >= (most or _CHUNK_CHARACTERS) or (most is None and len(chunk) >= _CHUNK_DOCUMENTS):
            yield chunk
            chunk, size = [], 0
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
