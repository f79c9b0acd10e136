"""Restarting a run whose members are all gone: the wait for them, and the agreement on a checkpoint.

Leases decide, by the store's clock. The nodes report which checkpoints they have; the one with the newest proposes it,
and all of them load it. What prevents one of them is an event of the join (`runtime/join.py`). Local rank 0, unless a
method says otherwise.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from zeroband.checkpoint.loading import steps_in_order
from zeroband.checkpoint.ownership import read_owner
from zeroband.checkpoint.restorer import SavedState
from zeroband.checkpoint.storage import open_storage, reason_of
from zeroband.elastic.membership.join_states import JoinEvent
from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.membership.records import BOOTSTRAP_ROUND, RestartPoint, View
from zeroband.elastic.membership.resume_rules import (
    Held,
    Holding,
    choose_checkpoint,
    holders,
    is_abandoned,
    is_same_state,
    members_of,
    no_checkpoint_reason,
    ordered_step,
    pending_restart,
    propose_restart,
    way_in,
)
from zeroband.elastic.membership.round_rules import Wait
from zeroband.elastic.rounds.elastic_device_mesh import on_first_rank
from zeroband.elastic.transport.dial import Address, is_listening
from zeroband.errors import ConfigError, RecoveryFailed, RunOver, ZerobandError
from zeroband.node.launched import is_restart
from zeroband.observe.events import Events
from zeroband.observe.log import get_logger
from zeroband.observe.view import node_id_of_member
from zeroband.runtime.node_parts import NodeParts
from zeroband.runtime.node_runtime import NodeRuntime, load_state, state_on_all

_LINGER_S = 2.0
"""Time for which a node stays when the nodes cannot agree, so that the others still see the reason."""

_RESTART_S = 60.0
"""Time for launchers to notice a crash, end the other ranks and restart the trainers."""

_PROBES_AT_ONCE = 16

_log = get_logger(__name__)


class AbandonedRunWait:
    """The wait for members of a run whose leases have expired.

    A member that still answers on its port has only lost the store: the run waits for it.
    """

    def __init__(self, node: NodeParts, events: Events) -> None:
        self._node_id, self._config = node.node_id, node.config
        self._events = events
        self._since_s: float | None = None
        self._warned = ""

    def is_over(self, view: View, own: str) -> bool:
        """Whether this node may restart the run: its members stayed away, and it has checkpoints.

        `own`: this node's member id. Raises RecoveryFailed if they stayed away and there is no checkpoint.
        """
        committed, agreed = view.committed, pending_restart(view)
        if committed is None or Progress.of_verdict(committed).is_complete:
            return False
        if agreed is not None and agreed.member in view.alive:
            return self._obstacle(view) is None  # another node has waited for them
        if not is_abandoned(view):
            self._since_s = None
            return False
        obstacle = self._obstacle(view)
        wait_s = self._wait_s(is_hopeless=obstacle is not None, has_others=bool(view.alive - {own}))
        if self._since_s is None:
            self._since_s = time.monotonic()
            self._report_wait(view, wait_s, obstacle)
        if time.monotonic() - self._since_s < wait_s or self._is_cut_off(view):
            return False
        if obstacle is not None:
            raise RecoveryFailed(
                f"no member of this run has held a lease since round {committed.round} "
                f"({', '.join(sorted(members_of(view)))}), and {obstacle}"
            )
        return True

    def _wait_s(self, *, is_hopeless: bool, has_others: bool) -> float:
        """Return how long to wait for members that return, or for other new nodes, which may have a checkpoint."""
        half_s = self._config.elastic.start_timeout_s / 2
        if is_restart(os.environ) or (is_hopeless and has_others):  # launchers may also restart the members
            return min(_RESTART_S, half_s)
        return min(2 * self._config.fault.time_outs.lease_s, half_s)

    def _obstacle(self, view: View) -> str | None:
        """Return why this node cannot restart the run, and what to do; None if it can."""
        path, run_id = self._config.ckpt.path, self._config.run.id
        if path is None:
            return (
                "this node has no ckpt.path to resume from: set it to the one with this run's checkpoints, or start "
                "a new run with another --run.id"
            )
        assert view.committed is not None
        storage = open_storage(path, run_id, self._node_id)
        try:
            owner, steps = read_owner(storage), steps_in_order(storage)
        except OSError as error:
            return f"{storage.url} cannot be read: {reason_of(error)}"
        if not steps:
            return f"{storage.url} holds no checkpoint: start a new run with another --run.id"
        if owner is None or owner.session != view.committed.session:
            return (
                f"the checkpoints in {storage.url} are another run's: resume from them with --resume, or start a new "
                "run with another --run.id"
            )
        return None

    def _report_wait(self, view: View, wait_s: float, obstacle: str | None) -> None:
        assert view.committed is not None
        until = datetime.now(UTC) + timedelta(seconds=wait_s)
        path = f"{self._config.ckpt.path}/{self._config.run.id}"
        then = f"resumes from the newest checkpoint in {path}" if obstacle is None else f"ends, since {obstacle}"
        self._events.emit(
            "run_abandoned",
            round=view.committed.round,
            members=sorted(members_of(view)),
            wait_s=wait_s,
            until=f"{until:%H:%M:%SZ}",
            then=then,
            type="--resume to resume from a checkpoint without this wait, another --run.id to start a new run",
        )

    def _is_cut_off(self, view: View) -> bool:
        """Whether a member without a lease answers on its port: it is alive and may have the newest state."""
        taken = {_address(view, member) for member in view.alive}  # a new member may have the port of an old one
        asked: Mapping[str, Address] = {
            member: address
            for member in sorted(members_of(view) - view.alive)
            if (address := _address(view, member)) is not None and address not in taken
        }
        with ThreadPoolExecutor(_PROBES_AT_ONCE, thread_name_prefix="still-there") as pool:
            there = [m for m, is_there in zip(asked, pool.map(is_listening, asked.values()), strict=True) if is_there]
        members = ", ".join(f"{member} at {':'.join(map(str, asked[member]))}" for member in there)
        if members and members != self._warned:
            why = "it has only lost the store, or another program uses its port; --resume does not wait for it"
            _log.warning(
                "a member without a lease answers, so this node waits for it",
                extra={"fields": {"members": members, "why": why}},
            )
        self._warned = members
        return bool(there)


def _address(view: View, member: str) -> Address | None:
    peer = view.peers.get(member)
    return None if peer is None else (peer.host, peer.port)


class Restart:
    """This node's part in restarting its run from a checkpoint, as asked or because no member is left."""

    def __init__(self, node: NodeParts, run: NodeRuntime, events: Events) -> None:
        self._node, self._run, self._events = node, run, events
        self._start_nodes, self._total_steps = node.config.elastic.start_nodes, node.config.train.total_steps
        self._timeout_s = node.config.elastic.start_timeout_s
        self._abandoned = AbandonedRunWait(node, events)
        self._saved: SavedState | None = None
        """The checkpoint in the section buffers."""
        self._is_read, self._bootstrap_round = False, 0
        """Whether this node read the agreed checkpoint itself, and the bootstrap round."""
        self._reports: Mapping[str, Holding] = {}
        """The living nodes' reports of their checkpoints, as of the last exchange."""
        self._own_report: tuple[int | None, Holding] | None = None
        """This node's report on the requested step; None after a change."""
        self._rejected: dict[int, str] = {}
        """Checkpoints that failed to load on this way in: step and reason."""
        self._refusal: tuple[float, ZerobandError] | None = None
        """Since when and why the nodes cannot agree."""
        self._from_s = 0.0
        self._logged = ""

    # -- the nodes' checkpoints ---------------------------------------------------------------------------------

    def forget(self) -> None:
        """Forget what was read of this node's checkpoints: time has passed."""
        self._own_report, self._rejected = None, {}

    def exchange(self, view: View, *, resumes: bool, step: int | None = None) -> None:
        """Exchange reports on checkpoints with the other nodes. `step`: the requested one. Raises ConfigError."""
        if self._own_report is None or self._own_report[0] != step:
            self._own_report = step, self.own_report(step)
        own = replace(self._own_report[1], resumes=resumes)
        self._reports = self._run.checkpoint_reports.exchange(self._run.mesh.member_id, view.alive, own)

    def own_report(self, step: int | None = None) -> Holding:
        """Report this node's newest checkpoint, or the one of a step that others ask for."""
        restorer = self._run.restorer
        return Holding() if restorer is None else restorer.holding(step, self._rejected)

    def may_restart(self, view: View) -> bool:
        """Whether this node may restart the run: it was asked to, another node does, or no member is left.

        Without being asked, only from this run's own checkpoints, after the wait for its members. Raises RecoveryFailed
        if they stayed away and there is no checkpoint.
        """
        own = self._run.mesh.member_id
        others = any(said.resumes for member, said in self._reports.items() if member != own and member in view.alive)
        return others or self._node.resumes or self._abandoned.is_over(view, own)

    # -- the agreement ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a bootstrap, without an agreement yet."""
        self._saved, self._from_s = None, time.monotonic()

    def agree(self) -> tuple[JoinEvent, int]:
        """Look once for an agreement, and load its checkpoint. Called by all local ranks.

        Returns the event, and the bootstrap round if that is AGREED.
        """
        local = self._run.mesh.local
        event, bootstrap_round, is_read = on_first_rank(
            local, lambda: [self._agree(), self._bootstrap_round, self._is_read]
        )
        if event == JoinEvent.AGREED:
            self._take_state(bootstrap_round, is_read=is_read)
        return JoinEvent(event), bootstrap_round

    def _take_state(self, bootstrap_round: int, *, is_read: bool) -> None:
        run, local = self._run, self._run.mesh.local
        saved = state_on_all(local, SavedState, lambda: self._saved)
        assert saved is not None, "an agreement has a state"
        digest = load_state(run.outer, saved, f"the checkpoint of step {saved.step}", local)
        if not is_read:
            run.forget_inner()
        self._events.emit(
            "resumed_from",
            round=bootstrap_round,
            step=saved.step,
            source="checkpoint" if is_read else "members",
            rejected=list(saved.rejected),
            digest=digest,
            has_inner=is_read and run.load_inner(saved.step),
            took_s=round(time.monotonic() - self._from_s, 3),
        )

    def _agree(self) -> JoinEvent:
        """Look once for an agreement. An error ends this node a moment later, so that the others still see it."""
        try:
            looked = self._look()
        except (ConfigError, RecoveryFailed, RunOver) as error:
            since_s = time.monotonic() if self._refusal is None else self._refusal[0]
            self._refusal = since_s, error
            if time.monotonic() - since_s >= _LINGER_S:
                raise
            return self._wait(str(error), ())
        self._refusal = None
        return looked

    def _look(self) -> JoinEvent:
        """Take the next step towards an agreement; loads the checkpoint that this node proposes or others did."""
        view = self._run.store.view(BOOTSTRAP_ROUND)
        way = way_in(view, resumes=True)
        agreed = None
        if isinstance(way, RestartPoint):
            agreed = way
        elif way is JoinEvent.BEGIN and not self.may_restart(view):
            return JoinEvent.JOIN  # the node that it followed is gone
        elif way in (JoinEvent.WAIT, JoinEvent.JOIN):
            return way
        asked = agreed.step if agreed is not None else ordered_step(self._reports)
        if asked is None:
            self._require_unfinished(view)
        self.exchange(view, resumes=True, step=asked)
        return self._choose(view) if agreed is None else self._load_agreed(agreed)

    def _choose(self, view: View) -> JoinEvent:
        """Read and propose the newest checkpoint if this node has it; otherwise wait for a node that does."""
        start_nodes = 1 if self._run.mesh.is_start_over else self._start_nodes
        is_over = time.monotonic() > self._from_s + self._timeout_s
        chosen = choose_checkpoint(self._reports, view.alive, start_nodes=start_nodes, is_start_over=is_over)
        if chosen is None:
            return self._without_checkpoint(view)
        if isinstance(chosen, Wait):
            if self._refusal is not None:
                raise self._refusal[1]  # the others have left because of it
            return self._wait(chosen.reason, chosen.waiting_for)
        if chosen.step >= self._total_steps:
            raise RunOver(f"the checkpoint of step {chosen.step} is that of the end of the run (train.total_steps)")
        own = self._reports[self._run.mesh.member_id].held
        if own is None or not is_same_state(own, chosen):
            named = holders(self._reports, chosen)
            return self._wait(f"they read the newest checkpoint, that of step {chosen.step}", named)
        if (saved := self._read(chosen)) is not None:
            self._propose(view, saved)
        return JoinEvent.AGAIN

    def _require_unfinished(self, view: View) -> None:
        """Raise RunOver if the run is complete, wherever its last checkpoint is."""
        if view.committed is not None and _inner_step_of(view) >= self._total_steps:
            raise RunOver(
                f"the run is complete since round {view.committed.round}; start a new one with another run.id, or name "
                "an older checkpoint with --resume.step"
            )

    def _read(self, held: Held) -> SavedState | None:
        """Read a checkpoint into the section buffers; returns None, and reports the reason, if it is unusable."""
        if self._saved is None or (self._saved.step, self._saved.state_digest) != (held.step, held.state_digest):
            self._saved, restorer = None, self._run.restorer
            assert restorer is not None, "this node has reported a checkpoint"
            try:
                self._saved = restorer.restore(self._run.sections, held.step)
            except RecoveryFailed as error:
                self._rejected[held.step], self._own_report = str(error), None
            else:
                restorer.warn_of_newer()
        return self._saved

    def _propose(self, view: View, saved: SavedState) -> None:
        """Propose a checkpoint as the restart point. The store refuses it if its records changed since this view."""
        if (at := _inner_step_of(view)) > saved.step:
            fields = {"step": saved.step, "run_was_at": at, "of": sorted(map(node_id_of_member, members_of(view)))}
            _log.warning("no checkpoint of these nodes holds the last steps of the run", extra={"fields": fields})
        member_id, digest = self._run.mesh.member_id, saved.state_digest
        point = propose_restart(view, round=saved.round, step=saved.step, state_digest=digest, member=member_id)
        self._run.store.propose_restart_point(point, view)

    def _load_agreed(self, agreed: RestartPoint) -> JoinEvent:
        """Load the agreed state: read it if this node has it, otherwise fetch it from the node that proposed it."""
        held = self._reports[self._run.mesh.member_id].held
        if held is not None and (held.step, held.state_digest) == (agreed.step, agreed.state_digest):
            saved, self._is_read = self._read(held), True
            if saved is None:
                return JoinEvent.AGAIN
        elif self._start_nodes == 1:
            return self._wait("they are about to restart the run", (agreed.member,))
        else:
            self._saved, self._is_read = None, False
            try:
                got = self._run.recovery.fetch_restart(self._run.outer.sections, agreed)
            except RecoveryFailed as error:
                return self._wait(str(error), (agreed.member,))
            saved = SavedState(got.round, got.record, got.state_digest, step=agreed.step)
        skipped = {} if self._run.restorer is None else self._run.restorer.skipped_steps
        for step, why in skipped.items():
            if step not in self._rejected:  # a read has logged those
                _log.error("checkpoint skipped", extra={"fields": {"step": step, "why": why}})
        self._saved = replace(saved, rejected=tuple(skipped.values()))
        self._bootstrap_round = agreed.round
        return JoinEvent.AGREED

    def _wait(self, why: str, waits_for: Sequence[str]) -> JoinEvent:
        """Log a new reason for waiting."""
        if why != self._logged:
            self._logged = why
            fields = {"why": why, "waits_for": [node_id_of_member(member) for member in waits_for]}
            _log.info("cannot restart the run yet", extra={"fields": fields})
        return JoinEvent.WAIT

    def _without_checkpoint(self, view: View) -> JoinEvent:
        if why := no_checkpoint_reason(self._reports):
            raise RecoveryFailed(f"{why}; start a new run with another run.id")
        if view.committed is not None:
            raise RecoveryFailed(
                f"the nodes of this run are gone since round {view.committed.round}, and no node has a checkpoint of "
                "it; start a new run with another run.id"
            )
        if self._node.resumes and self._run.restorer is not None:
            warn_nothing_to_resume(self._run.restorer.url)
        self.exchange(view, resumes=False)
        return JoinEvent.NOTHING


def _inner_step_of(view: View) -> int:
    """Return the run's inner steps as of its newest verdict; 0 without one."""
    return 0 if view.committed is None else view.committed.record["progress"].get("inner_step", 0)


def warn_nothing_to_resume(url: str) -> None:
    """Warn that a new run begins although the user asked to resume."""
    _log.warning("nothing to resume: a new run begins", extra={"fields": {"no_checkpoint_in": url}})
