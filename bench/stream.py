"""Tokens a second of prepared ids: from a disk beside numpy's memmap, from a server beside a plain download.

    python bench/stream.py [local] [links] [--repeats 5] [--seconds 8] [--rates 4 16]

local: micro-batches of 64 samples of 1,024 ids from the trainer's loader, with and without borders of documents, and
from a loop over a memmap of the same file as nanoGPT has it, at random places, which verifies nothing, knows no
borders and has no thread.
links: a server in a process of its own, on loopback, that sends so many MB/s over all of its connections together. The
loader has all of the set fetched, verified and cached, and makes every batch of it; beside it the loop over a memmap,
which can begin when one GET has brought the file. In turns, after one of each to warm up.
"""

from __future__ import annotations

import argparse
import http.client
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from evidence import count, require, require_known

from zeroband.config.data import DataConfig, TokensSource
from zeroband.data.dataset import open_dataset
from zeroband.data.loader import Loader
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
from zeroband.data.tokenizer import ByteTokenizer

MEASUREMENTS = ("local", "links")
LENGTH, MICRO, BATCH, GROUP = 1024, 64, 512, 256
LOCAL_TOKENS = 64 << 20
PIECE = 16 << 10
BURST_S = 0.05
"""What a sleep of the server that was too long may be made up for."""


def write_set(folder: Path, tokens: int) -> None:
    folder.mkdir()
    ids = np.random.default_rng(0).integers(0, 257, tokens).astype("<u2")
    hashes = block_hashes(ids, BLOCK_TOKENS)
    np.save(folder / "ids.npy", ids)
    np.save(folder / HASHES, hashes)
    told = ShardSet(
        format=1,
        dtype="<u2",
        block_tokens=BLOCK_TOKENS,
        tokens=tokens,
        documents=1,
        empty_documents=0,
        filtered_documents=0,
        duplicate_documents=0,
        vocab_size=ByteTokenizer.vocab_size,
        end_of_document=ByteTokenizer.end_of_document,
        tokenizer="byte",
        tokenizer_fingerprint=ByteTokenizer.fingerprint,
        packed_length=None,
        padding=0,
        sources=("random ids",),
        hashes=hashes_digest(hashes),
        shards=(Shard("ids.npy", tokens, 1),),
    )
    (folder / MANIFEST).write_bytes(told.to_json())


def data_of(path: str, cache: Path, *, document_mask: bool = True) -> DataConfig:
    source = TokensSource(type="tokens", path=path)
    return DataConfig(
        source=source, cache_dir=cache, seq_length=LENGTH, hold_out=0, shuffle_blocks=GROUP, document_mask=document_mask
    )


class Pass(NamedTuple):
    """One pass over a set."""

    first_s: float
    """Until the first batch was there."""
    whole_s: float
    fetched_bytes: int = 0


def read_all(data: DataConfig) -> Pass:
    """Have the loader open a set and make all of its batches."""
    from_s = time.perf_counter()
    dataset = open_dataset(data, 0)
    loader = Loader(
        dataset, batch_size=BATCH, micro_bs=MICRO, local_rank=0, local_world_size=1, document_mask=data.document_mask
    )
    steps = dataset.sources[0].index.n_train // BATCH
    require(steps > 0, "the set is shorter than a batch")
    loader.assign([(0, steps * BATCH)])
    loader.next_step()
    first_s = time.perf_counter() - from_s
    for _ in range(steps - 1):
        loader.next_step()
    took = Pass(first_s, time.perf_counter() - from_s, dataset.sources[0].store.fetched_bytes)
    loader.close()
    return took


