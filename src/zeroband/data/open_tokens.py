"""Opens token ids that were made before, where they lie: checks that they are what [data] asks for."""

from __future__ import annotations

import hashlib
from pathlib import Path

from zeroband.config.data import DataConfig, TokensSource
from zeroband.data.block_cache import CACHED, BlockCache, keep
from zeroband.data.fetching import FetchedTokens
from zeroband.data.stored_tokens import LocalTokens, StoredTokens
from zeroband.data.token_files import TokenFiles, open_files
from zeroband.data.token_storage import FileInPlace, TokenStorage, WholeFile, open_storage
from zeroband.data.tokenizer import Tokenizer, named
from zeroband.errors import ConfigError, StorageLost


def open_tokens(
    data: DataConfig,
    source: TokensSource,
    tokenizer: Tokenizer,
    *,
    cache_dir: Path,
    local_rank: int = 0,
    local_world_size: int = 1,
) -> StoredTokens:
    """Open ids that were made before; reads what describes them, and starts no thread. Called by each local rank.

    Raises: ConfigError where they are not there, not what data.source says, or not of data.tokenizer or data.packing;
    StorageLost where their storage does not answer for data.retry_s.
    """
    storage = open_storage(source.path, data.retry_s)
    keeping = _Keeping(data, storage, cache_dir / CACHED)
    room = max(tokenizer.vocab_size, data.vocab_size or 0)
    try:
        files = open_files(source, storage, keeping.keep, tokenizer, vocab_size=room)
    except StorageLost as lost:
        if lost.can_pass:
            raise
        raise ConfigError(f"data.source.path={source.path!r}: {lost}") from lost
    _require_tokenizer(data, source, files, tokenizer)
    _require_packing(data, source, files)
    if storage.is_local:
        return LocalTokens(files, storage)
    room_bytes = keeping.room_bytes
    _require_room(data, storage, files, room_bytes)
    cache = BlockCache(keeping.root, _folder_of(files), room_bytes, makes_room=local_rank == 0, ranks=local_world_size)
    ranks = {"local_rank": local_rank, "local_world_size": local_world_size}
    return FetchedTokens(files, storage, cache, room_bytes, **ranks)


class _Keeping:
    """Has files whole: where they lie, or in the cache, of whose room they take their part."""

    def __init__(self, data: DataConfig, storage: TokenStorage, root: Path) -> None:
        self.root = root
        self._data, self._storage = data, storage
        self._sizes: dict[str, int] = {}

    @property
    def room_bytes(self) -> float:
        """What is left of data.cache_gb."""
        return self._data.cache_gb * 1e9 - sum(self._sizes.values())

    def keep(self, key: str, path: str, size: int) -> WholeFile:
        """Raises: ConfigError where the cache has no room for it, StorageLost as the storage does."""
        if self._storage.is_local:
            return FileInPlace(self._storage, path)
        self._sizes[key] = size
        if self.room_bytes <= 0:
            raise ConfigError(
                f"data.cache_gb={self._data.cache_gb:g} has no room for the {sum(self._sizes.values())} bytes of "
                f"{self._storage.name(path)} and its like, which are needed whole, and blocks beside them; raise it"
            )
        return keep(self.root, key, lambda: self._storage.whole(path))


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


def _require_room(data: DataConfig, storage: TokenStorage, files: TokenFiles, room_bytes: float) -> None:
    largest = max(file.tokens for file in files.files) * files.dtype.itemsize
    if not storage.sends_ranges and largest > room_bytes / 2:
        raise ConfigError(
            f"the server of {storage.root} sends whole files only, up to {largest} bytes, and data.cache_gb="
            f"{data.cache_gb:g} has no room for two of them; raise it, or choose a server that knows byte ranges"
        )
