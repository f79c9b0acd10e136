"""A node's way into its run: a loop over a state table until it is a member, and the action of each state.

The table is in `elastic/membership/join_states.py`. Training nodes never wait for a joiner: it fetches a committed
state, replays the rounds committed since, and trains at once on samples that it claims. (If every step is a round, it
first takes part in the next one.) Every failure on the way is an event of the table; no other place retries a join.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from torch import Tensor

from zeroband.checkpoint.restorer import Restorer, SavedState
from zeroband.data.ledger import SHARED, count
from zeroband.elastic.membership.departure import Departure
from zeroband.elastic.membership.join_states import (
    PAUSES,
    STATELESS,
    TABLE,
    JoinEvent,
    JoinState,
    JoinTimeouts,
    next_state,
)
from zeroband.elastic.membership.orders import require_admitted
from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.membership.records import BOOTSTRAP_ROUND, RestartPoint, View
from zeroband.elastic.membership.resume_rules import (
    begins_on_checkpoint,
    is_abandoned,
    members_of,
    pending_restart,
    rounds_since,
    way_in,
)
from zeroband.elastic.recovery.client import FetchedState
from zeroband.elastic.rounds.elastic_device_mesh import on_first_rank
from zeroband.elastic.rounds.interfaces import Scorer, verify
from zeroband.elastic.rounds.rollback import RolledBack
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.errors import (
    ConfigError,
    Fenced,
    Leaving,
    RecoveryFailed,
    RoundsMissed,
    RunOver,
    StoreLost,
    ZerobandError,
)
from zeroband.node.mesh import LocalMesh, broadcast_json
from zeroband.observe.events import Events
from zeroband.observe.log import get_logger
from zeroband.outer.many_steps import ManySteps
from zeroband.runtime.node_parts import NodeParts
from zeroband.runtime.node_runtime import NodeRuntime, load_state, state_on_all
from zeroband.runtime.restart import Restart
from zeroband.state.round_state import RoundState

_log = get_logger(__name__)

_RETRY_S = 0.5

_VERIFIED = frozenset({JoinEvent.RECALLED, JoinEvent.FETCHED, JoinEvent.CAUGHT_UP, JoinEvent.GONE_BACK})
"""Events after which this node holds a verified state."""

_EVENT_OF: Mapping[type[ZerobandError], JoinEvent] = {
    RolledBack: JoinEvent.ROLLED_BACK,
    RoundsMissed: JoinEvent.MISSED,
    RecoveryFailed: JoinEvent.FAILED,
    RunOver: JoinEvent.RUN_OVER,
    Leaving: JoinEvent.LEAVING,
    ConfigError: JoinEvent.REFUSED,
    StoreLost: JoinEvent.STORE_LOST,
}


@dataclass(frozen=True)
class JoinOutcome:
    """Outcome of one state's action."""

    event: JoinEvent
    cause: ZerobandError | None = None
    """The error behind the event, if any."""
    rounds: Sequence[RoundReport] = ()
    """Round that made this node a member; empty if its first contribution will."""


