"""Tiny sets of ids, written by hand from the layout's description, and a server for them that fails as it is told."""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zeroband.config.data import DataConfig, TokensSource
from zeroband.data.packing import fill_bins
from zeroband.data.shard_set import (
    BLOCK_TOKENS,
    HASHES,
    MANIFEST,
    NPY_HEADER_BYTES,
    Shard,
    ShardSet,
    block_hashes,
    hashes_digest,
)
from zeroband.data.stored_tokens import StoredTokens
from zeroband.data.token_files import open_tokens
from zeroband.data.tokenizer import ByteTokenizer

END = ByteTokenizer.end_of_document
BLOCK = 64
"""Ids in a block of these sets."""

Ids = npt.NDArray[np.unsignedinteger]


def drawn_ids(tokens: int, seed: int = 0, dtype: str = "<u2") -> Ids:
    """Documents of bytes, with their ends."""
    ids = np.random.default_rng(seed).integers(0, END, tokens).astype(dtype)
    ids[9::10] = END
    return ids


def write_set(folder: Path, shards: Sequence[Ids], *, block_tokens: int = BLOCK, **changed: Any) -> ShardSet:
    folder.mkdir(parents=True, exist_ok=True)
    hashes = np.concatenate([block_hashes(ids, block_tokens) for ids in shards])
    np.save(folder / HASHES, hashes)
    for number, ids in enumerate(shards):
        np.save(folder / f"part-{number}.npy", ids)
    told: dict[str, Any] = {
        "format": 1,
        "dtype": shards[0].dtype.str,
        "block_tokens": block_tokens,
        "tokens": sum(map(len, shards)),
        "documents": len(shards),
        "empty_documents": 0,
        "filtered_documents": 0,
        "duplicate_documents": 0,
        "vocab_size": ByteTokenizer.vocab_size,
        "end_of_document": END,
        "tokenizer": "byte",
        "tokenizer_fingerprint": ByteTokenizer.fingerprint,
        "packed_length": None,
        "padding": 0,
        "sources": ("made up",),
        "hashes": hashes_digest(hashes),
        "shards": tuple(Shard(f"part-{number}.npy", len(ids), 1) for number, ids in enumerate(shards)),
    }
    made = ShardSet(**told | changed)
    (folder / MANIFEST).write_bytes(made.to_json())
    return made


def write_packed_set(folder: Path, documents: int, size: int, *, seed: int = 0, block_tokens: int = 1024) -> Ids:
    """Documents of one token to more than `size` of them, packed for samples of so many; the ids."""
    lengths = np.random.default_rng(seed).geometric(2 / size, documents) + 1
    texts = drawn_ids(int(lengths.sum()), seed)
    texts[texts == END] = 0
    texts[np.cumsum(lengths) - 1] = END
    bins = fill_bins(texts, lengths.tolist(), size, END)
    ids = np.concatenate([part for parts in bins for part in parts])
    padding = len(ids) - len(texts)
    write_set(folder, [ids], block_tokens=block_tokens, packed_length=size, padding=padding)
    return ids


def write_sparse_set(folder: Path, tokens: int) -> Path:
    """Zeros in a file that takes no room, in the blocks of real sets, which all have one hash."""
    zeros = np.zeros(BLOCK_TOKENS, dtype="<u2")
    made = write_set(folder, [zeros], block_tokens=BLOCK_TOKENS)
    hashes = np.repeat(block_hashes(zeros, BLOCK_TOKENS), tokens // BLOCK_TOKENS)
    np.save(folder / HASHES, hashes)
    (shard,) = made.shards
    whole = replace(made, tokens=tokens, hashes=hashes_digest(hashes), shards=(replace(shard, tokens=tokens),))
    (folder / MANIFEST).write_bytes(whole.to_json())
    os.truncate(folder / shard.name, NPY_HEADER_BYTES + 2 * tokens)
    return folder


def config_of(path: object, cache: Path, **changed: Any) -> DataConfig:
    """The [data] section that reads a set; `format` and `dtype` are of its source."""
    of_source = {key: changed.pop(key) for key in ("format", "dtype") if key in changed}
    source = TokensSource(type="tokens", path=str(path), **of_source)
    return DataConfig(**{"source": source, "cache_dir": cache, "retry_s": 20.0, "seq_length": 16} | changed)


def opened(config: DataConfig, **ranks: int) -> StoredTokens:
    return open_tokens(config, ByteTokenizer(), **ranks)


@contextmanager
def stored(config: DataConfig, **ranks: int) -> Iterator[StoredTokens]:
    store = opened(config, **ranks)
    try:
        yield store
    finally:
        store.close()


def spans_of(tokens: int, length: int = 17) -> list[tuple[int, int]]:
    """All of a corpus, in an order that leaps."""
    spans = [(start, min(start + length, tokens)) for start in range(0, tokens, length)]
    return [spans[place] for place in np.random.default_rng(1).permutation(len(spans))]


def fetched_blocks(cache: Path) -> list[Path]:
    """The blocks of ids in a cache folder."""
    return sorted(path for path in cache.glob("blocks/*/*/*") if path.suffix == "" == path.parent.parent.suffix)


Fault = Callable[["FilesHandler"], bool]
"""Answers a request in its own way, or says that it did not."""


class FilesHandler(BaseHTTPRequestHandler):
    """Gives files of a folder, as the server that owns it says."""

    protocol_version = "HTTP/1.1"
    server: FileServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(is_asked_for=False)

    def do_GET(self) -> None:
        self._answer(is_asked_for=True)

    def asked_range(self) -> str:
        return self.headers.get("Range", "")

    def refuse(self, status: int, **headers: str) -> bool:
        """Answer with a status and nothing else."""
        self.send_response(status)
        for name, value in {**headers, "Content-Length": "0"}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        return True

    def send(self, content: bytes, status: int, *, cut: bool = False) -> bool:
        """Answer with content; `cut`: hang up half-way."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self.close_connection = True
        return True

    def content(self) -> tuple[bytes, int]:
        """What is asked for, and the status that goes with it."""
        whole = (self.server.folder / self.path.lstrip("/")).read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.asked_range())
        if asked is None or not self.server.knows_ranges:
            return whole, 200
        return whole[int(asked[1]) : int(asked[2]) + 1], 206

    def _answer(self, *, is_asked_for: bool) -> None:
        with self.server.lock:
            self.server.asked[f"{self.path} {self.asked_range()}"] += is_asked_for
        if not (self.server.folder / self.path.lstrip("/")).is_file():
            self.refuse(404)
        elif not is_asked_for:
            size = (self.server.folder / self.path.lstrip("/")).stat().st_size
            self.send_response(200)
            self.send_header("Content-Length", str(size))
            self.end_headers()
        elif not self.server.fault(self):
            self.send(*self.content())


class FileServer(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), FilesHandler)
        self.folder = folder
        self.knows_ranges = True
        self.fault: Fault = lambda _: False
        self.asked = Counter[str]()
        """Requests for content, by path and range."""
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that hang up."""


@contextmanager
def served(folder: Path) -> Iterator[FileServer]:
    server = FileServer(folder)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10.0)


def read_all(store: StoredTokens, spans: Sequence[tuple[int, int]]) -> Mapping[tuple[int, int], Ids]:
    return {span: store.read(*span) for span in spans}
