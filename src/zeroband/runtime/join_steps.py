"""What a node does in each state of its way into a run of several (`runtime/join.py` says when)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from zeroband.checkpoint.restorer import SavedState
from zeroband.data.ledger import SHARED, count
from zeroband.elastic.membership.epoch import Wait
from zeroband.elastic.membership.holdings import (
    Held,
    Holding,
    choose,
    holders,
    is_same,
    ordered_step,
    why_none,
)
from zeroband.elastic.membership.join_states import JoinEvent, JoinState, JoinTimeouts
from zeroband.elastic.membership.orders import require_admitted
from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.membership.records import FOUNDING_ROUND, RestartPoint, View
from zeroband.elastic.membership.resume_rules import is_abandoned, members_of, pending, restart_point_after, way_in
from zeroband.elastic.rounds.elastic_device_mesh import on_first_rank
from zeroband.elastic.rounds.interfaces import Scorer, verify
from zeroband.elastic.rounds.rollback import RolledBack
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.errors import ConfigError, RecoveryFailed, RoundsMissed, RunOver, ZerobandError
from zeroband.observe.events import Events
from zeroband.observe.log import get_logger
from zeroband.observe.view import node_id_of_member
from zeroband.runtime.join import Joiner, Outcome
from zeroband.runtime.node_parts import NodeParts
from zeroband.runtime.node_runtime import NodeRuntime
from zeroband.state.round_state import RoundState

_LINGER_S = 2.0
"""A node stays for so long when the nodes cannot agree: else one that looks after it would miss the reason."""

_log = get_logger(__name__)


def open_replica(
    node: NodeParts, events: Events, stack: ExitStack, scorer: Scorer | None = None
) -> tuple[NodeRuntime, Joiner]:
    """A node's place in a run of several, and its way in; `stack` gives it back. `scorer`: as for `NodeRuntime`."""
    run = NodeRuntime(node, on_event=events.emit, scorer=scorer)
    stack.push(run.leave)
    return run, Joiner(NodeRuntimeSteps(node, run, events), node.local, node.departure, events)


