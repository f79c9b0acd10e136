"""A process that makes units, one after the other, as whoever started it says over a pipe. Knows no other worker.

Messages are JSON. In: {"plan", "out"} once, then {"hash": unit} or {"tokenize": unit, "flags": [path, start, stop]}.
Out: {"progress": [bytes, tokens]}, {"done": unit, "record"}, {"error": text}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from zeroband.data.tokenizer import open_tokenizer
from zeroband.errors import ConfigError
from zeroband.tools.data.duplicates import flags_of
from zeroband.tools.data.folder import Folder, UnitRecord, open_out, writing_to
from zeroband.tools.data.plan import Plan
from zeroband.tools.data.units import OnProgress, Units


def run_task(units: Units, task: dict[str, Any], on_progress: OnProgress) -> UnitRecord | None:
    """Do one task as a message says it; None where it makes no record. Raises ConfigError, OSError of OUT."""
    if "hash" in task:
        units.hash_documents(task["hash"], on_progress)
        return None
    flags = task.get("flags")
    duplicates = None if flags is None else flags_of(Path(flags[0]), flags[1], flags[2])
    return units.tokenize(task["tokenize"], duplicates, on_progress)


def main(argv: Sequence[str]) -> int:
    """Work until the pipe is closed. `argv`: the number of its descriptor. Returns the exit code."""
    pipe: Connection[Any, Any] = Connection(int(argv[0]))

    def tell(message: dict[str, Any]) -> None:
        pipe.send_bytes(json.dumps(message).encode())

    begun = json.loads(pipe.recv_bytes())
    plan = Plan.of_json(begun["plan"].encode())
    units = Units(plan, Folder(open_out(begun["out"])), lambda: open_tokenizer(plan.tokenizer))
    while True:
        try:
            task = json.loads(pipe.recv_bytes())
        except EOFError:
            return 0
        try:
            with writing_to(begun["out"]):
                record = run_task(units, task, lambda size, tokens: tell({"progress": [size, tokens]}))
        except ConfigError as error:
            tell({"error": str(error)})
            return 0
        written = None if record is None else record.to_json().decode()
        tell({"done": next(iter(task.values())), "record": written})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
