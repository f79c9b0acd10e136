"""Two prepared sets for runs that are killed: one on this disk, one behind a server that fails one request in five.

And what each sample of their mixture holds, from the arrays themselves: no store, file, cache or loader is asked.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np
from tests.unit.data.prepared import FilesHandler, Ids, drawn_ids, served, write_set

from zeroband.data.index import BlockLayout, SampleIndex
from zeroband.data.mixture import Mixture, SourceShare

SEQ_LENGTH = 32
BLOCK_TOKENS = 1024
MIXED_BLOCKS = 8
WEIGHTS = {"far": 0.3, "near": 0.7}
FAR = 0
"""Number of that source: they are in the order of their names."""
SHARDS = {"far": (20_000, 9_000, 14_321), "near": (30_000, 777, 25_600)}
"""Tokens of each: some end in the middle of a block."""

CACHE_GB = 1e-4
"""Half of it is the far set's, whose blocks have no room in that: they are fetched again and again."""


def shards_of(name: str) -> list[Ids]:
    return [drawn_ids(tokens, seed=tokens) for tokens in SHARDS[name]]


def write_corpora(folder: Path) -> None:
    for name in WEIGHTS:
        write_set(folder / name, shards_of(name), block_tokens=BLOCK_TOKENS)


@contextmanager
def failing_server(folder: Path, seed: int) -> Iterator[tuple[str, Counter[str]]]:
    """Serve a folder badly. Gives its address, and what it has answered so far; "" is what was asked for."""
    draw, kinds = random.Random(seed), itertools.cycle(["500", "429", "cut", "hang up"])
    answered = Counter[str]()
    with served(folder) as server:

        def fail(request: FilesHandler) -> bool:
            with server.lock:
                kind = next(kinds) if draw.random() < 0.2 else ""
                answered[kind] += 1
            match kind:
                case "500":
                    return request.refuse(500)
                case "429":
                    return request.refuse(429, Retry_After="0.1")
                case "cut":
                    return request.send(*request.content(), cut=True)
                case "hang up":
                    request.close_connection = True
                    return True
                case _:
                    return False

        server.fault = fail
        yield server.url, answered


def arguments_of(near: str, far: str, *, phases: Sequence[tuple[int, Mapping[str, float]]] = ()) -> tuple[str, ...]:
    """Train on the mixture, the sets lying there. `phases`: tokens, and the weights from there on."""
    paths = {"far": far, "near": near}
    sources = [
        {"name": name, "weight": weight, "source": {"type": "tokens", "path": paths[name]}}
        for name, weight in WEIGHTS.items()
    ]
    changes = [{"from_tokens": tokens, "weights": weights} for tokens, weights in phases]
    return (
        *(f"--data.sources={json.dumps(sources)}", f"--data.phases={json.dumps(changes)}"),
        *(f"--data.shuffle-blocks={MIXED_BLOCKS}", f"--data.cache-gb={CACHE_GB}", "--data.retry-s=60"),
    )


class Reference:
    """The samples of the mixture without phases and without held-out ones, in their global order."""

    def __init__(self, seed: int = 0) -> None:
        indices: list[SampleIndex] = []
        self._ids: list[Ids] = []
        for name in WEIGHTS:
            places = BlockLayout(SHARDS[name], BLOCK_TOKENS, SEQ_LENGTH)
            indices.append(SampleIndex(places, seed, 0.0, window=MIXED_BLOCKS))
            self._ids.append(np.concatenate(shards_of(name)))
        self._indices = indices

    @cached_property
    def mixture(self) -> Mixture:
        shares = zip(WEIGHTS.items(), self._indices, strict=True)
        return Mixture([SourceShare(name, weight, index.n_train) for (name, weight), index in shares])

    def sample(self, index: int) -> tuple[int, list[int]]:
        """Number of the source of a sample, and its ids."""
        dealt = self.mixture.locate([index])
        source = int(dealt.sources[0])
        of_source = self._indices[source]
        start, stop = of_source.spans(of_source.positions(dealt.indices))[0].tolist()
        return source, self._ids[source][start:stop].tolist()
