"""`zeroband data inspect OUT`: what prepared ids are, samples of them as text, and whether they are whole.

OUT is a folder that `zeroband data prepare` wrote: a path or a URL.
Exit codes: 0 all is well; 2 there is no such set, or it cannot be read; 3 with --verify: files are missing or damaged.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

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
from zeroband.data.tokenizer import Tokenizer, named, open_tokenizer
from zeroband.errors import ConfigError
from zeroband.observe.status import human_bytes
from zeroband.tools.arguments import parser_of
from zeroband.tools.data.folder import Folder, open_out

_EXIT_DAMAGED = 3
_BLOCKS_AT_ONCE = 64
_WINDOW = 4096
_SAMPLE_TOKENS = 200
_READERS = 16


def main(argv: Sequence[str]) -> int:
    """Print what a set is. Returns the exit code."""
    parser = parser_of("data inspect", __doc__)
    parser.add_argument("out", metavar="OUT", help="folder of prepared ids")
    parser.add_argument("--samples", type=int, default=3, metavar="N", help="beginnings of N documents (default: 3)")
    parser.add_argument("--tokenizer", metavar="T", help="where the tokenizer lies now, to write samples as text")
    parser.add_argument("--verify", action="store_true", help="read everything, and compare it with its hashes")
    options = parser.parse_args(argv)
    files = _Files(options.out)
    found = files.manifest()
    _describe(found)
    if options.samples:
        _show_samples(files, found, options.samples, options.tokenizer or found.tokenizer)
    if not options.verify:
        return 0
    broken = list(files.broken(found))
    for name in broken:
        print(f"damaged    {name}")
    print(f"verified   {len(found.shards) + 1 - len(broken)} of {len(found.shards) + 1} files are whole")
    return _EXIT_DAMAGED if broken else 0


class _Files:
    """The files of a set, read in ranges. Raises ConfigError naming the one that cannot be read."""

    def __init__(self, out: str) -> None:
        self._storage = open_out(out)
        self._out = out

    def manifest(self) -> ShardSet:
        """What the set is. Raises ConfigError where there is none, or half of one."""
        try:
            found = Folder(self._storage).manifest()
        except OSError as error:
            raise ConfigError(f"cannot read {self._out}: {error}") from error
        if found is None:
            raise ConfigError(
                f"{self._out} holds no finished set: it has no {MANIFEST}; give the folder that zeroband data prepare "
                "wrote, after it has come to its end"
            )
        return found

    def ids(self, shard: Shard, dtype: str, start: int, stop: int) -> npt.NDArray[np.unsignedinteger]:
        """The ids start..stop-1 of a shard; fewer where its file ends before."""
        size = np.dtype(dtype).itemsize
        content = self._read(shard.name, NPY_HEADER_BYTES + start * size, NPY_HEADER_BYTES + stop * size)
        return np.frombuffer(content[: len(content) // size * size], dtype=dtype)

    def _read(self, name: str, start: int, stop: int) -> bytes:
        try:
            return self._storage.read_range(name, start, stop)
        except OSError as error:
            raise ConfigError(f"cannot read {self._out}/{name}: {error}") from error

    def broken(self, found: ShardSet) -> Iterator[str]:
        """Names of files that are missing, or are not what the hashes say. Reads all of them, several at a time."""
        hashes = self._hashes(found)
        if hashes is None:
            yield HASHES
        first = 0
        spans: list[npt.NDArray[np.uint64] | None] = []
        for shard in found.shards:
            blocks = blocks_of(shard.tokens, found.block_tokens)
            spans.append(None if hashes is None else hashes[first : first + blocks])
            first += blocks
        with ThreadPoolExecutor(_READERS, thread_name_prefix="reading") as threads:
            whole = threads.map(self._is_whole, itertools.repeat(found), found.shards, spans)
            yield from (shard.name for shard, is_whole in zip(found.shards, whole, strict=True) if not is_whole)

    def _hashes(self, found: ShardSet) -> npt.NDArray[np.uint64] | None:
        """The hashes of all blocks; None where their file is not what the manifest says."""
        try:
            content = self._read(HASHES, 0, NPY_HEADER_BYTES + 8 * found.n_blocks + 1)
        except ConfigError:
            return None
        if content[:NPY_HEADER_BYTES] != npy_header(found.n_blocks, np.dtype("<u8")):
            return None
        if len(content) != NPY_HEADER_BYTES + 8 * found.n_blocks:
            return None
        hashes = np.frombuffer(content[NPY_HEADER_BYTES:], dtype="<u8")
        return hashes if hashes_digest(hashes) == found.hashes else None

    def _is_whole(self, found: ShardSet, shard: Shard, hashes: npt.NDArray[np.uint64] | None) -> bool:
        """Whether a shard is what its hashes say; without them, whether it is there and as long as it should be."""
        dtype = np.dtype(found.dtype)
        try:
            size = NPY_HEADER_BYTES + shard.tokens * dtype.itemsize
            if self._read(shard.name, 0, NPY_HEADER_BYTES) != npy_header(shard.tokens, dtype):
                return False
            if len(self._read(shard.name, size - 1, size + 1)) != 1:
                return False
            step = _BLOCKS_AT_ONCE * found.block_tokens
            for start in range(0, shard.tokens if hashes is not None else 0, step):
                ids = self.ids(shard, found.dtype, start, min(start + step, shard.tokens))
                block = start // found.block_tokens
                seen = block_hashes(ids, found.block_tokens)
                if hashes is None or not np.array_equal(seen, hashes[block : block + len(seen)]):
                    return False
        except ConfigError:
            return False
        return True


def _describe(found: ShardSet) -> None:
    size = np.dtype(found.dtype).itemsize
    kept = found.tokens - found.padding
    packed = "concatenated" if found.packed_length is None else f"packed best-fit into {found.packed_length} tokens"
    print(f"sources    {' '.join(found.sources)}")
    print(f"tokens     {found.tokens} of {found.documents} documents, {kept / found.documents:.1f} each, {packed}")
    print(f"padding    {found.padding / found.tokens:.2%}")
    print(
        f"left out   {found.empty_documents} empty, {found.duplicate_documents} duplicates, "
        f"{found.filtered_documents} for their length"
    )
    print(f"shards     {len(found.shards)}, {human_bytes(found.tokens * size)} of {np.dtype(found.dtype).name}")
    print(f"tokenizer  {found.tokenizer}: {found.vocab_size} ids, {found.end_of_document} ends a document")
    print(f"set        {found.fingerprint}")


def _show_samples(files: _Files, found: ShardSet, samples: int, name: str) -> None:
    """Print the beginnings of some documents, the same ones each time."""
    tokenizer = _tokenizer_of(found, name)
    choose = random.Random(found.fingerprint)
    for _ in range(samples):
        (shard,) = choose.choices(found.shards, weights=[shard.tokens for shard in found.shards])
        start = choose.randrange(shard.tokens)
        ids = files.ids(shard, found.dtype, start, min(start + _WINDOW, shard.tokens))
        ends = np.flatnonzero(ids[:-1] == found.end_of_document)
        begin = int(ends[0]) + 1 if len(ends) else 0
        ends = np.flatnonzero(ids[begin:] == found.end_of_document)
        stop = min(begin + (int(ends[0]) if len(ends) else len(ids)), begin + _SAMPLE_TOKENS)
        shown = ids[begin:stop].tolist()
        text = " ".join(map(str, shown)) if tokenizer is None else tokenizer.decode(shown)
        print(f"\n--- {shard.name}, token {start + begin}\n{text}")
    print()


def _tokenizer_of(found: ShardSet, name: str) -> Tokenizer | None:
    """The tokenizer that made a set; None, and a word about it, where it is not there."""
    try:
        tokenizer = open_tokenizer(name)
    except ConfigError as error:
        print(f"samples are ids: {error}; give --tokenizer", file=sys.stderr)
        return None
    if not tokenizer.gives_ids_of(found.tokenizer_fingerprint):
        made_by, here = named(found.tokenizer, found.tokenizer_release), named(name, tokenizer.release)
        print(
            f"samples are ids: {here} gives others than {made_by}, which made them; give --tokenizer", file=sys.stderr
        )
        return None
    return tokenizer
