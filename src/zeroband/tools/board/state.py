"""Follows a run for the page: one thread reads its facts, documents are made when somebody asks, and not too often."""

from __future__ import annotations

import gzip
import hashlib
import threading
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zeroband.config.schema import FaultConfig
from zeroband.errors import ConfigError, StoreLost
from zeroband.observe.events import EVENTS_FILE
from zeroband.observe.facts import FactSource, FolderFacts, is_node_folder
from zeroband.observe.history import Axis, RunHistory
from zeroband.observe.log import get_logger
from zeroband.observe.metrics import METRICS_FILE
from zeroband.tools.board.document import Encoder, Setting, series_document

LOOK_S = 0.5
"""Pause between two looks while somebody watches."""
_IDLE_LOOK_S = 5.0
_WATCHED_S = 20.0
"""How long after a request somebody counts as watching."""
_SHARE = 0.0025
"""Share of a core for reading, and for each document: after t seconds of work, t / _SHARE pass before the next."""
_LONGEST_S = 10.0
_STOP_S = 5.0
_CHUNK_BYTES = 64 * 1024
"""Most that is read of a file at once: a long past is folded piece by piece."""
_SAMPLE = "sample.txt"
_SAMPLE_CHARS = 4000
_SAMPLE_EVERY_S = 10.0

_log = get_logger(__name__)


@dataclass(frozen=True)
class Answer:
    """Bytes for the page, as they are and compressed."""

    body: bytes
    gzipped: bytes
    etag: str

    @staticmethod
    def of(body: bytes) -> Answer:
        return Answer(body, gzip.compress(body, 1, mtime=0), f'"{hashlib.sha256(body).hexdigest()[:24]}"')


class RunWatch:
    """Reads a run's facts in a thread of its own, from `start` to `close`; any thread may ask for documents.

    `find`: gives the run's source, or None where there is none yet. `now`: wall clock, for people.
    """

    def __init__(
        self,
        find: Callable[[], FactSource | None],
        *,
        setting: Setting | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._find = find
        self._setting = setting or Setting()
        self._now = now
        self._lock = threading.Lock()
        self._source: FactSource | None = None
        self._history: RunHistory | None = None
        self._to_s: float | None = None
        self._problem: str | None = None
        self._arrived_s: float | None = None
        """When the newest fact came, by the monotonic clock; None: it was there when this began."""
        self._has_caught_up = False
        """Whether what was there before this page has been read."""
        self._sample_due_s = 0.0
        self._asked_s = -_WATCHED_S
        self._encoder = Encoder()
        self._newest: tuple[int, float, Answer] | None = None
        """Version, when it may be made anew, document."""
        self._series: dict[tuple[Axis, int], tuple[int, float, Answer]] = {}
        self._stopping = threading.Event()
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="facts", daemon=True)
        self.version = 0
        """Grows whenever something changed."""

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
        """When the newest fact was written."""
        return self._to_s

    def touch(self) -> None:
        """Somebody watches."""
        was_idle = time.monotonic() - self._asked_s > _WATCHED_S
        self._asked_s = time.monotonic()
        if was_idle:
            self._woken.set()

    def look(self) -> bool:
        """Read what is new, or the next piece of it. Whether there was something."""
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
                self._setting = read_setting(self._setting, self._source)
            self.version += 1
        try:
            node_ids = self._source.node_ids()
            facts = self._source.read()
        except (ConfigError, StoreLost, OSError) as error:
            self._note(str(error))
            return False
        history = self._history
        assert history is not None, "there is one for each source"
        with self._lock:
            for node_id in node_ids:
                history.appeared(node_id)
            for fact in facts:
                history.add(fact)
            self._to_s = history.to_s
        if facts:
            self._arrived_s = time.monotonic() if self._has_caught_up else None
            if self._setting.detect_s is None:
                self._setting = read_setting(self._setting, self._source)
            self.version += 1
        else:
            self._has_caught_up = True
        if time.monotonic() >= self._sample_due_s:
            self._setting = read_sample(self._setting, self._source)
            self._sample_due_s = time.monotonic() + _SAMPLE_EVERY_S
        self._note(self._broken())
        return bool(facts)

    def _broken(self) -> str | None:
        source, history = self._source, self._history
        if source is None or history is None:
            return None
        lines = sum(source.skipped_lines().values()) + sum(history.odd_lines().values())
        return f"{lines} lines of this run's files could not be read; the others are shown" if lines else None

    def _note(self, problem: str | None) -> None:
        if problem != self._problem:
            self._problem = problem
            self.version += 1

    def _follow(self) -> None:
        while not self._stopping.is_set():
            worked_s = time.thread_time()
            try:
                while self.look() and not self._stopping.is_set():
                    pass
            except Exception as error:  # noqa: BLE001 - whatever it is, the page goes on and says so
                _log.warning("the page cannot read the run", exc_info=error)
                self._note(f"the page cannot read the run: {type(error).__name__}; its console says more")
            is_watched = time.monotonic() - self._asked_s <= _WATCHED_S
            pause_s = min(_IDLE_LOOK_S, max(LOOK_S, (time.thread_time() - worked_s) / _SHARE))
            self._woken.wait(pause_s if is_watched else _IDLE_LOOK_S)
            self._woken.clear()

    def state(self, at_s: float | None = None) -> Answer:
        """The document of a moment; of now at most twice a second a new one, and seldomer where it takes long."""
        begun_s, worked_s = time.monotonic(), time.thread_time()
        known = self._newest
        if at_s is None and known is not None and (known[0] == self.version or begun_s < known[1]):
            return known[2]
        version = self.version
        with self._lock:
            body = self._encoder.state(
                self._history, self.run_id, self._setting, now_s=round(self._now(), 1), age_s=self._age_s(), at_s=at_s,
                problem=self._problem,
            )  # fmt: skip
        answer = Answer.of(body)
        if at_s is None:
            took_s = time.thread_time() - worked_s
            self._newest = (version, begun_s + max(LOOK_S, min(_LONGEST_S, took_s / _SHARE)), answer)
        return answer

    def series(self, by: Axis, points: int) -> Answer:
        """Curves; kept as `state` is."""
        begun_s, worked_s = time.monotonic(), time.thread_time()
        known = self._series.get((by, points))
        if known is not None and (known[0] == self.version or begun_s < known[1]):
            return known[2]
        version = self.version
        with self._lock:
            answer = Answer.of(series_document(self._history, by, points))
        took_s = time.thread_time() - worked_s
        if len(self._series) > 32:
            self._series.clear()
        self._series[(by, points)] = (version, begun_s + max(LOOK_S, min(_LONGEST_S, took_s / _SHARE)), answer)
        return answer

    def _age_s(self) -> float | None:
        """Seconds since the newest fact: since it came, or by the clocks where it was there before this page."""
        to_s = None if self._history is None else self._history.to_s
        if to_s is None:
            return None
        if self._arrived_s is not None:
            return round(time.monotonic() - self._arrived_s, 1)
        return round(max(0.0, self._now() - to_s), 1)


