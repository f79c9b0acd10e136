"""A rank of the trainer that writes down which samples it reads, and what is in them.

Into `<READ_FOLDER>/<node id>.jsonl`, all lives of a node one after the other: `index`, `source` and `ids` of each.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zeroband.data.ledger import Range, take
from zeroband.data.loader import IGNORED, Loader, MicroBatch
from zeroband.observe.jsonl import JsonlWriter
from zeroband.runtime import build
from zeroband.train import main


class ReadingLoader(Loader):
    """The loader of a node with one rank."""

    def __init__(self, *parts: Any, batch_size: int, **settings: Any) -> None:
        super().__init__(*parts, batch_size=batch_size, **settings)
        self._held: tuple[Range, ...] = ()
        self._size = batch_size
        self._file = JsonlWriter(Path(os.environ["READ_FOLDER"]) / f"{os.environ['ZERO_BAND_NODE__ID']}.jsonl")

    def assign(self, ranges: Sequence[Range]) -> None:
        self._held = tuple(ranges)
        super().assign(ranges)

    def next_step(self) -> list[MicroBatch]:
        batch, self._held = take(self._held, self._size)
        read = super().next_step()
        samples = [index for start, stop in batch for index in range(start, stop)]
        for index, (source, ids) in zip(samples, rows_of(read), strict=True):
            self._file.write({"index": index, "source": source, "ids": ids})
        return read


def rows_of(read: Sequence[MicroBatch]) -> Iterator[tuple[int, list[int]]]:
    """Source and ids of each row: its inputs, and its last target; without what fills up a short one."""
    for part in read:
        sources = [0] * len(part.tokens) if part.sources is None else part.sources.tolist()
        for source, tokens, targets in zip(sources, part.tokens.tolist(), part.targets.tolist(), strict=True):
            size = sum(target != IGNORED for target in targets)
            assert tokens[1:size] == targets[: size - 1]
            yield source, [*tokens[:size], targets[size - 1]]


if __name__ == "__main__":
    build.Loader = ReadingLoader
    sys.exit(main())