class Joiner:
    """Brings a node into its run, and back into it. Call the methods on all local ranks together."""

    def __init__(self, steps: NodeRuntimeSteps, local: LocalMesh, departure: Departure, events: Events) -> None:
        self._steps = steps
        self._local = local
        self._departure = departure
        self._events = events
        self._since = ""
        self._reported: dict[JoinState, str] = {}
        self._newest: tuple[JoinState, bool] | None = None
        """The state reported last, and whether it was new."""

    @property
    def verified_at_s(self) -> float | None:
        """As in `Entry`."""
        return self._steps.verified_at_s

    def enter(self) -> Sequence[RoundReport]:
        """Start the run, or join it if others did; returns what `Entry.enter` does.

        Raises ConfigError if another machine is in the run under this node's name, RecoveryFailed after no progress
        towards a state for too long, RunOver, Leaving, StoreLost.
        """
        return self._run(JoinState.OUTSIDE, JoinOutcome(JoinEvent.STARTED))

    def rejoin(self, why: Fenced | RolledBack) -> Sequence[RoundReport]:
        """Become a member again after the run continued without this node or rolled back. Raises as `enter` does."""
        event = JoinEvent.FENCED if isinstance(why, Fenced) else JoinEvent.ROLLED_BACK
        return self._run(JoinState.MEMBER, JoinOutcome(event, why))

    def _run(self, state: JoinState, outcome: JoinOutcome) -> Sequence[RoundReport]:
        self._since, self._reported = f"{datetime.now(UTC):%H:%M:%SZ}", {}
        while True:
            state = next_state(state, outcome.event)
            self._report(state, outcome)
            if state is JoinState.MEMBER:
                return outcome.rounds
            if state is JoinState.ENDED:
                assert outcome.cause is not None, f"{outcome.event} without an error"
                raise outcome.cause
            if outcome.event in PAUSES:
                time.sleep(_RETRY_S)
            outcome = self._step(state, outcome.cause)

    def _step(self, state: JoinState, cause: ZerobandError | None) -> JoinOutcome:
        """Run a state's action; an error that it raises is an outcome."""
        if state in STATELESS and broadcast_json(self._departure.is_asked, self._local):
            return JoinOutcome(JoinEvent.LEAVING, Leaving("left as asked, before it was a member"))
        try:
            return self._steps.take(state, cause)
        except Fenced as fence:
            is_passed_over = JoinEvent.PASSED_OVER in TABLE[state] and not self._steps.is_fenced()
            return JoinOutcome(JoinEvent.PASSED_OVER if is_passed_over else JoinEvent.FENCED, fence)
        except tuple(_EVENT_OF) as error:
            return JoinOutcome(next(event for kind, event in _EVENT_OF.items() if isinstance(error, kind)), error)

    def _report(self, state: JoinState, outcome: JoinOutcome) -> None:
        """Emit an event for a state that is new, and for the one after it: the last event shows where the node is.

        A state is new the first time, and when its cause differs from last time.
        """
        why = f"{outcome.event}: {outcome.cause}" if outcome.cause is not None else str(outcome.event)
        is_new, before = self._reported.get(state) != why, self._newest
        self._newest = state, is_new
        if is_new or (before is not None and before[1] and before[0] is not state):
            self._reported[state] = why
            self._events.emit("join_state", state=str(state), why=why, since=self._since)


# -- the actions of a node in a run of several ----------------------------------------------------------------------


def open_runtime(
    node: NodeParts, events: Events, stack: ExitStack, scorer: Scorer | None = None
) -> tuple[NodeRuntime, Joiner]:
    """Open a node's part in a run of several, and its way in; `stack` closes it. `scorer`: as for `NodeRuntime`."""
    run = NodeRuntime(node, on_event=events.emit, scorer=scorer)
    stack.push(run.leave)
    return run, Joiner(NodeRuntimeSteps(node, run, events), node.local, node.departure, events)


