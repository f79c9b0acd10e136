"""A process that makes units, one after the other, as whoever started it says over a pipe. Knows no other worker.

Messages are JSON. In: {"plan", "out", "retry_s"} once, then {"hash": unit} or {"tokenize": unit, "flags": [path, start,
stop]}. Out: {"progress": [bytes, tokens]}, {"warning": text}, {"done": unit, "record"}, {"error": text}.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

from zeroband.data.tokenizer import open_tokenizer
from zeroband.errors import ConfigError, StorageLost
from zeroband.tools.data.duplicates import flags_of
from zeroband.tools.data.folder import Folder, UnitRecord, open_out, writing_to
from zeroband.tools.data.plan import Plan
from zeroband.tools.data.progress import warnings_to
from zeroband.tools.data.units import OnProgress, Units

Pipe: TypeAlias = "Connection[Any, Any]"  # generic for type checkers alone


def run_task(units: Units, task: dict[str, Any], on_progress: OnProgress) -> UnitRecord | None:
    """Do one task as a message says it; None where it makes no record. Raises as `Units` does."""
    if "hash" in task:
        units.hash_documents(task["hash"], on_progress)
        return None
    flags = task.get("flags")
    duplicates = None if flags is None else flags_of(Path(flags[0]), flags[1], flags[2])
    return units.tokenize(task["tokenize"], duplicates, on_progress)


def main(argv: Sequence[str]) -> int:
    """Work until the pipe is closed. `argv`: the number of its descriptor. Returns the exit code."""
    pipe: Pipe = Connection(int(argv[0]))

    def tell(message: dict[str, Any]) -> None:
        pipe.send_bytes(json.dumps(message).encode())

    with warnings_to(lambda text: tell({"warning": text})):
        try:
            _work(pipe, tell)
        except (ConfigError, StorageLost) as error:
            tell({"error": str(error)})
        except Exception as error:  # noqa: BLE001 - a process that only ended would leave its user without the cause
            traceback.print_exc()
            tell({"error": f"{type(error).__name__}: {error}; this is a defect, of which the lines above tell more"})
    return 0


def _work(pipe: Pipe, tell: Callable[[dict[str, Any]], None]) -> None:
    begun = json.loads(pipe.recv_bytes())
    plan = Plan.of_json(begun["plan"].encode())
    folder = Folder(open_out(begun["out"]))
    units = Units(plan, folder, lambda: open_tokenizer(plan.tokenizer), begun["retry_s"])
    while True:
        try:
            task = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        with writing_to(begun["out"]):
            record = run_task(units, task, lambda size, tokens: tell({"progress": [size, tokens]}))
        written = None if record is None else record.to_json().decode()
        tell({"done": next(iter(task.values())), "record": written})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
