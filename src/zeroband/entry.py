"""How a node gets into a run: with its founders, by the join path, and by the join path again after a fence.

Training nodes never wait for a joiner: it fetches a committed state, replays the rounds committed meanwhile, and takes
part in the next one with weight 0, which hands it the same result as everybody.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import torch

from zeroband.checkpoint.recovery import Donor, FetchedState, fetch_entry, fetch_state
from zeroband.data.ledger import Range
from zeroband.elastic.epoch import FOUNDING_ROUND, Opening, Ready, Verdict
from zeroband.elastic.mesh import on_first_rank
from zeroband.elastic.progress import Progress
from zeroband.errors import Fenced, RecoveryFailed, RunOver
from zeroband.observe.events import EventLog
from zeroband.observe.log import get_logger
from zeroband.outer.alone import MEMBER_ID
from zeroband.outer.base import RoundReport, SyncHooks
from zeroband.outer.journal import JournalEntry
from zeroband.outer.transaction import RESULT
from zeroband.parallel import LocalMesh, broadcast_json
from zeroband.parts import RunParts

_RETRY_S = 0.5

_log = get_logger(__name__)


class LoneEntry:
    """A node that trains alone is in its run at once."""

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
        self._run = run
        self._local = local
        self._events = events
        self._patience_s = patience_s

    def assigned(self) -> Sequence[Range]:
        """The samples that this node reads in the next round."""
        return self.hooks.progress.assigned.get(self._run.mesh.member_id, ())

    def enter(self) -> RoundReport:
        """Found the run, or join it where others did. Returns the report of the round that made this node a member."""
        is_founded = on_first_rank(self._local, lambda: self._run.store.view(FOUNDING_ROUND).committed is not None)
        if not is_founded:
            try:
                report = self._run.outer.found()
            except Fenced as fence:
                _log.info("the others founded the run; joining", extra={"fields": {"why": str(fence)}})
            else:
                self._emit("joined", member_id=report.member_id, round=report.round)
                return report
        return self.join()

    def come_back(self, fence: Fenced) -> RoundReport:
        """Return after the run went on without this node."""
        self._emit("fenced", reason=str(fence))
        self._run.come_back()
        return self.join()

    def join(self) -> RoundReport:
        """Become a member of a run that goes on.

        Raises RunOver when it is complete, RecoveryFailed when nobody can give this node its state.
        """
        self._emit("recovering", round=self._run.outer.round)
        deadline_s, said = time.monotonic() + self._patience_s, ""
        while True:
            try:
                self._recover()
                report = self._be_admitted()
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
            self._emit("joined", member_id=self._run.mesh.member_id, round=report.round)
            return report

    def _recover(self) -> None:
        """Fetch a committed state and take it over. Raises RecoveryFailed."""
        fetched = on_first_rank(self._local, self._fetch)
        digest = self._run.outer.adopt(fetched["round"], fetched["payload"])
        self._verify(digest, fetched["state"], f"the state of round {fetched['round']}")
        self._emit("recovered", round=fetched["round"], digest=digest, took_s=fetched["took_s"])

    def _fetch(self) -> dict[str, Any]:
        meter = _Meter(self._run)
        buffers = {name: self._run.buffers[name] for name in self._run.outer.sections}
        fetched: FetchedState = fetch_state(self._donors(), self._run.key, buffers, meter.count)
        return {"round": fetched.round, "payload": fetched.payload, "state": fetched.state, "took_s": fetched.took_s}

    def _donors(self) -> list[Donor]:
        """The members of the run that are alive, in random order, so that joiners spread over them. Raises RunOver."""
        view = self._run.store.view(FOUNDING_ROUND)
        if view.committed is None:
            return []
        info = self._run.store.members_info()
        alive = [m for m in view.committed.members if m in view.alive and m in info]
        if not alive and Progress.from_record(view.committed.payload["progress"]).is_complete:
            raise RunOver(f"the run is complete since round {view.committed.round}; start another with a new run.id")
        random.shuffle(alive)
        return [Donor(m, info[m]["host"], info[m]["port"]) for m in alive]

    def _verify(self, digest: str, expected: str, what: str) -> None:
        is_same = broadcast_json(digest == expected, self._local)
        if not is_same:
            raise RecoveryFailed(f"{what} has digest {digest} here and {expected} at its donor")

    def _be_admitted(self) -> RoundReport:
        """Stand at the boundary of the next round until it is open to this node; catch up with rounds it misses."""
        mesh, outer = self._run.mesh, self._run.outer
        while not outer.progress.is_complete:
            round = outer.round + 1
            mesh.announce_ready(Ready(round, 0, outer.state))
            outcome = mesh.await_admission(round)
            if isinstance(outcome, Verdict):
                self._catch_up(outcome.round)
                continue
            try:
                return outer.join(_Openings(self._run, outcome))
            except Fenced as fence:
                if self._run.mesh.board.is_fenced:
                    raise
                _log.info("missed a round; catching up", extra={"fields": {"why": str(fence)}})
        raise RunOver(f"the run ended with round {outer.round}, before this node was a member")

    def _catch_up(self, round: int) -> None:
        """Replay the journal up to a round. Raises RecoveryFailed where the members do not keep it any more."""
        for missed in range(self._run.outer.round + 1, round + 1):
            head = on_first_rank(self._local, lambda missed=missed: self._fetch_entry(missed))
            entry = JournalEntry(missed, self._run.buffers[RESULT], head["payload"], head["state"])
            self._verify(self._run.outer.replay(entry), entry.state, f"the state after round {missed}")

    def _fetch_entry(self, round: int) -> dict[str, Any]:
        entry = fetch_entry(self._donors(), self._run.key, round)
        result: torch.Tensor = self._run.buffers[RESULT]
        if entry.result.shape != result.shape:
            raise RecoveryFailed(
                f"round {round} has {entry.result.numel()} values in the journal, not {result.numel()}"
            )
        result.copy_(entry.result)
        return {"payload": entry.payload, "state": entry.state}

    def _emit(self, kind: str, **fields: object) -> None:
        if self._events is not None:
            self._events.emit(kind, **fields)


class _Openings:
    """The opening that admitted a joiner, then those that follow it while the round is opened again."""

    def __init__(self, run: RunParts, first: Opening) -> None:
        self._run = run
        self._round = first.round
        self._first: Opening | None = first

    def __call__(self) -> Opening:
        opening, self._first = self._first, None
        if opening is not None:
            return opening
        outcome = self._run.mesh.await_admission(self._round)
        if isinstance(outcome, Verdict):
            raise Fenced(f"round {outcome.round} was committed before this node was a member")
        return outcome


class _Meter:
    """Logs how far a fetch is, and shows the guardian that the trainer moves. Called from the fetching threads."""

    def __init__(self, run: RunParts) -> None:
        self._run = run
        self._started_at_s = self._said_at_s = time.monotonic()
        self._done_bytes = 0

    def count(self, chunk_bytes: int, total_bytes: int) -> None:
        self._done_bytes += chunk_bytes
        self._run.mesh.board.advance()
        now_s = time.monotonic()
        if now_s - self._said_at_s > 1.0:
            self._said_at_s = now_s
            rate = self._done_bytes / (now_s - self._started_at_s)
            eta_s = (total_bytes - self._done_bytes) / rate
            fields = {"done": self._done_bytes / total_bytes, "bytes_per_s": rate, "eta_s": eta_s}
            _log.info("fetching the state", extra={"fields": fields})