class NodeRuntimeSteps:
    """The actions of the join table for a node among others. Call the methods on all local ranks together."""

    def __init__(self, node: NodeParts, run: NodeRuntime, events: Events) -> None:
        self._node, self._run, self._events = node, run, events
        self._local = node.local
        self._restart = Restart(node, run, events)
        self._timeouts = JoinTimeouts(node.config.elastic.start_timeout_s)
        self._steps: Mapping[JoinState, Callable[[ZerobandError | None], JoinOutcome]] = {
            JoinState.WAIT_OLD_LEASE: self._wait_for_old_lease,
            JoinState.RESTORE_LOCAL: self._restore_local,
            JoinState.DISCOVER: self._discover,
            JoinState.PICK_CHECKPOINT: self._pick_checkpoint,
            JoinState.FOUNDING: self._bootstrap,
            JoinState.FETCHING: self._fetch,
            JoinState.ANNOUNCING: self._announce,
            JoinState.CATCHING_UP: self._catch_up,
            JoinState.REJOIN: self._rejoin,
            JoinState.ROLL_BACK: self._roll_back,
        }
        self.verified_at_s: float | None = None
        """Monotonic time at which this node's state was verified; None after starting the run."""
        self._bootstrap_round = BOOTSTRAP_ROUND
        self._is_fetching = False
        """Whether the section buffers hold a partly fetched state."""
        self._failure: ZerobandError | None = None
        """Why the newest attempt to get a state failed; None during the next attempt."""
        self._bytes_before = 0
        """Bytes verified before the newest attempt."""
        self._taken: int | None = None
        """Round of the state that this attempt loaded."""
        self._warned = ""

    def take(self, state: JoinState, cause: ZerobandError | None) -> JoinOutcome:
        """Run the action of a state. `cause`: the error that led to the state. Raises ZerobandError."""
        outcome = self._steps[state](cause)
        if outcome.event in _VERIFIED:
            self.verified_at_s = time.monotonic()
        return outcome

    def is_fenced(self) -> bool:
        """Whether the run continued without this node, which ended its membership."""
        return self._run.mesh.is_fenced

    # -- from local state ---------------------------------------------------------------------------------------

    def _wait_for_old_lease(self, _cause: ZerobandError | None) -> JoinOutcome:
        def wait() -> None:
            self._run.mesh.member.outlast_duplicates()
            self._restart.forget()
            self._restart.exchange(self._run.store.view(BOOTSTRAP_ROUND), resumes=self._node.resumes)

        on_first_rank(self._local, wait)
        return JoinOutcome(JoinEvent.FREE)

    def _restore_local(self, _cause: ZerobandError | None) -> JoinOutcome:
        from_s, run = time.monotonic(), self._run
        found = state_on_all(self._local, RoundState, lambda: run.memory.recall(run.buffers.numel))
        if found is None:
            return JoinOutcome(JoinEvent.NOTHING)
        try:
            digest = load_state(run.outer, found, "what this node had in memory", self._local)
        finally:  # a state that fails to verify must not be tried again after a fence
            on_first_rank(self._local, run.memory.drop_set_aside)
        self._taken = found.round
        took_s = round(time.monotonic() - from_s, 3)
        on_first_rank(self._local, lambda: self._report_restored(found))
        self._events.emit("recovered", round=found.round, digest=digest, took_s=took_s, source="memory")
        return JoinOutcome(JoinEvent.RECALLED)

    def _report_restored(self, found: RoundState) -> None:
        """Emit the committed round of the state in memory: the trainer may have crashed before. Local rank 0."""
        verdict = self._run.store.view(BOOTSTRAP_ROUND).committed
        if verdict is None or verdict.round != found.round:
            return  # the others have reported it
        plan = verdict.plan
        self._events.emit(
            "round_committed",
            round=verdict.round,
            epoch=plan.epoch,
            members=list(plan.members),
            digest=found.state_digest,
            weights=list(plan.weights),
            samples=[steps * self._node.config.train.batch_size for steps in plan.steps],
            late=list(plan.late),
            **({"claims": claims} if (claims := plan.claim_records()) else {}),
            progress=found.record["progress"],
        )

    def _roll_back(self, cause: ZerobandError | None) -> JoinOutcome:
        assert isinstance(cause, RolledBack)
        report = cause.report
        digest = self._run.outer.adopt(report.round, cause.record, self._staged())
        verify(digest, report.state_digest, f"the checkpoint of step {cause.step}", self._local)
        has_inner = self._run.load_inner(cause.step)
        skipped = {corpus: [list(span) for span in spans] for corpus, spans in cause.record.get("skipped", {}).items()}
        place = {"round": report.round, "step": cause.step, "digest": digest}
        self._events.emit("rolled_back", **place, has_inner=has_inner, skipped=skipped)
        on_first_rank(self._local, lambda: self._restorer.point_latest(cause.step))
        if report.progress.is_complete or self._run.outer.upcoming():
            return JoinOutcome(JoinEvent.GONE_BACK, rounds=(report,))
        return JoinOutcome(JoinEvent.IDLE)  # it had requested no samples, since the run was about to end

    @property
    def _restorer(self) -> Restorer:
        assert self._run.restorer is not None, "a checkpoint was read"
        return self._run.restorer

    def _staged(self) -> Mapping[str, Tensor] | None:
        """Return the staged checkpoint on local rank 0, else None."""
        return self._restorer.pop_staged() if self._local.rank == 0 else None

    # -- choosing the way in ------------------------------------------------------------------------------------

    def _discover(self, cause: ZerobandError | None) -> JoinOutcome:
        event = JoinEvent(on_first_rank(self._local, lambda: self._choose(cause)))
        if event in (JoinEvent.FOUND, JoinEvent.BEGIN):
            self._bootstrap_round = BOOTSTRAP_ROUND
            self._is_fetching = False  # reading a checkpoint overwrites the same buffers
            self._restart.begin()
        return JoinOutcome(event)

    def _choose(self, cause: ZerobandError | None) -> JoinEvent:
        """Choose the next step from the store's records. Local rank 0.

        Raises RecoveryFailed after no progress for too long, ConfigError if this node is banned.
        """
        if cause is not None:
            self._note_failure(cause)
        view = self._run.store.view(BOOTSTRAP_ROUND)
        require_admitted(view.orders, self._run.mesh.member_id)
        if is_abandoned(view):
            self._restart.exchange(view, resumes=self._node.resumes)
        way = way_in(view, resumes=self._restart.may_restart(view))
        begins = isinstance(way, RestartPoint) or way in (JoinEvent.BEGIN, JoinEvent.FOUND)
        if begins and not self._run.store.may_found():
            return JoinEvent.WAIT
        if isinstance(way, RestartPoint):
            return JoinEvent.BEGIN
        if way in (JoinEvent.BEGIN, JoinEvent.WAIT) or (way is JoinEvent.FOUND and not self._knows_run):
            return way
        agreed = pending_restart(view)
        is_following = way is JoinEvent.JOIN and agreed is not None and agreed.member in view.alive
        if is_following:
            self._timeouts.progressed()
        if self._failure is not None:
            self._require_time_left(self._failure, view)
            self._failure = None
        if is_following and self._node.config.elastic.start_nodes > 1:
            return JoinEvent.BEGIN  # the bootstrap waits for this node
        return JoinEvent.FOLLOW if is_following else JoinEvent.JOIN

    @property
    def _knows_run(self) -> bool:
        """Whether the run exists already: if the store shows none, it lost the record, and members will restore it."""
        return self._is_fetching or self._run.outer.round >= BOOTSTRAP_ROUND

    def _note_failure(self, failure: ZerobandError) -> None:
        """Note a failed attempt, and whether it made progress.

        It did if it verified more bytes of a state, or replayed more than one round after the loaded state: the last
        replayed round may be the one that fails to verify.
        """
        if self._taken is None:
            is_nearer = self._run.recovery.verified_bytes > self._bytes_before
        else:
            is_nearer = self._run.outer.round > self._taken + 1
        self._failure = failure
        if is_nearer:
            self._timeouts.progressed()
        else:
            self._timeouts.failed(time.monotonic())

    def _require_time_left(self, failure: ZerobandError, view: View) -> None:
        left_s = self._timeouts.left_s(time.monotonic())
        if left_s <= 0:
            raise RecoveryFailed(
                f"{failure}; no progress for {self._timeouts.timeout_s:g} s. If the run's nodes are gone, resume from "
                "one of its checkpoints with --resume, or start a new run with another run.id"
            ) from failure
        if str(failure) != self._warned:
            self._warned = str(failure)
            until = datetime.now(UTC) + timedelta(seconds=left_s)
            waits_for = sorted(members_of(view) & view.alive)
            fields = {"why": self._warned, "waits_for": waits_for, "until": f"{until:%H:%M:%SZ}"}
            way_out = "if these nodes are gone: --resume continues from a checkpoint once their leases have expired"
            _log.warning("no state yet", extra={"fields": {**fields, "way_out": way_out}})

    # -- starting a run -----------------------------------------------------------------------------------------

    def _pick_checkpoint(self, _cause: ZerobandError | None) -> JoinOutcome:
        event, round = self._restart.agree()
        if event is JoinEvent.AGREED:
            self._bootstrap_round = round
        return JoinOutcome(event)

    def _bootstrap(self, _cause: ZerobandError | None) -> JoinOutcome:
        report = self._run.outer.found(self._bootstrap_round)
        self.verified_at_s = None
        return self._become_member(JoinEvent.FOUNDED, report.round, report)

    # -- joining the members ------------------------------------------------------------------------------------

    def _fetch(self, _cause: ZerobandError | None) -> JoinOutcome:
        outer, recovery = self._run.outer, self._run.recovery
        if not self._is_fetching:
            self._is_fetching = True
            self._timeouts.progressed()
            self._events.emit("recovering", round=outer.round)
            on_first_rank(self._local, lambda: recovery.begin(outer.sections, mixes=isinstance(outer, ManySteps)))
            if self._load_checkpoint():
                return JoinOutcome(JoinEvent.FETCHED)
        self._bytes_before, self._taken = recovery.verified_bytes, None
        fetched = state_on_all(self._local, FetchedState, recovery.fetch_state)
        newest = max((later[2] for later in fetched.later), default=fetched.round)
        digest = outer.adopt(fetched.round, fetched.record, later=fetched.later)
        try:
            if newest == fetched.round:
                verify(digest, fetched.state_digest, f"the state of round {newest}", self._local)
            else:
                outer.catch_up(newest)
                digest = outer.state_digest
        except RecoveryFailed:
            if outer.round == newest:  # the fetched state is wrong; otherwise a round is missing in all journals
                on_first_rank(self._local, recovery.distrust_state)
            raise
        self._taken = newest
        place = {"round": newest, "digest": digest}
        self._events.emit("recovered", **place, took_s=fetched.took_s, source="members")
        return JoinOutcome(JoinEvent.FETCHED)

    def _load_checkpoint(self) -> bool:
        """Load the newest durable checkpoint and replay the rounds since, if that transfers less than the state."""
        from_s, found = time.monotonic(), on_first_rank(self._local, self._checkpoint_to_join_from)
        if found is None:
            return False
        outer, step = self._run.outer, found["step"]
        try:
            saved = state_on_all(self._local, SavedState, lambda: self._restorer.read(step, self._run.sections))
            load_state(outer, saved, f"the checkpoint of step {step}", self._local)
            outer.catch_up(found["newest"])
        except RecoveryFailed as error:
            fields = {"step": step, "why": str(error)}
            _log.warning("checkpoint unusable, fetching the state from peers", extra={"fields": fields})
            return False
        self._taken = outer.round
        place = {"round": outer.round, "digest": outer.state_digest}
        self._events.emit("recovered", **place, took_s=round(time.monotonic() - from_s, 3), source="checkpoint")
        return True

    def _checkpoint_to_join_from(self) -> dict[str, int] | None:
        """Return the newest durable checkpoint's step and the newest round; None if fetching the state is cheaper.

        Also None if the members' journals do not reach back to the checkpoint. Local rank 0.
        """
        run = self._run
        if run.restorer is None or self._node.config.ckpt.path is None or not run.is_large:
            return None
        stamp, view = run.restorer.newest(), run.store.view(BOOTSTRAP_ROUND)
        missed = None if stamp is None else rounds_since(view, session=stamp.session, round=stamp.round)
        if stamp is None or missed is None:
            return None
        try:
            entry_bytes = run.recovery.entry_bytes(stamp.round + 1) if missed else 0
        except RecoveryFailed:
            return None
        is_taken = begins_on_checkpoint(missed, entry_bytes=entry_bytes, state_bytes=run.state_bytes)
        return {"step": stamp.inner_step, "newest": stamp.round + missed} if is_taken else None

    def _announce(self, _cause: ZerobandError | None) -> JoinOutcome:
        outer = self._run.outer
        report = outer.join()
        if report is None and not outer.upcoming():
            return JoinOutcome(JoinEvent.WAIT)  # only closing rounds without steps are left
        outcome = self._become_member(JoinEvent.ADMITTED, outer.round + 1 if report is None else report.round, report)
        progress = outer.progress if report is None else report.progress
        if (newer := on_first_rank(self._local, lambda: self._newer_than(progress))) is not None:
            self._events.emit("newer_checkpoint", step=newer, at=progress.inner_step)
        return outcome

    def _become_member(self, event: JoinEvent, round: int, report: RoundReport | None) -> JoinOutcome:
        """Report the membership. `round`: first that can count this node. `report`: of the one that admitted it."""
        self._forget_attempts()
        self._events.emit("joined", member_id=self._run.mesh.member_id, round=round)
        self._warn_of_other_documents(self._run.outer.progress if report is None else report.progress)
        return JoinOutcome(event, rounds=() if report is None else (report,))

    def _newer_than(self, progress: Progress) -> int | None:
        """Return the step of this node's newest checkpoint of the run if it is ahead of the run; else None."""
        held = self._restart.own_report().held
        return held.step if held is not None and held.is_own and held.step > progress.inner_step else None

    def _warn_of_other_documents(self, progress: Progress) -> None:
        """Warn if this node had other private documents before. Their ledger stays; no other node owes the samples."""
        for corpus, ledger in progress.ledgers.items():
            is_own = corpus.startswith(f"{self._node.node_id}/") and self._node.corpus != SHARED
            if is_own and corpus != self._node.corpus and self._local.rank == 0:
                fields = {"before": corpus, "owed": count(ledger.owed), "now": self._node.corpus}
                _log.warning("private documents changed: their samples count from 0", extra={"fields": fields})

    def _catch_up(self, cause: ZerobandError | None) -> JoinOutcome:
        assert isinstance(cause, RoundsMissed)
        outer = self._run.outer
        on_first_rank(self._local, lambda: self._run.recovery.judge(outer.round, outer.state_digest))
        outer.catch_up(cause.round)
        return JoinOutcome(JoinEvent.CAUGHT_UP)

    def _rejoin(self, cause: ZerobandError | None) -> JoinOutcome:
        self._events.emit("fenced", reason=str(cause))
        self._forget_attempts()
        self._run.membership.replace_member()
        return JoinOutcome(JoinEvent.RETURNED)

    def _forget_attempts(self) -> None:
        """Reset the attempts' deadline: earlier failures do not count against the next attempt."""
        self._is_fetching, self._failure = False, None
        self._timeouts.progressed()
