"""Publishes a node's facts: follows its log files and appends their lines to the node's stream in the store.

One daemon thread with its own connection, on local rank 0. The files are the source of truth: the stream continues from
a position in them after the store was unreachable. Errors here never affect training.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from zeroband.elastic.store.connection import is_refusal
from zeroband.elastic.store.fact_records import SHORT_LINE_BYTES, FactBatch, FactLine, shortened
from zeroband.elastic.store.redis_run import FACTS_BYTES, Appended, FactEntry
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.errors import ConfigError, StoreLost
from zeroband.observe.events import EVENTS_FILE
from zeroband.observe.jsonl import FilePlace, LineTail, decode_line
from zeroband.observe.log import get_logger
from zeroband.observe.metrics import METRICS_FILE

RETRY_S = 2.0
"""Time within which the store must answer."""

EVERY_S = 1.0
"""Interval for reading the files."""

LAST_WORDS_S = 2.0
"""Time for publishing the last lines at the end of a run."""
_REFUSED_S = 60.0
_CAS_RETRIES = 8
"""Attempts to append while another writer appends to the stream."""

_BATCH_BYTES = 1 << 15
_READ_BYTES = 1 << 16
"""Bytes read at a time, and the longest line that is published."""

_SNAPSHOT_KINDS = ("node_started", "joined")
"""Events that late readers need, however old they are."""

_log = get_logger(__name__)


class NodeFacts:
    """Reads a node's log files in order of time, a batch at a time. One thread at a time.

    Raises OSError if an existing file cannot be read.
    """

    def __init__(self, node_dir: Path) -> None:
        tails = {name: LineTail(node_dir / name, most_behind=FACTS_BYTES) for name in (EVENTS_FILE, METRICS_FILE)}
        self._tails: Mapping[str, LineTail] = tails
        self._ahead: dict[str, deque[tuple[int, FactLine]]] = {}
        """Lines that were read and not returned yet, with their sizes in bytes."""
        self._places: dict[str, FilePlace] = {}
        self.go_to({})

    def go_to(self, places: Mapping[str, FilePlace]) -> None:
        """Continue from these positions; at the start of a file that has none."""
        self._places = {name: places.get(name, FilePlace()) for name in self._tails}
        for name, tail in self._tails.items():
            tail.go_to(self._places[name])
            self._ahead[name] = deque()

    def next_batch(self) -> FactBatch | None:
        """Return the next lines; None: there are none now."""
        lines: list[FactLine] = []
        room = _BATCH_BYTES
        while room > 0 and (name := self._earliest()) is not None:
            size, line = self._ahead[name].popleft()
            self._places[name] = line.place
            if size > SHORT_LINE_BYTES and line.record is not None:
                line = line._replace(record=shortened(line.record))
            room -= min(size, SHORT_LINE_BYTES)
            lines.append(line)
        return FactBatch(tuple(lines), dict(self._places)) if lines else None

    def _earliest(self) -> str | None:
        """Return the file whose next line was written first.

        Reading repeats until no empty file has a new line: an older one may arrive while another file is read.
        """
        while any(self._read_more(name) for name in self._tails if not self._ahead[name]):
            pass
        waiting = [(_at_s(ahead[0][1]), name) for name, ahead in self._ahead.items() if ahead]
        return min(waiting)[1] if waiting else None

    def _read_more(self, name: str) -> bool:
        for place, line in self._tails[name].lines(_READ_BYTES):
            if line is None:
                self._ahead[name].append((0, FactLine(name, place, None)))
            elif line.strip():
                self._ahead[name].append((len(line), FactLine(name, place, decode_line(line))))
        return bool(self._ahead[name])


def _at_s(line: FactLine) -> float:
    at_s = (line.record or {}).get("at_s")
    return at_s if isinstance(at_s, (int, float)) else 0.0


class FactPublisher:
    """Copies this node's facts to the run's store until `close()`.

    `node`: its name with its key. `open_store`: opens an exclusive connection; called in the thread.
    """

    def __init__(
        self, node_dir: Path, node: str, open_store: Callable[[], RedisStore], *, every_s: float = EVERY_S
    ) -> None:
        self._node = node
        self._every_s = every_s
        self._files = NodeFacts(node_dir)
        self._open_store = open_store
        self._newest = ""
        """Id of the last entry that this node knows to have appended."""
        self._batch: FactBatch | None = None
        """The next entry; it may be in the stream already, if the answer was lost."""
        self._snapshot: dict[str, FactLine] = {}
        self._is_listed: bool | None = None
        """Whether this node has a valid snapshot in the store; None: unknown."""
        self._logged, self._pause_s = "", self._every_s
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="facts", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        is_last = False
        while not self._try_follow() and not is_last:
            is_last = self._is_closing.wait(self._pause_s)

    def _try_follow(self) -> bool:
        """Publish until closed. Returns whether the last line was published; if not, retry after a pause."""
        try:
            self._follow()
        except (StoreLost, ConfigError) as error:
            refusal = None if error.__cause__ is None else is_refusal(error.__cause__)
            if refusal is not None or isinstance(error, ConfigError):
                self._log(refusal or str(error))
            return False
        except Exception as error:  # noqa: BLE001 - publishing must not affect training
            self._log(repr(error))
            return False
        return True

    def _log(self, why: str) -> None:
        """Log each reason once, and retry less often."""
        if why != self._logged:
            self._logged, self._pause_s = why, _REFUSED_S
            fields = {"why": why, "way_out": "its files have it all; observe.publish=false ends this line"}
            _log.warning("cannot publish this node's records to the store; training goes on", extra={"fields": fields})

    def _follow(self) -> None:
        """Publish until closed. Raises StoreLost, ConfigError, OSError."""
        with closing(self._open_store()) as store:
            is_last = False
            while True:
                self._publish(store)
                self._logged, self._pause_s = "", self._every_s
                if is_last:
                    return
                is_last = self._is_closing.wait(self._every_s)

    def _publish(self, store: RedisStore) -> None:
        """Append all lines written so far. Raises StoreLost, ConfigError, OSError."""
        attempts = 0
        while attempts < _CAS_RETRIES:
            self._batch = self._batch or self._files.next_batch()
            if self._batch is None:
                return
            if self._append(store, self._batch):
                self._batch, attempts = None, 0
            else:
                attempts += 1

    def _append(self, store: RedisStore, batch: FactBatch) -> bool:
        """Append a batch. False: the stream has other entries; continue after the newest valid one."""
        records = ((line, line.record) for line in batch.lines if line.record is not None)
        new = {record["kind"]: line for line, record in records if record.get("kind") in _SNAPSHOT_KINDS}
        snapshot = FactBatch(tuple({**self._snapshot, **new}.values())) if new or not self._is_listed else None
        is_new = bool(new) or self._is_listed is False
        answer = store.append_facts(self._node, self._newest, batch, snapshot, is_new=is_new)
        if isinstance(answer, Appended):
            self._newest, self._is_listed = answer.id, answer.is_listed
            self._snapshot |= new
            return True
        self._resume_after(answer)
        return False

    def _resume_after(self, entries: Sequence[FactEntry]) -> None:
        """Resume at the end of the newest valid entry; without one at the start of the files."""
        self._newest = entries[0].id if entries else ""
        self._files.go_to(next((batch.places for _, batch in entries if batch is not None), {}))
        self._batch, self._is_listed = None, None

    def close(self) -> None:
        """Publish the last lines if the store answers soon, and stop."""
        self._is_closing.set()
        self._thread.join(timeout=LAST_WORDS_S)
