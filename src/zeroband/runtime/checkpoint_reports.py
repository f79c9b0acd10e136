"""Exchange of reports on the nodes' checkpoint folders, before a node starts or joins a run. Local rank 0, one thread.

Nodes find out by marks whether they share one folder: each writes a file with a random name there, and the others look
for it.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from zeroband.checkpoint.layout import MARKS
from zeroband.checkpoint.storage import Storage, open_storage, reason_of
from zeroband.config.schema import RunConfig
from zeroband.elastic.membership.resume_rules import Holding, other_folders, same_folder
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.errors import ConfigError, StoreLost
from zeroband.observe.log import get_logger
from zeroband.observe.view import node_id_of_member

_STORE_RETRY_S = 2.0
"""Longest wait for the store during a run, which pauses meanwhile."""

_log = get_logger(__name__)


class CheckpointReports:
    """Exchanges the nodes' reports. `close()` removes this node's mark."""

    def __init__(self, store: RedisStore, config: RunConfig, node_id: str) -> None:
        self._store = store
        self._shared = config.ckpt.shared
        self._path = config.ckpt.path
        self._node_id = node_id
        self._storage = None if config.ckpt.path is None else open_storage(config.ckpt.path, config.run.id, node_id)
        self._mark: str | None = None
        """None before the first attempt to write it; empty after a failure."""
        self._looked_for = set[str]()
        self._sees = set[str]()
        self._own = Holding()
        self._known: Mapping[str, Holding] = {}

    def exchange(self, member_id: str, alive: Collection[str], own: Holding) -> Mapping[str, Holding]:
        """Publish this member's report, and return those of all living members.

        `own`: without marks. Raises ConfigError if ckpt.shared=true and some member has another folder.
        """
        published = self._store.holdings()
        self._publish(member_id, published, own)  # before reading: of two nodes at once, one sees the other's mark
        published = self._store.holdings()
        others = {member: report for member, report in published.items() if member in alive and member != member_id}
        self._look_for({report.mark for report in others.values()})
        self._publish(member_id, published, own)
        known = self._known = {**others, member_id: self._own}
        if self._shared is True and (elsewhere := other_folders(member_id, known)):
            named = ", ".join(sorted(map(node_id_of_member, elsewhere)))
            raise ConfigError(
                f"ckpt.shared=true, and ckpt.path={self._path!r} is not the folder of {named}: mount one folder on all "
                "nodes, or set ckpt.shared to auto, so that each keeps whole checkpoints"
            )
        return known

    def _publish(self, member_id: str, published: Mapping[str, Holding], own: Holding) -> None:
        self._own = replace(own, mark=self._own_mark(), sees=tuple(sorted(self._sees)))
        if published.get(member_id) != self._own:
            self._store.publish_holding(member_id, self._own)

    def _own_mark(self) -> str:
        if self._mark is None:
            self._mark = "" if self._storage is None else self._make_mark(self._storage)
        return self._mark

    def _make_mark(self, storage: Storage) -> str:
        """Write a mark, remove those of this node's killed predecessors, and note the others'."""
        mark = f"{self._node_id}.{uuid.uuid4().hex}"
        try:
            storage.write(f"{MARKS}/{mark}", (b"",))
            for found in storage.sizes(MARKS):
                if found.rpartition(".")[0] == self._node_id and found != mark:
                    storage.remove(f"{MARKS}/{found}")
                elif found != mark:
                    self._sees.add(found)
        except OSError as error:
            fields = {"path": storage.url, "why": reason_of(error)}
            _log.warning("cannot write to ckpt.path, so this node shares no checkpoint", extra={"fields": fields})
            return ""
        return mark

    def _look_for(self, marks: Collection[str]) -> None:
        for mark in {*marks} - self._looked_for - self._sees - {""}:
            self._looked_for.add(mark)
            if self._storage is not None and "/" not in mark:
                with contextlib.suppress(OSError):
                    self._storage.read(f"{MARKS}/{mark}")
                    self._sees.add(mark)

    def folder_peers(self, member_id: str, members: Sequence[str]) -> tuple[frozenset[str], frozenset[str]]:
        """Return the node ids of the members that share this one's folder, itself included, and of those with another.

        A member without ckpt.path is in neither.
        """
        own = node_id_of_member(member_id)
        if self._shared is False:
            return frozenset({own}), frozenset()
        if not {*members} <= self._known.keys():
            with contextlib.suppress(StoreLost):
                published = self._store.holdings(retry_s=_STORE_RETRY_S)
                if member_id not in published:  # the store lost it
                    self._store.publish_holding(member_id, self._own, retry_s=_STORE_RETRY_S)
                self._known = {**published, member_id: self._own}
        known = {member: self._known[member] for member in members if member in self._known}
        here, elsewhere = same_folder(member_id, known), other_folders(member_id, known)
        return frozenset(map(node_id_of_member, here)), frozenset(map(node_id_of_member, elsewhere))

    def close(self) -> None:
        if self._storage is not None and self._mark:
            with contextlib.suppress(OSError):
                self._storage.remove(f"{MARKS}/{self._mark}")