class NodeRuntimeSteps:
    """The steps of a node that trains with others."""

    def __init__(self, node: NodeParts, run: NodeRuntime, events: Events) -> None:
        self._run = run
        self._local = node.local
        self._events = events
        self._batch_size, self._total_steps = node.config.train.batch_size, node.config.train.total_steps
        self._node_id, self._corpus = node.node_id, node.corpus
        self._patience = JoinTimeouts(node.config.elastic.start_timeout_s)
        self._steps: Mapping[JoinState, Callable[[ZerobandError | None], Outcome]] = {
            JoinState.WAIT_OLD_LEASE: self._outlast,
            JoinState.RESTORE_LOCAL: self._recall,
            JoinState.DISCOVER: self._look,
            JoinState.PICK_CHECKPOINT: self._agree,
            JoinState.FOUNDING: self._found,
            JoinState.FETCHING: self._fetch,
            JoinState.ANNOUNCING: self._announce,
            JoinState.CATCHING_UP: self._catch_up,
            JoinState.REJOIN: self._return,
            JoinState.ROLL_BACK: self._go_back,
        }
        self._founding_round = FOUNDING_ROUND
        self._saved: SavedState | None = None
        """The checkpoint that lies in the section buffers; local rank 0 only."""
        self._told: Mapping[str, Holding] = {}
        """What the living nodes said that they have at their ckpt.path, as of the last look; local rank 0 only."""
        self._standing: tuple[int | None, Holding] | None = None
        """What this node has, for the step that was asked for, until something is known to have changed."""
        self._rejected: dict[int, str] = {}
        """Steps of checkpoints that were read on this way in and do not verify, and why."""
        self._refusal: tuple[float, ZerobandError] | None = None
        """Since when the nodes cannot agree, and why not."""
        self._start_nodes = node.config.elastic.start_nodes
        self._agrees_from_s = 0.0
        self._is_fetching = False
        """A fetch was begun, and what it got so far lies in the section buffers."""
        self._failure: ZerobandError | None = None
        """Why the newest attempt to get a state failed; None where the next one is under way."""
        self._had_bytes = 0
        """Verified when the newest attempt began."""
        self._taken: int | None = None
        """The round of the state that this attempt took over."""
        self._said = ""

    def take(self, state: JoinState, cause: ZerobandError | None) -> Outcome:
        return self._steps[state](cause)

    def is_fenced(self) -> bool:
        return self._run.mesh.is_fenced

    # -- with what this node has --------------------------------------------------------------------------------

    def _outlast(self, _cause: ZerobandError | None) -> Outcome:
        def outlast() -> None:
            self._run.mesh.member.outlast_duplicates()
            self._standing, self._rejected = None, {}
            self._exchange(self._run.store.view(FOUNDING_ROUND), resumes=self._run.resumes)

        on_first_rank(self._local, outlast)
        return Outcome(JoinEvent.FREE)

    def _exchange(self, view: View, *, resumes: bool, step: int | None = None) -> None:
        """Tell the others what this node has at its ckpt.path, and hear them. Local rank 0.

        `step`: of the checkpoint that others ask for. Raises ConfigError.
        """
        if self._standing is None or self._standing[0] != step:
            self._standing = step, self._run.holding(step, self._rejected)
        standing = replace(self._standing[1], resumes=resumes)
        self._told = self._run.holdings.exchange(self._run.mesh.member_id, view.alive, standing)

    def _recall(self, _cause: ZerobandError | None) -> Outcome:
        from_s, held = time.monotonic(), list[RoundState]()

        def recall() -> dict[str, Any] | None:
            found = self._run.memory.recall(self._run.buffers.numel)
            if found is None:
                return None
            held.append(found)
            return {"round": found.round, "record": found.record, "state_digest": found.state_digest}

        found = on_first_rank(self._local, recall)
        if found is None:
            return Outcome(JoinEvent.NOTHING)
        digest = self._run.outer.adopt(found["round"], found["record"], held.pop().sections if held else None)
        on_first_rank(self._local, self._run.memory.drop_held)
        verify(digest, found["state_digest"], "what this node had in memory", self._local)
        self._taken = found["round"]
        took_s = round(time.monotonic() - from_s, 3)
        on_first_rank(self._local, lambda: self._tell_of(found))
        self._events.emit("recovered", round=found["round"], digest=digest, took_s=took_s, source="memory")
        return Outcome(JoinEvent.RECALLED)

    def _tell_of(self, found: Mapping[str, Any]) -> None:
        """Say that the round in memory counts: the trainer that crashed may not have come to it. Local rank 0."""
        verdict = self._run.store.view(FOUNDING_ROUND).committed
        if verdict is None or verdict.round != found["round"]:
            return  # the others have said so
        opening = verdict.opening
        self._events.emit(
            "round_committed",
            round=verdict.round,
            epoch=opening.epoch,
            members=list(opening.members),
            digest=found["state_digest"],
            weights=list(opening.weights),
            samples=[steps * self._batch_size for steps in opening.steps],
            late=list(opening.late),
            progress=found["record"]["progress"],
        )

    def _go_back(self, cause: ZerobandError | None) -> Outcome:
        assert isinstance(cause, RolledBack)
        report = cause.report
        digest = self._run.outer.adopt(report.round, cause.record, self._run.take_staged())
        verify(digest, report.state_digest, f"the checkpoint of step {cause.step}", self._local)
        has_inner = self._run.load_inner(cause.step)
        skipped = {corpus: [list(span) for span in spans] for corpus, spans in cause.record.get("skipped", {}).items()}
        place = {"round": report.round, "step": cause.step, "digest": digest}
        self._events.emit("rolled_back", **place, has_inner=has_inner, skipped=skipped)
        on_first_rank(self._local, lambda: self._run.point_latest(cause.step))
        if report.progress.is_complete or self._run.outer.upcoming():
            return Outcome(JoinEvent.GONE_BACK, rounds=(report,))
        return Outcome(JoinEvent.IDLE)  # it asked for no samples, since the run was about to end

    # -- which way ----------------------------------------------------------------------------------------------

    def _look(self, cause: ZerobandError | None) -> Outcome:
        event = JoinEvent(on_first_rank(self._local, lambda: self._choose(cause)))
        if event in (JoinEvent.FOUND, JoinEvent.BEGIN):
            self._founding_round = FOUNDING_ROUND
            self._saved = None
            self._is_fetching = False  # a checkpoint will be read into the same buffers
            self._agrees_from_s = time.monotonic()
        return Outcome(event)

    def _choose(self, cause: ZerobandError | None) -> JoinEvent:
        """Local rank 0. Raises RecoveryFailed where there is no use in another attempt to get a state.

        Raises ConfigError where this node is banned.
        """
        if cause is not None:
            self._note_failure(cause)
        view = self._run.store.view(FOUNDING_ROUND)
        require_admitted(view.orders, self._run.mesh.member_id)
        if is_abandoned(view):
            self._exchange(view, resumes=self._run.resumes)
        way = way_in(view, resumes=self._may_begin_again(view))
        begins = isinstance(way, RestartPoint) or way in (JoinEvent.BEGIN, JoinEvent.FOUND)
        if begins and not self._run.store.may_found():
            return JoinEvent.WAIT
        if isinstance(way, RestartPoint):
            return JoinEvent.BEGIN
        if way in (JoinEvent.BEGIN, JoinEvent.WAIT) or (way is JoinEvent.FOUND and not self._knows_run):
            return way
        agreed = pending(view)
        is_following = way is JoinEvent.JOIN and agreed is not None and agreed.member in view.alive
        if is_following:
            self._patience.came_nearer()
        if self._failure is not None:
            self._require_patience(self._failure, view)
            self._failure = None
        if is_following and self._start_nodes > 1:
            return JoinEvent.BEGIN  # the founding waits for this node
        return JoinEvent.FOLLOW if is_following else JoinEvent.JOIN

    def _may_begin_again(self, view: View) -> bool:
        """Whether this node may found the run again on a checkpoint, of its own accord or since another one does."""
        own = self._run.mesh.member_id
        others = any(said.resumes for member, said in self._told.items() if member != own and member in view.alive)
        return others or self._run.may_begin_again(view)

    @property
    def _knows_run(self) -> bool:
        """Whether there is one already: if the store shows none, it lost the record, and others will bring it back."""
        return self._is_fetching or self._run.outer.round >= FOUNDING_ROUND

    def _note_failure(self, failure: ZerobandError) -> None:
        """Take note of an attempt that failed.

        It was of use if it verified more of a state, or led on from the round that was taken. The last round that it
        replayed may be the one that does not verify.
        """
        if self._taken is None:
            is_nearer = self._run.recovery.verified_bytes > self._had_bytes
        else:
            is_nearer = self._run.outer.round > self._taken + 1
        self._failure = failure
        if is_nearer:
            self._patience.came_nearer()
        else:
            self._patience.failed(time.monotonic())

    def _require_patience(self, failure: ZerobandError, view: View) -> None:
        left_s = self._patience.left_s(time.monotonic())
        if left_s <= 0:
            raise RecoveryFailed(
                f"{failure}; came no further for {self._patience.patience_s:g} s. If the run's nodes are gone, go on "
                "from a checkpoint of it with --resume, or start one with a new run.id"
            ) from failure
        if str(failure) != self._said:
            self._said = str(failure)
            until = datetime.now(UTC) + timedelta(seconds=left_s)
            waits_for = sorted(members_of(view) & view.alive)
            fields = {"why": self._said, "waits_for": waits_for, "until": f"{until:%H:%M:%SZ}"}
            way_out = "if these nodes are gone: --resume goes on from a checkpoint as soon as their leases have run out"
            _log.warning("no state yet", extra={"fields": {**fields, "type": way_out}})

    # -- with the founders --------------------------------------------------------------------------------------

    def _agree(self, _cause: ZerobandError | None) -> Outcome:
        agreed = on_first_rank(self._local, self._agree_on_checkpoint)
        event = JoinEvent(agreed["event"])
        if event is JoinEvent.AGREED:
            self._resume_from(agreed)
        return Outcome(event)

    def _resume_from(self, agreed: Mapping[str, Any]) -> None:
        digest, has_inner = self._run.outer.adopt(agreed["after_round"], agreed["record"]), False
        verify(digest, agreed["state_digest"], f"the checkpoint of step {agreed['step']}", self._local)
        if agreed["source"] == "checkpoint":
            has_inner = self._run.load_inner(agreed["step"])
        else:
            self._run.forget_inner()
        self._founding_round = agreed["round"]
        took_s = round(time.monotonic() - self._agrees_from_s, 3)
        fields = {name: agreed[name] for name in ("round", "step", "source", "rejected")}
        self._events.emit("resumed_from", **fields, digest=digest, took_s=took_s, has_inner=has_inner)

    def _agree_on_checkpoint(self) -> dict[str, Any]:
        """Look once. What ends this node is raised a moment later, so that the others see it, too. Local rank 0."""
        try:
            looked = self._look_for_agreement()
        except (ConfigError, RecoveryFailed, RunOver) as error:
            since_s = time.monotonic() if self._refusal is None else self._refusal[0]
            self._refusal = since_s, error
            if time.monotonic() - since_s >= _LINGER_S:
                raise
            return self._wait(str(error), ())
        self._refusal = None
        return looked

    def _look_for_agreement(self) -> dict[str, Any]:
        """Look at what the others have, with a checkpoint in the section buffers if one was read."""
        view = self._run.store.view(FOUNDING_ROUND)
        way = way_in(view, resumes=True)
        agreed = way if isinstance(way, RestartPoint) else None
        if way is JoinEvent.BEGIN and not self._may_begin_again(view):
            way = JoinEvent.JOIN  # whom it followed is gone
        if way in (JoinEvent.WAIT, JoinEvent.JOIN):
            return {"event": way}
        asked = agreed.step if agreed is not None else ordered_step(self._told)
        if asked is None:
            self._require_unfinished(view)
        self._exchange(view, resumes=True, step=asked)
        if agreed is not None:
            return self._take_over(view, agreed)
        start_nodes = 1 if self._run.mesh.is_start_over else self._start_nodes
        is_over = time.monotonic() > self._agrees_from_s + self._patience.patience_s
        chosen = choose(self._told, view.alive, start_nodes=start_nodes, is_start_over=is_over)
        if chosen is None:
            return {"event": self._without_checkpoint(view)}
        if isinstance(chosen, Wait):
            if self._refusal is not None:
                raise self._refusal[1]  # the others have left because of it
            return self._wait(chosen.reason, chosen.waiting_for)
        self._run.require_unfinished(chosen.step)
        own = self._told[self._run.mesh.member_id].held
        if own is None or not is_same(own, chosen):
            named = holders(self._told, chosen)
            return self._wait(f"the newest checkpoint is that of step {chosen.step}, which they read", named)
        if (saved := self._read(chosen)) is not None:
            self._propose(view, saved)
        return {"event": JoinEvent.AGAIN}

    def _require_unfinished(self, view: View) -> None:
        """Raise RunOver where the run is complete, on whichever node its last checkpoint is."""
        at = _inner_step_of(view)
        if view.committed is not None and at >= self._total_steps:
            raise RunOver(
                f"the run is complete since round {view.committed.round}; start another with a new run.id, or name an "
                "older checkpoint with --resume.step"
            )

    def _read(self, held: Held) -> SavedState | None:
        """Have a checkpoint in the section buffers; None where it cannot be taken, which the others are told then."""
        if self._saved is None or (self._saved.step, self._saved.state_digest) != (held.step, held.state_digest):
            self._saved = None
            try:
                self._saved = self._run.read_checkpoint(held.step)
            except RecoveryFailed as error:
                self._rejected[held.step], self._standing = str(error), None
            else:
                self._run.restorer.warn_of_newer()
        return self._saved

    def _propose(self, view: View, saved: SavedState) -> None:
        """Name the checkpoint to begin with, unless something has changed since this view."""
        if (at := _inner_step_of(view)) > saved.step:
            fields = {"step": saved.step, "run_was_at": at, "of": sorted(map(node_id_of_member, members_of(view)))}
            _log.warning(
                "the last steps of the run are in no checkpoint that a node here has", extra={"fields": fields}
            )
        point = restart_point_after(
            view,
            round=saved.round,
            step=saved.step,
            state_digest=saved.state_digest,
            member=self._run.mesh.member_id,
        )
        self._run.store.propose_restart_point(point, view)

    def _take_over(self, view: View, agreed: RestartPoint) -> dict[str, Any]:
        """Take the state that was agreed on: read it where this node has it, else fetch it from who named it."""
        held = self._told[self._run.mesh.member_id].held
        if held is not None and (held.step, held.state_digest) == (agreed.step, agreed.state_digest):
            saved, source = self._read(held), "checkpoint"
            if saved is None:
                return {"event": JoinEvent.AGAIN}
        elif self._start_nodes == 1:
            return self._wait("they are about to begin the run again", (agreed.member,))
        else:
            self._saved, source = None, "members"
            try:
                got = self._run.recovery.fetch_restart(self._run.outer.sections, agreed)
            except RecoveryFailed as error:
                return self._wait(str(error), (agreed.member,))
            saved = SavedState(got.round, got.record, got.state_digest, step=agreed.step)
        self._say_passed_over()
        found = {**asdict(saved), "rejected": [*self._run.passed_over.values()], "source": source}
        return {"event": JoinEvent.AGREED, **found, "round": agreed.round, "after_round": saved.round}

    def _say_passed_over(self) -> None:
        """Say which checkpoints here are newer and do not count; those that were read have been said."""
        for step, why in self._run.passed_over.items():
            if step not in self._rejected:
                _log.error("checkpoint skipped", extra={"fields": {"step": step, "why": why}})

    def _wait(self, why: str, waits_for: Sequence[str]) -> dict[str, Any]:
        """Wait, and say once for what."""
        if why != self._said:
            self._said = why
            fields = {"why": why, "waits_for": [node_id_of_member(member) for member in waits_for]}
            _log.info("not begun again yet", extra={"fields": fields})
        return {"event": JoinEvent.WAIT}

    def _without_checkpoint(self, view: View) -> JoinEvent:
        if why := why_none(self._told):
            raise RecoveryFailed(f"{why}; start the run anew with another run.id")
        if view.committed is not None:
            raise RecoveryFailed(
                f"the nodes of this run are gone since round {view.committed.round}, and no node has a checkpoint of "
                "it; start it anew with another run.id"
            )
        if self._run.resumes:
            say_new(self._run.restorer.url)
        self._exchange(view, resumes=False)
        return JoinEvent.NOTHING

    def _found(self, _cause: ZerobandError | None) -> Outcome:
        return self._became_member(JoinEvent.FOUNDED, self._run.outer.found(self._founding_round))

    # -- with the members ---------------------------------------------------------------------------------------

    def _fetch(self, _cause: ZerobandError | None) -> Outcome:
        outer, recovery = self._run.outer, self._run.recovery
        if not self._is_fetching:
            self._is_fetching = True
            self._patience.came_nearer()
            self._events.emit("recovering", round=outer.round)
            on_first_rank(self._local, lambda: recovery.begin(outer.sections, mixes=self._run.mixes_rounds))
            if self._takes_checkpoint():
                return Outcome(JoinEvent.FETCHED)
        self._had_bytes, self._taken = recovery.verified_bytes, None
        fetched = on_first_rank(self._local, self._fetch_state)
        newest = max((later[2] for later in fetched["later"]), default=fetched["round"])
        digest = outer.adopt(fetched["round"], fetched["record"], later=fetched["later"])
        try:
            if newest == fetched["round"]:
                verify(digest, fetched["state_digest"], f"the state of round {newest}", self._local)
            else:
                outer.catch_up(newest)
                digest = outer.state_digest
        except RecoveryFailed:
            if outer.round == newest:  # it came to what no donor has; else a round is in no journal
                on_first_rank(self._local, recovery.distrust_state)
            raise
        self._taken = newest
        place = {"round": newest, "digest": digest}
        self._events.emit("recovered", **place, took_s=fetched["took_s"], source="members")
        return Outcome(JoinEvent.FETCHED)

    def _takes_checkpoint(self) -> bool:
        """Take over the newest durable checkpoint and replay the rounds since, where that is less to fetch."""
        from_s, found = time.monotonic(), on_first_rank(self._local, self._run.checkpoint_to_join_from)
        if found is None:
            return False
        outer, step = self._run.outer, found["step"]
        try:
            saved = on_first_rank(self._local, lambda: asdict(self._run.restorer.read(step)))
            digest = outer.adopt(saved["round"], saved["record"])
            verify(digest, saved["state_digest"], f"the checkpoint of step {step}", self._local)
            outer.catch_up(found["newest"])
        except RecoveryFailed as error:
            fields = {"step": step, "why": str(error)}
            _log.warning("checkpoint unusable, fetching the state from peers", extra={"fields": fields})
            return False
        self._taken = outer.round
        place = {"round": outer.round, "digest": outer.state_digest}
        self._events.emit("recovered", **place, took_s=round(time.monotonic() - from_s, 3), source="checkpoint")
        return True

    def _fetch_state(self) -> dict[str, Any]:
        """Local rank 0."""
        fetched = self._run.recovery.fetch_state()
        state = {"round": fetched.round, "record": fetched.record, "state_digest": fetched.state_digest}
        return {**state, "later": fetched.later, "took_s": fetched.took_s}

    def _announce(self, _cause: ZerobandError | None) -> Outcome:
        outcome = self._became_member(JoinEvent.ADMITTED, report := self._run.outer.join())
        if (newer := on_first_rank(self._local, lambda: self._newer_than(report.progress))) is not None:
            self._events.emit("newer_checkpoint", step=newer, at=report.progress.inner_step)
        return outcome

    def _became_member(self, event: JoinEvent, report: RoundReport) -> Outcome:
        self._forget_attempts()
        self._events.emit("joined", member_id=report.member_id, round=report.round)
        self._tell_of_other_documents(report.progress)
        return Outcome(event, rounds=(report,))

    def _newer_than(self, progress: Progress) -> int | None:
        """The step of this run's newest checkpoint here where the run, which began without this node, is behind it."""
        held = self._run.holding().held
        return held.step if held is not None and held.is_own and held.step > progress.inner_step else None

    def _tell_of_other_documents(self, progress: Progress) -> None:
        """Warn where this node had other documents before: their samples stay as they are, and owed by nobody else."""
        for corpus, ledger in progress.ledgers.items():
            is_own = corpus.startswith(f"{self._node_id}/") and self._corpus != SHARED
            if is_own and corpus != self._corpus and self._local.rank == 0:
                fields = {"before": corpus, "owed": count(ledger.owed), "now": self._corpus}
                _log.warning("other documents than before: their samples are counted from 0", extra={"fields": fields})

    def _catch_up(self, cause: ZerobandError | None) -> Outcome:
        assert isinstance(cause, RoundsMissed)
        outer = self._run.outer
        on_first_rank(self._local, lambda: self._run.recovery.judge(outer.round, outer.state_digest))
        outer.catch_up(cause.round)
        return Outcome(JoinEvent.CAUGHT_UP)

    def _return(self, cause: ZerobandError | None) -> Outcome:
        self._events.emit("fenced", reason=str(cause))
        self._forget_attempts()
        self._run.come_back()
        return Outcome(JoinEvent.RETURNED)

    def _forget_attempts(self) -> None:
        """Whatever failed on the way so far is no reason to give up on the next."""
        self._is_fetching, self._failure = False, None
        self._patience.came_nearer()


def _inner_step_of(view: View) -> int:
    """Inner steps of the run, as its newest verdict has them; 0: there is none."""
    return 0 if view.committed is None else view.committed.record["progress"].get("inner_step", 0)


def say_new(url: str) -> None:
    """Warn that there is nothing to resume."""
    _log.warning("nothing to resume: a new run begins", extra={"fields": {"no_checkpoint_in": url}})
