"""A rank of the trainer that writes down which samples it reads, and what is in them (test_private_data.py)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zeroband.data.ledger import Range, take
from zeroband.data.loader import Loader, MicroBatch
from zeroband.runtime import build
from zeroband.train import main


class ReadingLoader(Loader):
    """The loader of a node with one rank."""

    def __init__(self, *parts: Any, batch_size: int, **settings: Any) -> None:
        super().__init__(*parts, batch_size=batch_size, **settings)
        self._held: tuple[Range, ...] = ()
        self._size = batch_size
        self._file = Path(os.environ["READ_FOLDER"]) / f"{os.environ['ZERO_BAND_NODE__ID']}.jsonl"

    def assign(self, ranges: Sequence[Range]) -> None:
        self._held = tuple(ranges)
        super().assign(ranges)

    def next_step(self) -> list[MicroBatch]:
        batch, self._held = take(self._held, self._size)
        read = super().next_step()
        rows = ["".join(chr(i) if i < 256 else "|" for i in row) for part in read for row in part.tokens.tolist()]
        samples = [index for start, stop in batch for index in range(start, stop)]
        with self._file.open("a", encoding="utf-8") as file:
            for index, text in zip(samples, rows, strict=True):
                file.write(json.dumps({"index": index, "text": text}) + "\n")
        return read


if __name__ == "__main__":
    build.Loader = ReadingLoader
    sys.exit(main())
