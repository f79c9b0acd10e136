"""Reads nodes' facts from the run's store, with the run's token and without access to the nodes' files."""

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
"""Default time within which the store must answer."""
_RETRY_PAUSE_S = 10.0
"""Pause before an unreachable store is read again by a reader that has local files."""


class StoreFacts(FactSource):
    """Follows the streams of all nodes of a run. Writes nothing.

    Returns every line once, even if the store lost it and it was published again; of a stream that was trimmed before
    it was read, the rest. `url`, `run_id`, `token`: those of the run's nodes. `retry_s`: time to wait for the store;
    None: RETRY_S. Raises ConfigError if the address is invalid.
    """

    def __init__(self, url: str, run_id: str, token: str | None, *, retry_s: float | None = None) -> None:
        self._run_id = run_id
        key, retry_s = RunKey.of(token, run_id), RETRY_S if retry_s is None else retry_s
        self._store = RedisStore(url, run_id, key=key, lease_s=retry_s, retry_s=retry_s)
        self._place = f"{shown_stores(url)} {run_id}"
        self._nodes: dict[str, _NodeReader] = {}
        """By name with key."""
        self._unopened: list[str] = []
        """Nodes whose records were sealed with another token."""
        self._unreturned: list[Fact] = []
        """Facts that were read before an error and not returned yet."""

    @property
    def run_id(self) -> str:
        return self._run_id

    @property
    def place(self) -> str:
        return self._place

    def node_ids(self) -> Sequence[str]:
        """Return the nodes that have facts in the store. Raises StoreLost, ConfigError."""
        self._find_nodes()
        return sorted(node.shown for node in self._nodes.values())

    def _find_nodes(self) -> Mapping[str, FactBatch]:
        """Return the nodes' snapshots. Raises ConfigError if all were sealed with another token."""
        if not self._nodes:
            self._store.find_run()
        snapshots = self._store.recorders()
        found = {node: snapshot for node, snapshot in snapshots.items() if snapshot is not None}
        self._unopened = sorted(map(node_id_of_member, snapshots.keys() - found.keys()))
        for node in sorted(found.keys() - self._nodes.keys()):
            self._nodes[node] = _NodeReader(self._shown(node))
        if not self._nodes:
            self._store.require_token()
        self._store.trust_address()  # it works, so later refusals may pass
        return found

    def _shown(self, node: str) -> str:
        """The displayed name of a node: its id; with its key if another node has that id."""
        node_id = node_id_of_member(node)
        is_taken = any(known.shown == node_id for known in self._nodes.values())
        return f"{node_id}.{short_key(node)}" if is_taken else node_id

    def read(self, *, but_of: Collection[str] = ()) -> list[Fact]:
        """Return new facts, of each node in order of time. Raises StoreLost, ConfigError.

        `but_of`: nodes to skip.
        """
        for name, snapshot in sorted(self._find_nodes().items()):
            if node_id_of_member(name) in but_of:
                continue
            node = self._nodes[name]
            while entries := self._store.read_facts(name, node.last_id):
                for id, batch in entries:
                    self._unreturned += node.take(id, batch, snapshot)
        facts, self._unreturned = self._unreturned, []
        return facts

    def skipped_lines(self) -> dict[str, int]:
        """Count invalid lines and forged entries by node."""
        return {node.shown: node.skipped for node in self._nodes.values()}

    def unread(self, *, but_of: Collection[str] = ()) -> list[str]:
        return [f"{node_id}: sealed with another run.token" for node_id in self._unopened if node_id not in but_of]

    def ages_s(self) -> dict[str, float]:
        """Ages of the newest entries, whose ids have the time of the store's clock."""
        now_s = time.time()
        return {node.shown: max(0.0, now_s - node.last_at_s) for node in self._nodes.values() if node.last_id}

    def close(self) -> None:
        self._store.close()


class _NodeReader:
    """Position in a node's stream."""

    def __init__(self, shown: str) -> None:
        self.shown = shown
        self.last_id = ""
        """Id of the last entry."""
        self.skipped = 0
        self._offsets: Counter[tuple[str, str]] = Counter()
        """Bytes read of each file, by its name and identity."""

    @property
    def last_at_s(self) -> float:
        """Time of the last entry by the store's clock, in seconds since 1970."""
        return int(self.last_id.split("-")[0]) / 1000

    def take(self, id: str, batch: FactBatch | None, snapshot: FactBatch) -> list[Fact]:
        """Return an entry's new facts; before the first entry also those of the snapshot that were trimmed."""
        self.last_id = id
        if batch is None:
            self.skipped += 1
            return []
        lines = [*batch.lines] if self._offsets else [*_before(batch, snapshot), *batch.lines]
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


def _before(batch: FactBatch, snapshot: FactBatch) -> list[FactLine]:
    """The snapshot's lines that precede a batch, the first one left in a stream."""
    first = {line.name: line.place for line in reversed(batch.lines)}
    ends = {**batch.places, **first}
    return [
        line
        for line in snapshot.lines
        if line.name in ends and line.place.file == ends[line.name].file and line.place.offset < ends[line.name].offset
    ]


class FolderAndStoreFacts(FactSource):
    """Reads the nodes whose files are in a folder from there, and all others from the store.

    While the store is unreachable only the folder is read. `now`: a monotonic clock in seconds.
    """

    def __init__(self, near: FolderFacts, far: StoreFacts, *, now: Callable[[], float] = time.monotonic) -> None:
        self._near = near
        self._far = far
        self._now = now
        self._problem: ConfigError | StoreLost | None = None
        """Error of the last read of the store."""
        self._retry_at_s = 0.0

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
        """Return the nodes of the folder; others appear with their facts."""
        return self._near.node_ids()

    def read(self) -> list[Fact]:
        """Return new facts. Raises StoreLost or ConfigError if the folder is empty and the store cannot be read."""
        found = [*self._read_far(), *self._near.read()]
        if self._problem is not None and not self._near.node_ids():
            raise self._problem.with_traceback(None)
        return found

    @property
    def has_more(self) -> bool:
        return self._near.has_more

    def _read_far(self) -> list[Fact]:
        if self._problem is not None and self._now() < self._retry_at_s:
            return []
        try:
            found, self._problem = self._far.read(but_of=self._near.node_ids()), None
        except (ConfigError, StoreLost) as error:
            found, self._problem, self._retry_at_s = [], error, self._now() + _RETRY_PAUSE_S
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
