"""Reads the facts that nodes recorded from the run's store; takes the run's token, and no file of a node."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from zeroband.config.store_url import shown_stores
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.store.fact_records import FactBatch, FactLine
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.errors import ConfigError, StoreLost
from zeroband.observe.facts import Fact, FactSource, FolderFacts
from zeroband.observe.view import node_id_of_member, short_key

RETRY_S = 5.0
"""In which the store must answer, if nothing else is said."""
_AGAIN_S = 10.0
"""After which a store that is away is asked again by who has something else to show meanwhile."""


class StoreFacts(FactSource):
    """Follows the streams of all nodes of a run. Writes nothing.

    Every line is given once, whatever the store forgets and is told again. Of a stream that was cut before it was read
    what is left is given. `url`, `run_id` and `token` are those of the run's nodes; a call waits for the store for
    `retry_s`, or RETRY_S. Raises ConfigError where the address is none.
    """

    def __init__(self, url: str, run_id: str, token: str | None, *, retry_s: float | None = None) -> None:
        self._run_id = run_id
        key, retry_s = RunKey.of(token, run_id), RETRY_S if retry_s is None else retry_s
        self._store = RedisStore(url, run_id, key=key, lease_s=retry_s, retry_s=retry_s)
        self._place = f"{shown_stores(url)} {run_id}"
        self._nodes: dict[str, _NodeReader] = {}
        """By their names with their keys."""
        self._unopened: list[str] = []
        """Nodes whose word this token does not open."""
        self._read: list[Fact] = []
        """What was read and not given yet."""

    @property
    def run_id(self) -> str:
        return self._run_id

    @property
    def place(self) -> str:
        return self._place

    def node_ids(self) -> Sequence[str]:
        """The nodes that recorded something in the last days. Raises StoreLost, ConfigError."""
        self._look()
        return sorted(node.shown for node in self._nodes.values())

    def _look(self) -> Mapping[str, FactBatch]:
        """Find nodes. Raises ConfigError where none can be seen for want of the token."""
        if not self._nodes:
            self._store.find_run()
        said = self._store.recorders()
        found = {node: standing for node, standing in said.items() if standing is not None}
        self._unopened = sorted(map(node_id_of_member, said.keys() - found.keys()))
        for node in sorted(found.keys() - self._nodes.keys()):
            self._nodes[node] = _NodeReader(self._shown(node))
        if not self._nodes:
            self._store.require_token()
        self._store.trust_address()  # who has shown the run once is asked again, whatever it refuses for a while
        return found

    def _shown(self, node: str) -> str:
        """The id under which a node is shown; another node of that id is shown with its key."""
        node_id = node_id_of_member(node)
        is_taken = any(known.shown == node_id for known in self._nodes.values())
        return f"{node_id}.{short_key(node)}" if is_taken else node_id

    def read(self, *, but_of: Collection[str] = ()) -> list[Fact]:
        """What is new since the last call, each node's in the order of their times. Raises StoreLost, ConfigError.

        `but_of`: nodes that are not read.
        """
        for name, standing in sorted(self._look().items()):
            if node_id_of_member(name) in but_of:
                continue
            node = self._nodes[name]
            while entries := self._store.read_facts(name, node.behind):
                for id, batch in entries:
                    self._read += node.take(id, batch, standing)
        given, self._read = self._read, []
        return given

    def skipped_lines(self) -> dict[str, int]:
        """Lines that are no records, and entries of the stream that no node of this run wrote, by node."""
        return {node.shown: node.skipped for node in self._nodes.values()}

    def unread(self, *, but_of: Collection[str] = ()) -> list[str]:
        return [f"{node_id}: sealed with another run.token" for node_id in self._unopened if node_id not in but_of]

    def ages_s(self) -> dict[str, float]:
        """By the clock of the store, which an entry's id tells."""
        now_s = time.time()
        return {node.shown: max(0.0, now_s - node.told_at_s) for node in self._nodes.values() if node.behind}

    def close(self) -> None:
        self._store.close()


class _NodeReader:
    """How far a node's stream was read."""

    def __init__(self, shown: str) -> None:
        self.shown = shown
        self.behind = ""
        """Id of the last entry."""
        self.skipped = 0
        self._offsets: Counter[tuple[str, str]] = Counter()
        """Bytes of each file that were given, by its name and by what tells it from others."""

    @property
    def told_at_s(self) -> float:
        """When the last entry came, in seconds of the epoch, by the store's clock."""
        return int(self.behind.split("-")[0]) / 1000

    def take(self, id: str, batch: FactBatch | None, standing: FactBatch) -> list[Fact]:
        """The facts of an entry that are new; before the first ones those that stand and are in no entry any more."""
        self.behind = id
        if batch is None:
            self.skipped += 1
            return []
        lines = [*batch.lines] if self._offsets else [*_before(batch, standing), *batch.lines]
        facts: list[Fact] = []
        for name, (file, offset), record in lines:
            if offset <= self._offsets[name, file]:
                continue
            self._offsets[name, file] = offset
            if record is None:
                self.skipped += 1
            else:
                facts.append(Fact(self.shown, dict(record)))
        return facts


def _before(batch: FactBatch, standing: FactBatch) -> list[FactLine]:
    """Lines that were told before a batch, the first one that is left of a stream."""
    first = {line.name: line.place for line in reversed(batch.lines)}
    ends = {**batch.places, **first}
    return [
        line
        for line in standing.lines
        if line.name in ends and line.place.file == ends[line.name].file and line.place.offset < ends[line.name].offset
    ]


class NearAndFar(FactSource):
    """The nodes of a run whose files lie in a folder, and all others from its store.

    While the store is away those of the folder are given. `now`: seconds of a clock that never jumps.
    """

    def __init__(self, near: FolderFacts, far: StoreFacts, *, now: Callable[[], float] = time.monotonic) -> None:
        self._near = near
        self._far = far
        self._now = now
        self._problem: ConfigError | StoreLost | None = None
        """Why the others could not be had when they were asked for last."""
        self._again_s = 0.0

    @property
    def run_id(self) -> str:
        return self._near.run_id

    @property
    def place(self) -> str:
        return f"{self._near.place} and {self._far.place}"

    @property
    def folder(self) -> Path:
        return self._near.folder

    def node_ids(self) -> list[str]:
        """The nodes of the folder; others come with what they recorded."""
        return self._near.node_ids()

    def read(self) -> list[Fact]:
        """What is new. Raises StoreLost or ConfigError where no files lie here and the others cannot be had."""
        found = [*self._read_far(), *self._near.read()]
        if self._problem is not None and not self._near.node_ids():
            raise self._problem.with_traceback(None)
        return found

    @property
    def has_more(self) -> bool:
        return self._near.has_more

    def _read_far(self) -> list[Fact]:
        if self._problem is not None and self._now() < self._again_s:
            return []
        try:
            found, self._problem = self._far.read(but_of=self._near.node_ids()), None
        except (ConfigError, StoreLost) as error:
            found, self._problem, self._again_s = [], error, self._now() + _AGAIN_S
        return found

    def skipped_lines(self) -> dict[str, int]:
        return {**self._far.skipped_lines(), **self._near.skipped_lines()}

    def unread(self) -> list[str]:
        away = [] if self._problem is None else [f"the other nodes: {self._problem}"]
        return [*self._near.unread(), *away, *self._far.unread(but_of=self._near.node_ids())]

    def ages_s(self) -> dict[str, float]:
        return {**self._far.ages_s(), **self._near.ages_s()}

    def close(self) -> None:
        self._far.close()
