"""Follows a run for the page: one thread reads its facts and makes documents, within a budget of CPU time."""

from __future__ import annotations

import gc
import threading
import time
import tomllib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zeroband.errors import ConfigError, StoreLost
from zeroband.observe.facts import FactSource, FolderFacts, newest_run, node_folders
from zeroband.observe.history import Axis, RunHistory
from zeroband.observe.log import get_logger
from zeroband.observe.words import listed
from zeroband.tools.board.document import Answer, Encoder, RunContext, series_document

LOOK_S, EDITION_S = 0.5, 1.0
"""Minimum intervals between reads while the page is open, and between documents."""
_IDLE_LOOK_S = 5.0
_AGAIN_S = 5.0
"""Interval at which a document is renewed without new facts, as it shows their age."""
_WATCHED_S = 20.0
"""Time after a request for which the page counts as open."""
_READ_SHARE, _STATE_SHARE, _SERIES_SHARE = 0.003, 0.0015, 0.0005
"""Budget of a core by kind of work: after t seconds of work, the next starts t / share later."""
_LONGEST_S = 10.0
_STOP_S = 5.0
_CHUNK_BYTES = 64 * 1024
"""Maximum bytes read of a file at once, to bound memory."""

_log = get_logger(__name__)


@dataclass(frozen=True)
class _Made:
    """A document and the versions from which it was made."""

    answer: Answer
    version: int
    revision: int
    at_s: float
    """Monotonic time."""
    pause_s: float
    """Minimum time until the next one, by the budget."""

    def due_s(self, version: int, revision: int) -> float:
        """Return when to replace it: at the next read if a node's state changed."""
        if version == self.version:
            return self.at_s + max(_AGAIN_S, self.pause_s)
        return self.at_s + (LOOK_S if revision != self.revision else self.pause_s)


