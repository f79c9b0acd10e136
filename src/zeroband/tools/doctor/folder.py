"""Whether ckpt.path is one folder for all examined nodes. Uses the marks of a run, under another run's name."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Generator
from pathlib import Path

from zeroband.checkpoint.layout import MARKS
from zeroband.checkpoint.storage import LocalStorage, open_storage
from zeroband.checks.finding import Finding
from zeroband.config import RunConfig
from zeroband.elastic.membership.holdings import Holding
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.errors import ConfigError
from zeroband.observe.view import node_id_of_member
from zeroband.runtime.holdings import Holdings


class FolderCheck:
    """What one node tells and sees; `look` first puts its mark there, and sees those of the others the next time."""

    def __init__(self, holdings: Holdings, config: RunConfig, member_id: str) -> None:
        self._holdings = holdings
        self._path, self._shared = config.ckpt.path, config.ckpt.shared
        self._member_id = member_id

    def look(self, members: Collection[str]) -> Finding | None:
        """Return what this node sees of these members' folders; None where there is nothing to say."""
        if self._path is None or self._shared is False:
            return None
        try:
            known = self._holdings.exchange(self._member_id, members, Holding())
        except ConfigError as error:
            return Finding("ckpt.path", "not one folder", str(error), stops="start")
        here, elsewhere = self._holdings.sharing(self._member_id, sorted(known))
        if elsewhere:
            seen = f"{self._path} is another folder on {_names(elsewhere)}: each keeps whole checkpoints"
            return Finding("ckpt.path", seen, "mount one folder on all nodes where they are to write one between them")
        return Finding("ckpt.path", f"{self._path} is one folder on {_names(here)}") if len(here) > 1 else None


def _names(members: Collection[str]) -> str:
    return ", ".join(sorted(map(node_id_of_member, members)))


@contextlib.contextmanager
def folder_check(config: RunConfig, store: RedisStore, member_id: str) -> Generator[FolderCheck]:
    """A check that leaves nothing behind. `store`: of the examination."""
    run = config.run.model_copy(update={"id": f"{config.run.id}.doctor"})
    holdings = Holdings(store, config.model_copy(update={"run": run}), member_id)
    try:
        yield FolderCheck(holdings, config, member_id)
    finally:
        holdings.close()
        if config.ckpt.path is not None:
            storage = open_storage(config.ckpt.path, run.id)
            for folder in (f"{storage.url}/{MARKS}", storage.url) if isinstance(storage, LocalStorage) else ():
                with contextlib.suppress(OSError):  # others may have their marks there
                    Path(folder).rmdir()
