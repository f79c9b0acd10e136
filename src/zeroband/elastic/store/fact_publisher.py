"""Publishes a run in its store: follows this node's log files and appends them to the node's stream there.

One daemon thread with its own connection, on local rank 0. The files are the source of truth: while the store is away
only the position in them is kept, and the stream continues from there. Errors here never affect training.
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
"""In which the store must answer."""

EVERY_S = 1.0
"""Between two looks at the files."""

LAST_WORDS_S = 2.0
"""How long the end of a run may take for what was recorded last."""
_REFUSED_S = 60.0
_ASK_AGAIN = 8
"""Times that the stream is looked at anew while somebody else adds to it."""

_BATCH_BYTES = 1 << 15
_READ_BYTES = 1 << 16
"""Longest line that is told, too."""

_STANDING = ("node_started", "joined")
"""Events without which the view of a node is poor, however long ago they were."""

_log = get_logger(__name__)


class NodeFacts:
    """What a node recorded, in the order of its clock, a batch at a time. One thread at a time.

    Raises OSError where a file is there and cannot be read.
    """

    def __init__(self, node_dir: Path) -> None:
        tails = {name: LineTail(node_dir / name, most_behind=FACTS_BYTES) for name in (EVENTS_FILE, METRICS_FILE)}
        self._tails: Mapping[str, LineTail] = tails
        self._ahead: dict[str, deque[tuple[int, FactLine]]] = {}
        """Lines that were read and not given yet, with their bytes."""
        self._places: dict[str, FilePlace] = {}
        self.go_to({})

    def go_to(self, places: Mapping[str, FilePlace]) -> None:
        """Go on behind these places; from the beginning in a file that is none of them."""
        self._places = {name: places.get(name, FilePlace()) for name in self._tails}
        for name, tail in self._tails.items():
            tail.go_to(self._places[name])
            self._ahead[name] = deque()

    def next_batch(self) -> FactBatch | None:
        """The next lines; None: there are none now."""
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
        """The file whose next line was written first.

        While one file was read, an older line may have come to the one before: it is looked at again.
        """
        while any(self._reads_on(name) for name in self._tails if not self._ahead[name]):
            pass
        waiting = [(_at_s(ahead[0][1]), name) for name, ahead in self._ahead.items() if ahead]
        return min(waiting)[1] if waiting else None

    def _reads_on(self, name: str) -> bool:
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
    """Copies this node's recorded facts to the run's store until `close()`.

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
        """Id of the entry that this node added last, as far as it knows."""
        self._batch: FactBatch | None = None
        """What is to be added next; it may have been, if the answer was lost."""
        self._standing: dict[str, FactLine] = {}
        self._is_listed: bool | None = None
        """Whether the store lists this node; None: not known."""
        self._said, self._pause_s = "", self._every_s
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="facts", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        is_last = False
        while not self._follows_to_the_end() and not is_last:
            is_last = self._is_closing.wait(self._pause_s)

    def _follows_to_the_end(self) -> bool:
        """Whether all was told to the last line; else it is tried again after a pause."""
        try:
            self._follow()
        except (StoreLost, ConfigError) as error:
            refusal = None if error.__cause__ is None else is_refusal(error.__cause__)
            if refusal is not None or isinstance(error, ConfigError):
                self._say(refusal or str(error))
            return False
        except Exception as error:  # noqa: BLE001 - a run is trained whether or not it is shown
            self._say(repr(error))
            return False
        return True

    def _say(self, why: str) -> None:
        """Once for each reason."""
        if why != self._said:
            self._said, self._pause_s = why, _REFUSED_S
            fields = {"why": why, "way_out": "its files have it all; observe.publish=false ends this line"}
            _log.warning("cannot publish this node's records to the store; training goes on", extra={"fields": fields})

    def _follow(self) -> None:
        """Raises StoreLost, ConfigError, OSError."""
        with closing(self._open_store()) as store:
            is_last = False
            while True:
                self._publish(store)
                self._said, self._pause_s = "", self._every_s
                if is_last:
                    return
                is_last = self._is_closing.wait(self._every_s)

    def _publish(self, store: RedisStore) -> None:
        """Tell all that was recorded so far. Raises StoreLost, ConfigError, OSError."""
        asked = 0
        while asked < _ASK_AGAIN:
            self._batch = self._batch or self._files.next_batch()
            if self._batch is None:
                return
            if self._append(store, self._batch):
                self._batch, asked = None, 0
            else:
                asked += 1

    def _append(self, store: RedisStore, batch: FactBatch) -> bool:
        """Whether it was added; else the stream holds other entries, and this node goes on behind those."""
        standing = {line.record["kind"]: line for line in batch.lines if _stands(line) and line.record is not None}
        told = FactBatch(tuple({**self._standing, **standing}.values())) if standing or not self._is_listed else None
        is_new = bool(standing) or self._is_listed is False
        answer = store.append_facts(self._node, self._newest, batch, told, is_new=is_new)
        if isinstance(answer, Appended):
            self._newest, self._is_listed = answer.id, answer.is_known
            self._standing |= standing
            return True
        self._go_behind(answer)
        return False

    def _go_behind(self, entries: Sequence[FactEntry]) -> None:
        """Go on where the newest entry that counts ends; where there is none, from the beginning."""
        self._newest = entries[0].id if entries else ""
        told = next((batch.places for _, batch in entries if batch is not None), {})
        self._files.go_to(told)
        self._batch, self._is_listed = None, None

    def close(self) -> None:
        """Tell what was recorded last, if the store answers soon."""
        self._is_closing.set()
        self._thread.join(timeout=LAST_WORDS_S)


def _stands(line: FactLine) -> bool:
    return line.record is not None and line.record.get("kind") in _STANDING
