"""A node's word to the others of what it has at its ckpt.path, and theirs: told before it founds or joins a run.

Whether two nodes see one folder they find out by marks: files that each of them makes there under a new random
name, and that the others then look for. Local rank 0, one thread.
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
"""Longest wait for the store in the middle of a run, which waits meanwhile."""

_log = get_logger(__name__)


class Holdings:
    """What the nodes have at their ckpt.path. `close()` removes this node's mark."""

    def __init__(self, store: RedisStore, config: RunConfig, node_id: str) -> None:
        self._store = store
        self._shared = config.ckpt.shared
        self._path = config.ckpt.path
        self._node_id = node_id
        self._storage = None if config.ckpt.path is None else open_storage(config.ckpt.path, config.run.id, node_id)
        self._mark: str | None = None
        """None: it has not tried to make one."""
        self._looked_for = set[str]()
        self._sees = set[str]()
        self._told = Holding()
        self._known: Mapping[str, Holding] = {}

    def exchange(self, member_id: str, alive: Collection[str], standing: Holding) -> Mapping[str, Holding]:
        """Tell what this member has; what it and the other living ones have told.

        `standing`: without marks. Raises ConfigError where all nodes are to see one folder, and some see another.
        """
        told = self._store.holdings()
        self._say(member_id, told, standing)  # so that of two that look at once, one sees the other
        told = self._store.holdings()
        others = {member: said for member, said in told.items() if member in alive and member != member_id}
        self._look_for({said.mark for said in others.values()})
        self._say(member_id, told, standing)
        known = self._known = {**others, member_id: self._told}
        if self._shared is True and (elsewhere := other_folders(member_id, known)):
            named = ", ".join(sorted(map(node_id_of_member, elsewhere)))
            raise ConfigError(
                f"ckpt.shared=true, and ckpt.path={self._path!r} is not the folder of {named}: mount one folder on all "
                "nodes, or leave ckpt.shared at auto, so that each keeps whole checkpoints"
            )
        return known

    def _say(self, member_id: str, told: Mapping[str, Holding], standing: Holding) -> None:
        self._told = replace(standing, mark=self._own_mark(), sees=tuple(sorted(self._sees)))
        if told.get(member_id) != self._told:
            self._store.tell_holding(member_id, self._told)

    def _own_mark(self) -> str:
        if self._mark is None:
            self._mark = "" if self._storage is None else self._make_mark(self._storage)
        return self._mark

    def _make_mark(self, storage: Storage) -> str:
        """Leave a mark in place of those that this node left when it was killed; see whose are there."""
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
            _log.warning("cannot write to ckpt.path, so this node saves alone", extra={"fields": fields})
            return ""
        return mark

    def _look_for(self, marks: Collection[str]) -> None:
        for mark in {*marks} - self._looked_for - self._sees - {""}:
            self._looked_for.add(mark)
            if self._storage is not None and "/" not in mark:
                with contextlib.suppress(OSError):
                    self._storage.read(f"{MARKS}/{mark}")
                    self._sees.add(mark)

    def sharing(self, member_id: str, members: Sequence[str]) -> tuple[frozenset[str], frozenset[str]]:
        """Node ids of the members that write one checkpoint with this one, itself included; of those that do not.

        A member that has no ckpt.path is in neither.
        """
        own = node_id_of_member(member_id)
        if self._shared is False:
            return frozenset({own}), frozenset()
        if not {*members} <= self._known.keys():
            with contextlib.suppress(StoreLost):
                told = self._store.holdings(retry_s=_STORE_RETRY_S)
                if member_id not in told:  # the store lost it
                    self._store.tell_holding(member_id, self._told, retry_s=_STORE_RETRY_S)
                self._known = {**told, member_id: self._told}
        known = {member: self._known[member] for member in members if member in self._known}
        here, elsewhere = same_folder(member_id, known), other_folders(member_id, known)
        return frozenset(map(node_id_of_member, here)), frozenset(map(node_id_of_member, elsewhere))

    def close(self) -> None:
        if self._storage is not None and self._mark:
            with contextlib.suppress(OSError):
                self._storage.remove(f"{MARKS}/{self._mark}")