def read_map(path: Path) -> float:
    """Seconds in which as many batches are made from a memmap at random places."""
    from_s = time.perf_counter()
    ids, draw = np.memmap(path, "<u2", "r", NPY_HEADER_BYTES), np.random.default_rng(1)
    for _ in range(len(ids) // (LENGTH * MICRO)):
        places = draw.integers(0, len(ids) - LENGTH - 1, MICRO)
        torch.stack([torch.from_numpy(ids[start : start + LENGTH].astype(np.int64)) for start in places])
        torch.stack([torch.from_numpy(ids[start + 1 : start + 1 + LENGTH].astype(np.int64)) for start in places])
    return time.perf_counter() - from_s


def local(folder: Path, repeats: int) -> None:
    place = folder / "local"
    write_set(place, LOCAL_TOKENS)
    plain, masked = (data_of(str(place), folder, document_mask=mask) for mask in (False, True))
    ways: dict[str, Callable[[], float]] = {
        "numpy memmap": lambda: read_map(place / "ids.npy"),
        "loader": lambda: read_all(plain).whole_s,
        "loader, with borders of documents": lambda: read_all(masked).whole_s,
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, way in ways.items():
            took_s = way()
            if turn:
                taken[name].append(took_s)
    plain_s, best_s = statistics.median(taken["numpy memmap"]), min(taken["numpy memmap"])
    print(f"\n{LOCAL_TOKENS / 1e6:.0f} M ids, {MICRO} x {LENGTH} a micro-batch\n")
    print("| local disk, page cache | M tokens/s, median | ratio of medians | of bests |\n|---|---|---|---|")
    for name, times in taken.items():
        middle_s = statistics.median(times)
        ratios = f"{plain_s / middle_s:.3f} | {best_s / min(times):.3f}"
        print(f"| {name} | {LOCAL_TOKENS / middle_s / 1e6:,.0f} | {ratios} |")


class Limited(BaseHTTPRequestHandler):
    """Files by range, at the rate that all connections share."""

    protocol_version = "HTTP/1.1"
    server: RateServer  # pyright: ignore[reportIncompatibleVariableOverride] - the only server that makes it

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str((self.server.folder / self.path.lstrip("/")).stat().st_size))
        self.end_headers()

    def do_GET(self) -> None:
        path = self.server.folder / self.path.lstrip("/")
        if not path.is_file():
            self.send_error(404)
            return
        size = path.stat().st_size
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, stop = (int(asked[1]), min(int(asked[2]) + 1, size)) if asked else (0, size)
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        with path.open("rb") as file:
            file.seek(start)
            while start < stop:
                piece = file.read(min(PIECE, stop - start))
                self.server.wait_for(len(piece))
                self.wfile.write(piece)
                start += len(piece)


class RateServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path, rate: float) -> None:
        super().__init__(("127.0.0.1", 0), Limited)
        self.folder, self.rate = folder, rate
        self.free_s = 0.0
        self.lock = threading.Lock()

    def wait_for(self, size: int) -> None:
        """Take a turn on the link."""
        with self.lock:
            self.free_s = max(self.free_s, time.monotonic() - BURST_S) + size / self.rate
            until_s = self.free_s
        time.sleep(max(0.0, until_s - time.monotonic()))


@contextmanager
def serving(folder: Path, rate: float) -> Iterator[int]:
    command = [sys.executable, __file__, "--serve", str(folder), str(rate)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield int(server.stdout.readline())
    finally:
        server.kill()
        server.wait()


def download(port: int, path: Path) -> float:
    """Seconds of one GET of the shard into a file."""
    from_s = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/ids.npy")
    answer = connection.getresponse()
    with path.open("wb") as file:
        while piece := answer.read(1 << 20):
            file.write(piece)
    connection.close()
    return time.perf_counter() - from_s


def download_and_map(port: int) -> Pass:
    """Bring the file, and then make as many batches as it holds."""
    with tempfile.TemporaryDirectory() as folder:
        brought_s = download(port, Path(folder) / "ids.npy")
        return Pass(brought_s, brought_s + read_map(Path(folder) / "ids.npy"))


def stream(port: int, tokens: int) -> Pass:
    """Open the set, fetch all of it into an empty cache and make all of its batches."""
    with tempfile.TemporaryDirectory() as cache:
        took = read_all(data_of(f"http://127.0.0.1:{port}", Path(cache)))
    require(took.fetched_bytes == 2 * tokens, f"{took.fetched_bytes} bytes came of {2 * tokens}")
    return took


def links(folder: Path, repeats: int, rates: list[float], seconds: float) -> None:
    ways = ("GET, then memmap loop", "loader")
    print(
        "\n| MB/s of the link | MB | way | first batch, s | all batches, s | tokens/s | ratio of medians | to the GET |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for rate in rates:
        tokens = round(rate * 1e6 * seconds / 2 / BLOCK_TOKENS) * BLOCK_TOKENS
        require(tokens > 0, f"{seconds} s at {rate} MB/s are not a block")
        place = folder / f"links-{rate:g}"
        write_set(place, tokens)
        taken: dict[str, list[Pass]] = {name: [] for name in ways}
        with serving(place, rate * 1e6) as port:
            for turn in range(repeats + 1):
                passes = (download_and_map(port), stream(port, tokens))
                for name, took in zip(ways, passes, strict=True):
                    taken[name] += [took] if turn else []
        mapped_s = statistics.median(took.whole_s for took in taken[ways[0]])
        got_s = statistics.median(took.first_s for took in taken[ways[0]])
        for name, times in taken.items():
            whole_s = statistics.median(took.whole_s for took in times)
            first_s = statistics.median(took.first_s for took in times)
            ratios = f"{mapped_s / whole_s:.3f} | {got_s / whole_s:.3f}"
            figures = f"{first_s:.2f} | {whole_s:.2f} | {tokens / whole_s:,.0f}"
            print(f"| {rate:g} | {2 * tokens / 1e6:.0f} | {name} | {figures} | {ratios} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", nargs="*")
    parser.add_argument("--repeats", type=count, default=5)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rates", type=float, nargs="+", default=[4.0, 16.0])
    parser.add_argument("--serve", nargs=2, metavar=("FOLDER", "RATE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        server = RateServer(Path(arguments.serve[0]), float(arguments.serve[1]))
        print(server.server_address[1], flush=True)
        server.serve_forever()
    require_known(parser, arguments.measurements, MEASUREMENTS)
    wanted = arguments.measurements or MEASUREMENTS
    with tempfile.TemporaryDirectory() as folder:
        if "local" in wanted:
            local(Path(folder), arguments.repeats)
        if "links" in wanted:
            links(Path(folder), arguments.repeats, arguments.rates, arguments.seconds)


if __name__ == "__main__":
    main()