def find_run(path: Path) -> FolderFacts | None:
    """The run in a folder: the folder itself, or the one in it that was written to last; None: there is none yet."""
    if not path.is_dir():
        return None
    if _written_s(path) is not None:
        return FolderFacts(path, most_bytes=_CHUNK_BYTES)
    runs = {child: at_s for child in path.iterdir() if child.is_dir() and (at_s := _written_s(child)) is not None}
    return FolderFacts(max(runs, key=lambda run: runs[run]), most_bytes=_CHUNK_BYTES) if runs else None


def _written_s(run_dir: Path) -> float | None:
    """When a run was written to last; None where no node recorded anything in this folder."""
    times = [
        (node / name).stat().st_mtime
        for node in run_dir.iterdir()
        if node.is_dir() and is_node_folder(node)
        for name in (EVENTS_FILE, METRICS_FILE)
        if (node / name).exists()
    ]
    return max(times, default=None)


def read_setting(setting: Setting, source: FactSource) -> Setting:
    """What the configuration of a run's nodes says, where it lies beside their facts."""
    setting = replace(setting, place=source.place)
    for path in _files(source, "config.toml")[:1]:
        try:
            config = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        fault, outer = _section(config, "fault"), _section(config, "outer")
        detect_s = fault.get("detect_s", FaultConfig().detect_s)
        words = [str(outer.get("type", "no outer algorithm"))]
        if isinstance(outer.get("inner_steps"), int):
            words.append(f"a round every {outer['inner_steps']} steps")
        data = _section(config, "data")
        if isinstance(data.get("seq_length"), int):
            words.append(f"sequences of {data['seq_length']} tokens")
        known_s = float(detect_s) if isinstance(detect_s, (int, float)) else None
        return replace(setting, detect_s=known_s, config_words=", ".join(words))
    return setting


def _files(source: FactSource, name: str) -> list[Path]:
    """The nodes' files of this name, where they can be had."""
    return [] if source.folder is None else sorted(source.folder.glob(f"*/{name}"))


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def read_sample(setting: Setting, source: FactSource) -> Setting:
    """The newest text that a node generated, where it lies beside its facts."""
    newest: tuple[str, float, str] | None = setting.sample
    for path in _files(source, _SAMPLE):
        try:
            at_s = path.stat().st_mtime
            if newest is None or at_s > newest[1]:
                with path.open(encoding="utf-8", errors="replace") as file:
                    newest = (path.parent.name, at_s, file.read(_SAMPLE_CHARS))
        except OSError:
            continue
    return replace(setting, sample=newest)