class RunWatch:
    """Reads a run's facts in a thread, from `start` to `close`; any thread may request documents.

    `find`: returns the run's source, None if there is none yet. `now`: wall clock. `clock`: monotonic. `work_s`: CPU
    time of the calling thread.
    """

    def __init__(
        self,
        find: Callable[[], FactSource | None],
        *,
        setting: RunContext | None = None,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        work_s: Callable[[], float] = time.thread_time,
    ) -> None:
        self._find = find
        self._setting = setting or RunContext()
        self._now, self._clock, self._work_s = now, clock, work_s
        self._lock = threading.Lock()
        self._source: FactSource | None = None
        self._history: RunHistory | None = None
        self._to_s: float | None = None
        self._nodes = -1
        self._problem: str | None = None
        self._said = ""
        """The last logged error."""
        self._arrived_s: float | None = None
        """Monotonic time of the newest fact's arrival; None if it is older than this process."""
        self._has_caught_up = False
        """Whether all facts older than this process have been read."""
        self._version = 0
        """Grows with any new information."""
        self._asked_s = -_WATCHED_S
        self._listeners: list[Callable[[], None]] = []
        self._encoder, self._encoder_of_the_past = Encoder(), Encoder()
        self._newest: _Made | None = None
        self._series: dict[tuple[Axis, int], _Made] = {}
        self._stopping = threading.Event()
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="facts", daemon=True)
        self.edition = 0
        """Number of the current state document."""

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._woken.set()
        self._thread.join(_STOP_S)
        if self._source is not None:
            self._source.close()

    @property
    def run_id(self) -> str | None:
        return None if self._source is None else self._source.run_id

    @property
    def to_s(self) -> float | None:
        """Time of the newest fact."""
        return self._to_s

    def touch(self) -> None:
        """Count the page as open."""
        was_watched = self._is_watched()
        self._asked_s = self._clock()
        if not was_watched:
            self._woken.set()

    @contextmanager
    def telling(self, listener: Callable[[], None]) -> Generator[None]:
        """Call `listener` for each new document inside the block, from any thread."""
        self.touch()
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def _is_watched(self) -> bool:
        return bool(self._listeners) or self._clock() - self._asked_s <= _WATCHED_S

    def look(self) -> bool:
        """Read new facts, a bounded amount. Returns whether there is more."""
        if self._source is None:
            try:
                self._source = self._find()
            except (ConfigError, StoreLost, OSError) as error:
                self._note(str(error))
                return False
            if self._source is None:
                return False
            with self._lock:
                self._history, self._arrived_s = RunHistory(self._source.run_id), None
            self._version += 1
        history = self._history
        assert history is not None, "there is one for each source"
        try:
            facts, node_ids = self._source.read(), self._source.node_ids()
        except (ConfigError, StoreLost, OSError) as error:
            self._note(str(error))
            return False
        with self._lock:
            history.take(node_ids, facts)
            self._to_s = history.to_s
        if facts:
            self._arrived_s = self._clock() if self._has_caught_up else None
            self._version += 1
        self._has_caught_up = self._has_caught_up or not self._source.has_more
        if len(node_ids) != self._nodes:  # a new node has written its configuration
            self._nodes, self._setting = len(node_ids), read_setting(self._setting, self._source)
        self._note(self._broken())
        return self._source.has_more

    def _broken(self) -> str | None:
        source, history = self._source, self._history
        if source is None or history is None:
            return None
        lines = sum(source.skipped_lines().values()) + history.invalid_lines
        problems = [f"{lines} lines of this run's files could not be read"] if lines else []
        unread = source.unread()
        problems += [f"cannot read {listed(unread)}"] if unread else []
        return "; ".join(problems) or None

    def _note(self, problem: str | None) -> None:
        if problem != self._problem:
            self._problem = problem
            self._version += 1

    def _follow(self) -> None:
        look_at_s, has_frozen = self._clock(), False
        while not self._stopping.is_set():
            if self._clock() >= look_at_s:
                worked_s = self._catch_up()
                look_at_s = self._clock() + max(LOOK_S, min(_IDLE_LOOK_S, worked_s / _READ_SHARE))
                if self._has_caught_up and not has_frozen:
                    gc.collect()
                    gc.freeze()  # keeps the collector from traversing the long history again and again
                    has_frozen = True
            wait_s = _IDLE_LOOK_S
            if self._is_watched():
                has_made_it = self._try(self.state) is not None
                due_s = self._due_s(self._newest) if self._newest and has_made_it else self._clock() + LOOK_S
                wait_s = max(0.0, min(look_at_s, due_s) - self._clock())
            if self._woken.wait(wait_s):
                self._woken.clear()
                look_at_s = self._clock()

    def _catch_up(self) -> float:
        """Read all new facts. Returns the CPU seconds of the last read."""
        worked_s = self._work_s()
        while self._try(self.look) and not self._stopping.is_set():
            worked_s = self._work_s()
        return self._work_s() - worked_s

    def _try(self, step: Callable[[], object]) -> object:
        """Run a step; show an exception on the page instead of raising it."""
        try:
            return step()
        except Exception as error:  # noqa: BLE001
            said = f"the page cannot read the run: {type(error).__name__}; see its console"
            if said != self._said:
                _log.warning("the page cannot read the run", exc_info=error)
            self._said = said
            self._note(said)
            return None

    def _revision(self) -> int:
        return 0 if self._history is None else self._history.revision

    def _due_s(self, made: _Made) -> float:
        return made.due_s(self._version, self._revision())

    def state(self, at_s: float | None = None) -> Answer:
        """Return the document for a time, or the current one, which is renewed within the budget."""
        if at_s is not None:
            with self._lock:
                return self._encode(self._encoder_of_the_past, at_s)
        made = self._newest
        if made is not None and self._clock() < self._due_s(made):
            return made.answer
        with self._lock:
            made = self._newest
            if made is not None and self._clock() < self._due_s(made):  # made by another thread meanwhile
                return made.answer
            made = self._newest = self._make(lambda: self._encode(self._encoder, None), _STATE_SHARE)
            self.edition += 1
        for listener in list(self._listeners):
            listener()
        return made.answer

    def _encode(self, encoder: Encoder, at_s: float | None) -> Answer:
        return encoder.state(
            self._history, self.run_id, self._setting, now_s=round(self._now(), 1), age_s=self._age_s(), at_s=at_s,
            problem=self._problem,
        )  # fmt: skip

    def _make(self, encode: Callable[[], Answer], share: float) -> _Made:
        """Make a document and record its versions and cost."""
        version, revision, at_s, worked_s = self._version, self._revision(), self._clock(), self._work_s()
        answer = encode()
        _ = answer.gzipped  # part of the cost
        pause_s = max(EDITION_S, min(_LONGEST_S, (self._work_s() - worked_s) / share))
        return _Made(answer, version, revision, at_s, pause_s)

    def series(self, by: Axis, points: int) -> Answer:
        """Return the curves, renewed within the budget."""
        made = self._series.get((by, points))
        if made is not None and (made.version == self._version or self._clock() < made.at_s + made.pause_s):
            return made.answer
        with self._lock:
            made = self._make(lambda: Answer.of(series_document(self._history, by, points)), _SERIES_SHARE)
        if len(self._series) > 32:
            self._series.clear()
        self._series[by, points] = made
        return made.answer

    def _age_s(self) -> float | None:
        """Return the seconds since the newest fact: since its arrival, or by its time if older than this process."""
        to_s = None if self._history is None else self._history.to_s
        if to_s is None:
            return None
        if self._arrived_s is not None:
            return round(self._clock() - self._arrived_s, 1)
        return round(max(0.0, self._now() - to_s), 1)


def find_run(path: Path) -> FolderFacts | None:
    """Return the run in a folder: the folder itself or the most recently written one in it; None if there is none."""
    if not path.is_dir():
        return None
    run_dir = newest_run(path)
    return FolderFacts(run_dir, most_bytes=_CHUNK_BYTES) if node_folders(run_dir) else None


def read_setting(setting: RunContext, source: FactSource) -> RunContext:
    """Add what a node's configuration shows, if the source has one."""
    setting = replace(setting, place=source.place, has_all_machines=source.has_all_machines)
    files = [] if source.folder is None else sorted(source.folder.glob("*/config.toml"))
    if not files:
        return setting
    try:
        config = tomllib.loads(files[0].read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return setting
    outer, data = _section(config, "outer"), _section(config, "data")
    words = [str(outer.get("type", "no outer algorithm"))]
    if isinstance(outer.get("inner_steps"), int):
        words.append(f"a round every {outer['inner_steps']} steps")
    if isinstance(data.get("seq_length"), int):
        words.append(f"sequences of {data['seq_length']} tokens")
    return replace(setting, config_words=", ".join(words))


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}
