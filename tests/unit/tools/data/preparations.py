"""What the tests of `zeroband data prepare` share: the command in this process, and what it left."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from zeroband.data.shard_set import ShardSet
from zeroband.tools.data.folder import Folder, open_out, writing_to
from zeroband.tools.data.plan import Plan
from zeroband.tools.data.prepare import main
from zeroband.tools.data.units import OnProgress, Task, Units
from zeroband.tools.data.workers import OnDone

END = 256


class Inline:
    """Workers in this process. `order`: how they go through the tasks."""

    def __init__(self, plan: Plan, out: str, order: Callable[[list[Any]], Iterable[Any]], retry_s: float) -> None:
        self._out = out
        self._order = order
        self.plan = plan
        self.units = Units(plan, Folder(open_out(out)), retry_s)

    def run(self, tasks: Iterable[Task], on_progress: OnProgress, on_done: OnDone) -> None:
        for task in self._order(list(tasks)):
            with writing_to(self._out):
                record = self.units.make(task, on_progress)
            on_done(task, record)


def prepare(*arguments: object, order: Callable[[list[Any]], Iterable[Any]] = list) -> int:
    """The command with workers in this process; `--tokenizer byte` unless another one is named."""

    def inline(plan: Plan, out: str, _: int, retry_s: float) -> AbstractContextManager[Inline]:
        return nullcontext(Inline(plan, out, order, retry_s))

    named = [] if "--tokenizer" in arguments else ["--tokenizer", "byte"]
    return main([*map(str, arguments), *named], open_workers=inline)


def manifest_of(out: Path) -> ShardSet:
    return ShardSet.of_json((out / "manifest.json").read_bytes())


def ids_of(out: Path) -> list[int]:
    """All ids of a set, shard after shard."""
    shards = [np.load(out / shard.name, mmap_mode="r") for shard in manifest_of(out).shards]
    return np.concatenate(shards).tolist()


def texts_of(out: Path) -> list[str]:
    """The documents of a set of bytes; padding gives none."""
    parts = bytes(i if i != END else 0 for i in ids_of(out)).split(b"\0")
    return [part.decode() for part in parts if part]


def bytes_of(out: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too."""
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def write_lines(path: Path, texts: Sequence[str | None], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text}, ensure_ascii=False) + "\n" for text in texts), encoding="utf-8")
    return path
