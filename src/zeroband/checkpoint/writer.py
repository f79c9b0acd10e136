"""The checkpoint writer: a process that hashes, writes and uploads what the trainer staged in shared memory.

The trainer's local rank 0 starts it. It maps the staging buffers through inherited descriptors, reads one line of JSON
per checkpoint, and answers with lines of JSON. Without torch it starts fast and stays small. It ignores the signals
that end trainers: when its trainer is gone, it finishes the current save and ends.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import queue
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from pydantic import TypeAdapter

from zeroband.checkpoint.layout import plan_outer
from zeroband.checkpoint.manifest import ANYBODY, CheckpointKey, Trust
from zeroband.checkpoint.peers import WriterLine
from zeroband.checkpoint.saving import Save, SaveContext, SaveOrder, SaveRules
from zeroband.checkpoint.storage import open_storage
from zeroband.state.slot import Slot

PEERS = "peers"
"""Key of lines with the other members' reports, which are not orders."""

_NICENESS = 10
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")


@dataclass(frozen=True)
class WriterSpec:
    """Start-up parameters of a writer; JSON."""

    path: str
    run_id: str
    node_id: str
    slots: tuple[Slot, ...]
    """Places of all parameters."""
    outer: Mapping[str, int]
    """Descriptor of the staging buffer of each section of the outer state, the parameters first."""
    inner: Mapping[str, int]
    """Those of the buffers of the node's inner optimizer."""
    rules: SaveRules
    max_file_bytes: int
    lock: str
    """File that a node's writers lock in turn."""
    token: str | None = None
    """The run's token; None: checkpoints have no MAC."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> WriterSpec:
        return TypeAdapter(WriterSpec).validate_json(text)


class Writer:
    """Executes orders until its trainer closes the line or ends."""

    def __init__(self, spec: WriterSpec, line: WriterLine) -> None:
        self._line = line
        self._context = SaveContext(
            open_storage(spec.path, spec.run_id, spec.node_id),
            spec.node_id,
            spec.rules,
            line,
            spec.slots,
            plan_outer(spec.slots, tuple(spec.outer), max_bytes=spec.max_file_bytes),
            outer={name: _map_buffer(descriptor) for name, descriptor in spec.outer.items()},
            inner={name: _map_buffer(descriptor) for name, descriptor in spec.inner.items()},
            key=None if spec.token is None else CheckpointKey.of(spec.token, spec.run_id),
            trust=ANYBODY if spec.token is None else Trust(spec.token),
        )
        self._orders: queue.Queue[Save | None] = queue.Queue()

    def listen(self, lines: TextIO) -> None:
        """Receive orders from a stream until it ends, in a thread that does not wait for the current save."""
        for line in lines:
            said = json.loads(line)
            if PEERS in said:
                self._line.hear(said[PEERS])
                continue
            order = SaveOrder.from_json(line)
            if order.is_left_out:
                self._save_of(order).leave_out("an earlier checkpoint is still being written there")
            else:
                self._line.hear({})
                self._orders.put(self._save_of(order))  # map the files now: the trainer may end and remove them
        self._orders.put(None)

    def work(self) -> None:
        """Write the ordered checkpoints one by one."""
        while (save := self._orders.get()) is not None:
            self._line.begin()
            save.run()
            self._line.end()

    def _save_of(self, order: SaveOrder) -> Save:
        return Save(self._context, order, {name: _map_file(path) for name, path in order.files.items()})


def _map_buffer(descriptor: int) -> memoryview:
    """Map a staging buffer; the mapping survives the removal of its file."""
    return memoryview(mmap.mmap(descriptor, os.fstat(descriptor).st_size, prot=mmap.PROT_READ))


def _map_file(path: str) -> memoryview:
    with Path(path).open("rb") as file:
        return _map_buffer(file.fileno())


def main() -> int:
    """Run the writer. Returns the exit code."""
    for name in _IGNORED:
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    os.nice(_NICENESS)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries must not mix with the answers
    spec = WriterSpec.from_json(sys.stdin.readline())
    with Path(spec.lock).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # an earlier writer of this node may still be working
        writer = Writer(spec, WriterLine(answers))
        threading.Thread(target=writer.listen, args=(sys.stdin,), name="checkpoint-orders", daemon=True).start()
        writer.work()
    return 0
