"""How a node gets into a run: with its founders, by the join path, and by the join path again after a fence.

Training nodes never wait for a joiner: it fetches a committed state, replays the rounds committed meanwhile, and takes
part in the next one with weight 0, which hands it the same result as everybody.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from zeroband.data.ledger import Range
from zeroband.elastic.epoch import FOUNDING_ROUND
from zeroband.elastic.mesh import on_first_rank
from zeroband.errors import Fenced, RecoveryFailed
from zeroband.observe.events import EventLog
from zeroband.observe.log import get_logger
from zeroband.outer.alone import MEMBER_ID
from zeroband.outer.base import RoundReport, SyncHooks, verify
from zeroband.parallel import LocalMesh, broadcast_json
from zeroband.parts import RunParts

_RETRY_S = 0.5

_log = get_logger(__name__)


class LoneEntry:
    """A node that trains alone is in its run at once."""

    run = None

    def __init__(self, hooks: SyncHooks) -> None:
        self.hooks = hooks

    def enter(self) -> RoundReport | None:
        return None

    def come_back(self, fence: Fenced) -> RoundReport | None:
        raise AssertionError("nobody fences a node that trains alone") from fence

    def assigned(self) -> Sequence[Range]:
        return self.hooks.progress.assigned.get(MEMBER_ID, ())


class Entry:
    """Brings a node into its run. All local ranks call the methods together; `events` is there on local rank 0."""

    def __init__(self, run: RunParts, local: LocalMesh, events: EventLog | None, *, patience_s: float) -> None:
        self.hooks: SyncHooks = run.outer
        self.run = run
        self._local = local
        self._events = events
        self._patience_s = patience_s

    def assigned(self) -> Sequence[Range]:
        """The samples that this node reads in the next round."""
        return self.hooks.progress.assigned.get(self.run.mesh.member_id, ())

    def enter(self) -> RoundReport:
        """Found the run, or join it where others did. Returns the report of the round that made this node a member."""
        is_founded = on_first_rank(self._local, lambda: self.run.store.view(FOUNDING_ROUND).committed is not None)
        was_member = self.hooks.round >= FOUNDING_ROUND  # the store lost its record, and others will bring it back
        if not is_founded and not was_member:
            try:
                report = self.run.outer.found()
            except Fenced as fence:
                if self.run.mesh.is_fenced:
                    raise
                _log.info("the others founded the run; joining", extra={"fields": {"why": str(fence)}})
            else:
                self._emit("joined", member_id=report.member_id, round=report.round)
                return report
        return self.join()

    def come_back(self, fence: Fenced) -> RoundReport:
        """Return after the run went on without this node, whether or not it was founded by then."""
        self._emit("fenced", reason=str(fence))
        self.run.come_back()
        return self.enter()

    def join(self) -> RoundReport:
        """Become a member of a run that goes on.

        Raises RunOver when it is complete, RecoveryFailed when nobody can give this node its state.
        """
        self._emit("recovering", round=self.run.outer.round)
        on_first_rank(self._local, lambda: self.run.fetcher.begin(self.run.outer.sections))
        deadline_s, said = time.monotonic() + self._patience_s, ""
        while True:
            try:
                self._recover()
                report = self.run.outer.join()
            except RecoveryFailed as error:
                if not broadcast_json(time.monotonic() < deadline_s, self._local):
                    raise RecoveryFailed(
                        f"{error}; tried for {self._patience_s:g} s. If the run is over, start one with a new run.id"
                    ) from error
                if str(error) != said:
                    said = str(error)
                    _log.warning("no state yet", extra={"fields": {"why": said}})
                time.sleep(_RETRY_S)
                continue
            self._emit("joined", member_id=self.run.mesh.member_id, round=report.round)
            return report

    def _recover(self) -> None:
        """Fetch a committed state and take it over. Raises RecoveryFailed."""
        fetched = on_first_rank(self._local, self._fetch)
        digest = self.run.outer.adopt(fetched["round"], fetched["payload"])
        try:
            verify(digest, fetched["state"], f"the state of round {fetched['round']}", self._local)
        except RecoveryFailed:
            on_first_rank(self._local, self.run.fetcher.distrust_state)
            raise
        self._emit("recovered", round=fetched["round"], digest=digest, took_s=fetched["took_s"])

    def _fetch(self) -> dict[str, Any]:
        fetched = self.run.fetcher.fetch_state()
        return {"round": fetched.round, "payload": fetched.payload, "state": fetched.state, "took_s": fetched.took_s}

    def _emit(self, kind: str, **fields: object) -> None:
        if self._events is not None:
            self._events.emit(kind, **fields)
