"""This node's membership: takes and gives back its lease, waits for the others, votes. Local rank 0 only."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from zeroband.config.schema import ElasticConfig, FaultConfig
from zeroband.elastic.board import NodeBoard
from zeroband.elastic.epoch import (
    Opening,
    Ready,
    Verdict,
    View,
    Wait,
    must_leave,
    next_opening,
    next_verdict,
)
from zeroband.elastic.lease import Guardian, GuardianOrder
from zeroband.elastic.store import Store
from zeroband.errors import Fenced, PeerLost, StoreLost
from zeroband.observe.log import get_logger

_POLL_MIN_S, _POLL_MAX_S = 0.002, 0.05
_REMIND_S = 10.0

_log = get_logger(__name__)

_T = TypeVar("_T")


@dataclass(frozen=True)
class NodeIdentity:
    """What a node is, for its life: its name, its processes, its shared memory."""

    node_id: str
    rank_pids: tuple[int, ...]
    launcher_pid: int
    shm_dir: Path


def new_member_id(node_id: str) -> str:
    """An id for one membership of a node: a node that comes back is another member."""
    return f"{node_id}#{uuid.uuid4().hex[:8]}"


class Member:
    """One membership, from lease to leave.

    Owns the guardian process and the watcher thread, both ended by `close()`. Methods that wait raise Fenced when the
    run went on without this member, and StoreLost when Redis stays silent.
    """

    def __init__(
        self, store: Store, store_url: str, identity: NodeIdentity, board: NodeBoard, fault: FaultConfig, run_id: str
    ) -> None:
        self.member_id = new_member_id(identity.node_id)
        self.store = store
        self._board = board
        board.set_fenced(False)
        order = GuardianOrder(
            store_url=store_url,
            run_id=run_id,
            member_id=self.member_id,
            board=str(board.path),
            shm_dir=str(identity.shm_dir),
            rank_pids=identity.rank_pids,
            launcher_pid=identity.launcher_pid,
            lease_s=fault.lease_s,
            renew_s=fault.renew_s,
            hung_s=fault.hung_s,
            is_first=True,
        )
        self._guardian = Guardian(order)
        self._watcher = _Watcher(store, board, watch_s=fault.watch_s, replace_guardian=self._replace_guardian)
        self._order = order

    def _replace_guardian(self) -> None:
        if not self._guardian.is_running():
            _log.warning("the guardian ended; starting another", extra={"fields": {"pid": self._guardian.pid}})
            self._guardian = Guardian(replace(self._order, is_first=False))

    # -- rounds -------------------------------------------------------------------------------------------------

    def announce_ready(self, ready: Ready) -> None:
        self.store.announce_ready(self.member_id, ready)

    def await_opening(self, round: int, elastic: ElasticConfig, *, start_deadline_s: float) -> Opening:
        """Wait until `round` is open to this member.

        `start_deadline_s`: monotonic time after which founders wait for no further node.
        Raises Fenced if the round was committed, or opened, without this member.
        """

        def decide(view: View) -> Opening | Wait:
            excluded = must_leave(view, self.member_id, round)
            if excluded is not None:
                raise Fenced(excluded.reason)
            start_timed_out = time.monotonic() > start_deadline_s
            return self._decide_opening(view, round, elastic, start_timed_out=start_timed_out)

        return self._poll(round, decide)

    def await_admission(self, round: int, elastic: ElasticConfig) -> Opening | Verdict:
        """A joiner's wait: until `round` is open to this member, or was committed without it (catch up, ask again)."""

        def decide(view: View) -> Opening | Verdict | Wait:
            if view.committed is not None and view.committed.round >= round:
                return view.committed
            return self._decide_opening(view, round, elastic, start_timed_out=True)

        return self._poll(round, decide)

    def _decide_opening(
        self, view: View, round: int, elastic: ElasticConfig, *, start_timed_out: bool
    ) -> Opening | Wait:
        decision = next_opening(
            view,
            round,
            min_nodes=elastic.min_nodes,
            start_nodes=elastic.start_nodes,
            start_timed_out=start_timed_out,
        )
        if isinstance(decision, Wait):
            return decision
        if decision != view.opening and not self.store.propose_opening(decision):
            return Wait("another member's proposal was first")
        if self.member_id not in decision.members:
            return Wait(f"round {round} is open to {len(decision.members)} others")
        return decision

    def vote(self, opening: Opening, digest: str) -> None:
        self.store.vote(opening.version, self.member_id, digest)

    def await_verdict(self, opening: Opening, payload: Mapping[str, Any]) -> Verdict:
        """Wait until the round is committed; `payload` is what this member would write into the verdict.

        Raises PeerLost if the opening cannot be finished, which says: take part in the next opening of the same round.
        """

        def decide(view: View) -> Verdict | Wait:
            if view.committed is not None and view.committed.round >= opening.round:
                if view.committed.version == opening.version:
                    return view.committed
                raise Fenced(f"round {opening.round} was committed without {self.member_id}")
            self._check_opening(view, opening)
            decision = next_verdict(view, opening, payload)
            if decision is None:
                self.store.report_failure(opening.version, "the members hold different results")
                return Wait("results differ")
            if isinstance(decision, Verdict):
                self.store.propose_verdict(decision)
                return Wait("the verdict is being written")
            return decision

        return self._poll(opening.round, decide)

    def _check_opening(self, view: View, opening: Opening) -> None:
        """Raise PeerLost where an opening is superseded or cannot be finished any more."""
        if view.opening is None or view.opening.version != opening.version:
            raise PeerLost(f"round {opening.round} was opened again without some of its members")
        if view.failed is not None:
            raise PeerLost(f"round {opening.round} cannot be finished: {view.failed}")
        lost = tuple(m for m in opening.members if m not in view.alive and m not in view.votes)
        if lost:
            reason = f"{', '.join(lost)} lost during round {opening.round}"
            if self.store.report_failure(opening.version, reason):  # else a lost one came back and voted after all
                raise PeerLost(reason, lost)

    def _poll(self, round: int, decide: Callable[[View], _T | Wait]) -> _T:
        pause_s, reminded_at_s, said = _POLL_MIN_S, time.monotonic(), ""
        while True:
            if self._board.is_fenced:
                raise Fenced(f"the lease of {self.member_id} ran out and the run went on")
            self._board.advance()
            decision = decide(self.store.view(round))
            if not isinstance(decision, Wait):
                return decision
            if decision.reason != said and time.monotonic() - reminded_at_s > _REMIND_S:
                said, reminded_at_s = decision.reason, time.monotonic()
                _log.info(
                    "waiting", extra={"fields": {"round": round, "why": decision.reason, "for": decision.waiting_for}}
                )
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _POLL_MAX_S)

    # -- transfers ----------------------------------------------------------------------------------------------

    def watch(self, opening: Opening | None) -> None:
        """During a transfer, mark it aborted on the board as soon as the opening cannot be finished. None: stop."""
        self._watcher.watch(opening)

    def report_failure(self, opening: Opening, reason: str) -> None:
        self.store.report_failure(opening.version, f"{self.member_id}: {reason}")

    def close(self) -> None:
        """Stop watching and give the lease back."""
        self._watcher.close()
        self._guardian.close()


class _Watcher:
    """One daemon thread that looks at the members' leases while a transfer runs, and after its guardian always."""

    def __init__(self, store: Store, board: NodeBoard, *, watch_s: float, replace_guardian: Callable[[], None]) -> None:
        self._store = store
        self._board = board
        self._watch_s = watch_s
        self._replace_guardian = replace_guardian
        self._opening: Opening | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="membership-watcher", daemon=True)
        self._thread.start()

    def watch(self, opening: Opening | None) -> None:
        self._opening = opening

    def _run(self) -> None:
        while not self._stop.wait(self._watch_s):
            try:
                self._replace_guardian()
                opening = self._opening
                if opening is not None and not self._is_sound(opening):
                    self._board.abort(opening.version)
            except StoreLost as error:
                _log.warning("store out of reach", extra={"fields": {"error": str(error)}})

    def _is_sound(self, opening: Opening) -> bool:
        self._board.advance()
        view = self._store.view(opening.round)
        current = view.opening
        if current is None or current.version != opening.version or view.failed is not None:
            return False
        return all(m in view.alive or m in view.votes for m in opening.members)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
