"""`zeroband data inspect OUT`: describe prepared ids, print samples of their text, and verify them.

OUT is a folder written by `zeroband data prepare`: a path or a URL.
Exit codes: 0 ok; 2 no such set, or it cannot be read; 3 with --verify: files are missing or damaged.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from zeroband.data.shard_set import (
    HASHES,
    MANIFEST,
    NPY_HEADER_BYTES,
    Shard,
    ShardSet,
    block_hashes,
    blocks_of,
    hashes_digest,
    npy_header,
)
from zeroband.data.token_storage import TokenStorage
from zeroband.data.tokenizer import Tokenizer, described, open_tokenizer
from zeroband.errors import ConfigError, StorageLost
from zeroband.observe.status import human_bytes
from zeroband.tools.arguments import parser_of
from zeroband.tools.data.folder import Folder, open_out

_EXIT_DAMAGED = 3
_BLOCKS_AT_ONCE = 64
_WINDOW = 4096
_SAMPLE_TOKENS = 200
_READERS = 16


def main(argv: Sequence[str]) -> int:
    """Describe a set. Returns the exit code."""
    parser = parser_of("data inspect", __doc__)
    parser.add_argument("out", metavar="OUT", help="folder of prepared ids")
    parser.add_argument(
        "--samples", type=int, default=3, metavar="N", help="show N beginnings of documents (default: 3)"
    )
    parser.add_argument("--tokenizer", metavar="T", help="the tokenizer's current location, to show samples as text")
    parser.add_argument("--verify", action="store_true", help="read everything and compare it with its hashes")
    options = parser.parse_args(argv)
    found, storage = _manifest(options.out), TokenStorage(options.out, 0.0)
    _describe(found)
    if options.samples:
        _show_samples(storage, found, options.samples, options.tokenizer or found.tokenizer)
    if not options.verify:
        return 0
    broken = list(_broken(storage, found))
    for name in broken:
        print(f"damaged    {name}")
    print(f"verified   {len(found.shards) + 1 - len(broken)} of {len(found.shards) + 1} files are whole")
    return _EXIT_DAMAGED if broken else 0


def _manifest(out: str) -> ShardSet:
    """Read the manifest. Raises ConfigError if there is no complete set."""
    try:
        found = Folder(open_out(out)).manifest()
    except OSError as error:
        raise ConfigError(f"cannot read {out}: {error}") from error
    if found is None:
        raise ConfigError(
            f"{out} holds no finished set: it has no {MANIFEST}; give the folder of a finished zeroband data prepare"
        )
    return found


def _broken(storage: TokenStorage, found: ShardSet) -> Iterator[str]:
    """Yield the names of missing or damaged files. Reads all of them, several at a time."""
    hashes = _values(storage, HASHES, found.n_blocks, np.dtype("<u8"))
    if hashes is None or hashes_digest(hashes) != found.hashes:
        yield HASHES
        hashes = None
    counts = [blocks_of(shard.tokens, found.block_tokens) for shard in found.shards]
    firsts = np.cumsum([0, *counts])[:-1].tolist()
    with ThreadPoolExecutor(_READERS, thread_name_prefix="reading") as threads:
        whole = threads.map(partial(_is_whole, storage, found, hashes), found.shards, firsts)
        yield from (shard.name for shard, is_whole in zip(found.shards, whole, strict=True) if not is_whole)


def _is_whole(
    storage: TokenStorage, found: ShardSet, hashes: npt.NDArray[np.uint64] | None, shard: Shard, first: int
) -> bool:
    """Return whether a shard matches its hashes, from the `first` on; without hashes, only check its length."""
    dtype, step = np.dtype(found.dtype), _BLOCKS_AT_ONCE * found.block_tokens
    if hashes is None:
        return _values(storage, shard.name, shard.tokens, dtype, stop=0) is not None
    for start in range(0, shard.tokens, step):
        ids = _values(storage, shard.name, shard.tokens, dtype, start, min(start + step, shard.tokens))
        block = first + start // found.block_tokens
        if ids is None:
            return False
        seen = block_hashes(ids, found.block_tokens)
        if not np.array_equal(seen, hashes[block : block + len(seen)]):
            return False
    return True


def _values(
    storage: TokenStorage, name: str, count: int, dtype: np.dtype[Any], start: int = 0, stop: int | None = None
) -> npt.NDArray[Any] | None:
    """Return the values start..stop-1 of a `.npy` file of `count` values; None if it is missing or damaged."""
    path, stop = f"{storage.root.rstrip('/')}/{name}", count if stop is None else stop
    try:
        if start == 0:
            is_right = storage.size(path) == NPY_HEADER_BYTES + count * dtype.itemsize
            if not is_right or storage.read(path, 0, NPY_HEADER_BYTES) != npy_header(count, dtype):
                return None
        first = NPY_HEADER_BYTES + start * dtype.itemsize
        return np.frombuffer(storage.read(path, first, first + (stop - start) * dtype.itemsize), dtype=dtype)
    except StorageLost:
        return None


def _describe(found: ShardSet) -> None:
    size = np.dtype(found.dtype).itemsize
    kept = found.tokens - found.padding
    packed = "concatenated" if found.packed_length is None else f"packed best-fit into {found.packed_length} tokens"
    print(f"sources    {' '.join(found.sources)}")
    print(f"tokens     {found.tokens}, documents {found.documents}, {kept / found.documents:.1f} each, {packed}")
    print(f"padding    {found.padding / found.tokens:.2%}")
    print(
        f"dropped    {found.empty_documents} empty, {found.duplicate_documents} duplicates, "
        f"{found.filtered_documents} for their length"
    )
    print(f"shards     {len(found.shards)}, {human_bytes(found.tokens * size)} of {np.dtype(found.dtype).name}")
    print(f"tokenizer  {found.tokenizer}: {found.vocab_size} ids, {found.end_of_document} ends a document")
    print(f"set        {found.fingerprint}")


def _show_samples(storage: TokenStorage, found: ShardSet, samples: int, name: str) -> None:
    """Print the beginnings of some documents, always the same ones."""
    tokenizer = _tokenizer_of(found, name)
    choose = random.Random(found.fingerprint)
    for _ in range(samples):
        (shard,) = choose.choices(found.shards, weights=[shard.tokens for shard in found.shards])
        start = choose.randrange(shard.tokens)
        stop = min(start + _WINDOW, shard.tokens)
        ids = _values(storage, shard.name, shard.tokens, np.dtype(found.dtype), start, stop)
        if ids is None:
            raise ConfigError(f"cannot read {storage.root}/{shard.name}: missing or truncated; try --verify")
        ends = np.flatnonzero(ids[:-1] == found.end_of_document)
        begin = int(ends[0]) + 1 if len(ends) else 0
        ends = np.flatnonzero(ids[begin:] == found.end_of_document)
        stop = min(begin + (int(ends[0]) if len(ends) else len(ids)), begin + _SAMPLE_TOKENS)
        shown = ids[begin:stop].tolist()
        text = " ".join(map(str, shown)) if tokenizer is None else tokenizer.decode(shown)
        print(f"\n--- {shard.name}, token {start + begin}\n{text}")
    print()


def _tokenizer_of(found: ShardSet, name: str) -> Tokenizer | None:
    """Open the tokenizer that made a set; print why and return None if it is unavailable."""
    try:
        tokenizer = open_tokenizer(name)
    except ConfigError as error:
        print(f"showing samples as ids: {error}; give --tokenizer", file=sys.stderr)
        return None
    if not tokenizer.matches(found.tokenizer_fingerprint):
        made_by, here = described(found.tokenizer, found.tokenizer_release), described(name, tokenizer.release)
        print(
            f"showing samples as ids: {here} differs from {made_by}, which made them; give --tokenizer", file=sys.stderr
        )
        return None
    return tokenizer
