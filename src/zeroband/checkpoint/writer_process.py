"""The trainer's side of the checkpoint writer: starts it, sends orders, receives its events. Local rank 0."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from zeroband.checkpoint.peers import IDLE, LOST, PROGRESS, UNAVAILABLE, WriterStatus
from zeroband.checkpoint.saving import SaveOrder
from zeroband.checkpoint.writer import PEERS, WriterSpec
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.node.process_start import uncollected
from zeroband.observe.log import get_logger

LOG_FILE = "checkpoint_writer.log"
"""The writer's output, in the node's folder of the run directory."""

_SAY_S = 10.0
_QUIET = 9
"""Pause after an exchange with other writers, as a multiple of its duration: a slow store must not delay the writer."""

_STORE_RETRY_S = 2.0
"""Longest wait for the store; the next report follows a second later."""

_log = get_logger(__name__)


class PeerWriters:
    """Connection to the writers of a save's other members; this base class serves a single node.

    Any thread; methods return quickly and never raise.
    """

    def say(self, attempt: str, word: str) -> None:
        """Publish this node's report in a save; the latest counts."""

    def hear(self, attempt: str) -> Mapping[str, str]:
        """Return the latest reports, by node id."""
        return {}


class StoreWriters(PeerWriters):
    """The connection through the run's store. `node`: its name with its key."""

    def __init__(self, store: RedisStore, node: str) -> None:
        self._store = store
        self._node = node

    def say(self, attempt: str, word: str) -> None:
        try:
            self._store.publish_saving(attempt, self._node, word, retry_s=_STORE_RETRY_S)
        except Exception as error:  # noqa: BLE001 - whatever the store does, what the writer says must be heard
            _log.debug("could not report to the other writers", extra={"fields": {"why": str(error)}})

    def hear(self, attempt: str) -> Mapping[str, str]:
        try:
            return self._store.saving(attempt, retry_s=_STORE_RETRY_S)
        except Exception as error:  # noqa: BLE001 - as above
            _log.debug("could not read the other writers' reports", extra={"fields": {"why": str(error)}})
            return {}


def has_ended(process: subprocess.Popen[str]) -> bool:
    """Whether a process has ended. Popen's `poll` does not know while another thread waits for it."""
    if process.returncode is not None:
        return True
    with contextlib.suppress(ChildProcessError):  # the other thread has just seen its end
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    return True


