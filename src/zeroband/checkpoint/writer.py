"""The writer: a process of its own that hashes, writes and uploads what the trainer staged in shared memory.

    python -m zeroband.checkpoint.writer, started by the trainer's local rank 0

It maps the staging buffers through inherited descriptors, reads one JSON line for each checkpoint, and answers with
JSON lines. It does without torch, so that it is up at once and small. It ignores the signals that end trainers: when
its trainer is gone it finishes the save in hand and ends.
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
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from pydantic import TypeAdapter

from zeroband.checkpoint.authenticity import ANYBODY, CheckpointKey, Trust
from zeroband.checkpoint.layout import OuterPlan, plan_outer
from zeroband.checkpoint.manifest import Stamp
from zeroband.checkpoint.peers import PeerWord
from zeroband.checkpoint.saving import Save, SaveRules, Staged
from zeroband.checkpoint.storage import open_storage
from zeroband.state.slot import Slot

IDLE, PROGRESS, UNAVAILABLE = "idle", "progress", "unavailable"
"""Kinds of answers beside the events of a save."""
PEERS = "peers"
"""Key of lines to the writer that are no orders: what is known of the other members of the save in hand."""

_NICENESS = 10
_SAY_S = 1.0
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")


@dataclass(frozen=True)
class WriterSpec:
    """Everything that a writer needs to know beforehand; JSON."""

    path: str
    run_id: str
    node_id: str
    slots: tuple[tuple[str, tuple[int, ...], int], ...]
    """Name, shape and start of every parameter."""
    outer: Mapping[str, int]
    """Descriptor of the staging buffer of each section of the outer state, the parameters first."""
    inner: Mapping[str, int]
    """Bytes of each buffer of the node's inner optimizer."""
    rules: SaveRules
    max_file_bytes: int
    lock: str
    """A file that the writers of one node hold in turn."""
    token: str | None = None
    """The run's token; None: it has none, and its checkpoints no MAC."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> WriterSpec:
        return TypeAdapter(WriterSpec).validate_json(text)


@dataclass(frozen=True)
class SaveOrder:
    """One checkpoint to write; JSON."""

    stamp: Stamp
    members: tuple[str, ...]
    """Node ids that share the work."""
    node_state: Mapping[str, Any] = field(default_factory=dict[str, Any])
    is_left_out: bool = False
    """This node does not take part: nothing is staged, and the others need not wait for it."""
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """Paths in shared memory of what else this node saves of itself, by name; they stay until the save is over."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> SaveOrder:
        return TypeAdapter(SaveOrder).validate_json(text)


class Answers:
    """Lines to the trainer and from it, and what a save needs of its process. Any thread."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._lock = threading.Lock()
        self._written = self._said = 0
        self._began_at_s = self._said_at_s = time.monotonic()
        self._is_waiting = False
        self._peers: Mapping[str, PeerWord] = {}

    def now_s(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def at(self, point: str) -> None:
        """Do nothing; in tests the surroundings let something happen here."""

    def peer_status(self, member: str) -> PeerWord:
        return self._peers.get(member, PeerWord())

    def hear(self, peers: Mapping[str, Mapping[str, Any]]) -> None:
        """Note what is known of the other members of the save in hand; of none when another one is ordered."""
        self._peers = {node: PeerWord(**word) for node, word in peers.items()}

    def tell(self, kind: str, **fields: Any) -> None:
        with self._lock:
            self._say({"kind": kind, **fields})

    def report_unavailable(self, attempt: str, why: str | None) -> None:
        self.tell(UNAVAILABLE, attempt=attempt, why=why)

    def begin(self) -> None:
        """A save begins: its bytes are counted from here."""
        with self._lock:
            self._written = self._said = 0
            self._is_waiting = False
            self._began_at_s = self._said_at_s = time.monotonic()
            self._show(at_once=True)

    def end(self) -> None:
        """The save is over, and the writer free again."""
        with self._lock:
            rate = self._written / max(time.monotonic() - self._began_at_s, 1e-6)
            self._say_progress(rate)
            self._say({"kind": IDLE})

    def count(self, written_bytes: int) -> None:
        with self._lock:
            self._written += written_bytes
            self._show()

    def working(self, *, is_waiting: bool) -> None:
        with self._lock:
            has_changed, self._is_waiting = is_waiting != self._is_waiting, is_waiting
            self._show(at_once=has_changed)

    def _show(self, *, at_once: bool = False) -> None:
        since_s = time.monotonic() - self._said_at_s
        if since_s >= _SAY_S or at_once:
            self._say_progress((self._written - self._said) / max(since_s, 1e-6))
            self._said, self._said_at_s = self._written, time.monotonic()

    def _say_progress(self, rate: float) -> None:
        progress = {"written_bytes": self._written, "bytes_per_s": round(rate), "is_waiting": self._is_waiting}
        self._say({"kind": PROGRESS, **progress})

    def _say(self, message: Mapping[str, Any]) -> None:
        try:
            self._out.write(json.dumps(message) + "\n")
            self._out.flush()
        except BrokenPipeError:  # the trainer is gone: finish what it ordered
            pass


class Writer:
    """Takes orders until its trainer closes the line or is gone."""

    def __init__(self, spec: WriterSpec, answers: Answers) -> None:
        self._spec = spec
        self._answers = answers
        self._slots = tuple(Slot(*slot) for slot in spec.slots)
        self._storage = open_storage(spec.path, spec.run_id, spec.node_id)
        self._outer = {name: _map_buffer(descriptor) for name, descriptor in spec.outer.items()}
        self._inner = {name: _map_buffer(descriptor) for name, descriptor in spec.inner.items()}
        self._plan: OuterPlan = plan_outer(self._slots, tuple(spec.outer), max_bytes=spec.max_file_bytes)
        self._key = None if spec.token is None else CheckpointKey.of(spec.token, spec.run_id)
        self._trust = ANYBODY if spec.token is None else Trust(spec.token)
        self._orders: queue.Queue[Save | None] = queue.Queue()

    def listen(self, lines: TextIO) -> None:
        """Take orders from a stream until it ends; a thread of its own, so that a save in hand does not hold it up."""
        for line in lines:
            said = json.loads(line)
            if PEERS in said:
                self._answers.hear(said[PEERS])
                continue
            order = SaveOrder.from_json(line)
            if order.is_left_out:
                self._save_of(order).leave_out("an earlier checkpoint is still being written there")
            else:
                self._answers.hear({})
                self._orders.put(self._save_of(order))  # its files are mapped now: its trainer may be gone soon
        self._orders.put(None)

    def work(self) -> None:
        """Write one checkpoint after the other."""
        while (save := self._orders.get()) is not None:
            self._answers.begin()
            save.run()
            self._answers.end()

    def _save_of(self, order: SaveOrder) -> Save:
        files = {name: _map_file(path) for name, path in order.files.items()}
        staged = Staged(self._slots, self._plan, self._outer, self._inner, order.node_state, files)
        spec, vouching = self._spec, (self._key, self._trust)
        return Save(
            self._storage, order.stamp, staged, spec.node_id, order.members, spec.rules, self._answers, *vouching
        )


def _map_buffer(descriptor: int) -> memoryview:
    """The bytes of a staging buffer; they stay when its file is removed."""
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
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    spec = WriterSpec.from_json(sys.stdin.readline())
    with Path(spec.lock).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # an older writer of this node may still be at work
        writer = Writer(spec, Answers(answers))
        threading.Thread(target=writer.listen, args=(sys.stdin,), name="checkpoint-orders", daemon=True).start()
        writer.work()
    return 0


if __name__ == "__main__":
    sys.exit(main())