class WriterProcess:
    """One writer process at a time, in a new session; a crashed one is replaced with the next order.

    Owns the process and the thread that listens to it. `on_event`: called in that thread with a save's events.
    `peer_writers`: carries reports between the writers of one save.
    """

    def __init__(
        self,
        spec: WriterSpec,
        descriptors: tuple[int, ...],
        log: Path,
        on_event: Callable[[str, Mapping[str, Any]], None],
        peer_writers: PeerWriters,
    ) -> None:
        self._peer_writers = peer_writers
        self._beats = 0
        self._quiet_until_s = 0.0
        self._peers: Mapping[str, WriterStatus] = {}
        """The other members' reports in the current save."""
        self._lost: frozenset[str] = frozenset()
        """Members that the run has lost."""
        self._spec = spec
        self._descriptors = descriptors
        self._log_path = log
        self._on_event = on_event
        self._changed = threading.Condition()
        self._order: SaveOrder | None = None
        self._written_bytes = 0
        self.bytes_per_s: int | None = None
        """Rate of the current save over its last second; afterwards, over the whole save."""
        self._process = self._start()
        self._listen_to(self._process)

    def _start(self) -> subprocess.Popen[str]:
        """Start a writer, which the caller makes the current one."""
        with self._open_log() as log:
            process = subprocess.Popen(
                uncollected("zeroband.checkpoint.writer"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=self._descriptors,
                start_new_session=True,
                text=True,
            )
        self._say(process, self._spec.to_json())
        return process

    def _open_log(self) -> TextIO:
        try:
            return self._log_path.open("a", encoding="utf-8")
        except OSError as error:
            _log.warning("the checkpoint writer's log cannot be written", extra={"fields": {"why": str(error)}})
            return Path(os.devnull).open("a", encoding="utf-8")

    def _listen_to(self, process: subprocess.Popen[str]) -> None:
        threading.Thread(target=self._listen, args=(process,), name="checkpoint-answers", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_busy(self) -> bool:
        """Whether a save is in progress, so that the staging buffers must not change."""
        with self._changed:
            return self._order is not None

    @property
    def written_bytes(self) -> int:
        """Bytes of the current save that were passed to the storage."""
        return self._written_bytes

    def give(self, order: SaveOrder) -> None:
        """Send an order; the writer must be free, unless this node skips the checkpoint.

        The checkpoint fails if no writer can be started in place of a crashed one.
        """
        if has_ended(self._process):
            try:
                started = self._start()
            except OSError as error:
                return self._fail(order, f"no writer can be started: {error}")
            with self._changed:
                self._process = started
            self._listen_to(started)
        if not order.is_left_out:
            with self._changed:
                assert self._order is None, "one checkpoint at a time"
                self._order, self._written_bytes = order, 0
                self._peers, self._lost = {}, frozenset()
        self._say(self._process, order.to_json())
        if has_ended(self._process):
            self._died(self._process)

    def go_on_with(self, nodes: Collection[str]) -> None:
        """Update the run's nodes: the current save does not wait for lost ones."""
        with self._changed:
            lost = frozenset() if self._order is None else frozenset(self._order.members) - frozenset(nodes)
            self._lost |= lost
        if lost:
            self._tell_of_peers(self._process)

    def _tell_of_peers(self, process: subprocess.Popen[str]) -> None:
        with self._changed:
            known = {**self._peers, **dict.fromkeys(self._lost, LOST)}
        self._say(process, json.dumps({PEERS: {node: asdict(word) for node, word in known.items()}}))

    def await_free(self) -> None:
        """Wait until no save is in progress, bounded by the writer's own time-outs. Logs while it waits."""
        from_s = time.monotonic()
        with self._changed:
            while not self._changed.wait_for(lambda: self._order is None, timeout=_SAY_S):
                waited_s = round(time.monotonic() - from_s)
                fields = {"waited_s": waited_s, "written_bytes": self._written_bytes}
                _log.info("waiting for the last checkpoint to be written", extra={"fields": fields})

    def close(self, *, waits: bool) -> None:
        """End the writer after the current save; `waits`: block until then."""
        if waits:
            self.await_free()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        if waits:
            self._process.wait()

    def _say(self, process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it crashed; the listening thread reports that
            process.stdin.write(line + "\n")
            process.stdin.flush()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            message: dict[str, Any] = json.loads(line)
            kind = message.pop("kind")
            if kind == IDLE:
                self._free(process)
            elif kind == PROGRESS:
                self._written_bytes, self.bytes_per_s = message["written_bytes"], message["bytes_per_s"]
                self._exchange(process, is_waiting=message["is_waiting"])
            elif kind == UNAVAILABLE:
                self._peer_writers.say(message["attempt"], WriterStatus(out=message["why"]).to_json())
            else:
                self._on_event(kind, message)
        process.wait()
        self._died(process)

    def _exchange(self, process: subprocess.Popen[str], *, is_waiting: bool) -> None:
        """Report that this writer works, and pass the others' reports on to it."""
        with self._changed:
            order = self._order
        if order is None or len(order.members) == 1 or time.monotonic() < self._quiet_until_s:
            return
        attempt = order.stamp.attempt
        self._beats += 1
        from_s = time.monotonic()
        words = {node: WriterStatus.parse(text) for node, text in self._peer_writers.hear(attempt).items()}
        heard = {node: word for node, word in words.items() if word is not None and node in order.members}
        own = heard.pop(self._spec.node_id, WriterStatus())
        if own.out is None:  # a reported reason holds until it is revoked
            self._peer_writers.say(attempt, WriterStatus(self._beats, is_waiting).to_json())
        self._quiet_until_s = time.monotonic() + _QUIET * (time.monotonic() - from_s)
        self._peers = heard
        self._tell_of_peers(process)

    def _died(self, process: subprocess.Popen[str]) -> None:
        """Report the fate of a crashed writer's save, once."""
        order = self._free(process)
        if order is not None:
            self._fail(order, f"its writer ended ({process.returncode}); see {self._log_path}")

    def _fail(self, order: SaveOrder, reason: str) -> None:
        """Report a failed save, also to the other members' writers."""
        place = {"round": order.stamp.round, "step": order.stamp.inner_step}
        self._peer_writers.say(order.stamp.attempt, WriterStatus(out="its writer ended").to_json())
        self._on_event("checkpoint_failed", {**place, "reason": reason})

    def _free(self, process: subprocess.Popen[str]) -> SaveOrder | None:
        """Return the save that this writer had in progress, and forget it."""
        with self._changed:
            if process is not self._process:
                return None
            order, self._order = self._order, None
            self._changed.notify_all()
            return order
