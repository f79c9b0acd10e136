"""How a run whose members are all gone begins again: after which wait, and on which checkpoint of all nodes.

Leases decide, by the store's clock. Nodes tell one another what they have at their ckpt.path; the one with the newest
checkpoint names it, and all take that over. Whatever keeps one of them from it is an event of the join
(`runtime/join.py`). Local rank 0 alone, unless a method says otherwise.
"""

from __future__ import annotations

import contextlib
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
from zeroband.node.shm import is_restart
from zeroband.observe.events import Events
from zeroband.observe.log import get_logger
from zeroband.observe.view import node_id_of_member
from zeroband.runtime.node_parts import NodeParts
from zeroband.runtime.node_runtime import NodeRuntime, state_on_all, take_over

_LINGER_S = 2.0
"""A node stays for so long when the nodes cannot agree: else one that looks after it would miss the reason."""

_RESTART_S = 60.0
"""For launchers to notice a crash, to end the other ranks and to start the trainers again."""

_PROBES_AT_ONCE = 16

_log = get_logger(__name__)


class AbandonedRunWait:
    """The wait for members of a run that hold no lease.

    A member without a lease that still answers on its port is only cut off from the store: the run waits for it.
    """

    def __init__(self, node: NodeParts, events: Events) -> None:
        self._node_id, self._config = node.node_id, node.config
        self._events = events
        self._since_s: float | None = None
        self._said = ""

    def is_over(self, view: View, own: str) -> bool:
        """Whether this node may restart the run: its members stayed away, and there are checkpoints of it.

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
        wait_s = self._wait_s(is_hopeless=obstacle is not None, has_company=bool(view.alive - {own}))
        if self._since_s is None:
            self._since_s = time.monotonic()
            self._say_wait(view, wait_s, obstacle)
        if time.monotonic() - self._since_s < wait_s or self._is_cut_off(view):
            return False
        if obstacle is not None:
            raise RecoveryFailed(
                f"no member of this run has held a lease since round {committed.round} "
                f"({', '.join(sorted(members_of(view)))}), and {obstacle}"
            )
        return True

    def _wait_s(self, *, is_hopeless: bool, has_company: bool) -> float:
        """For members that come back with their state; for other new nodes, which may have what this one lacks."""
        half_s = self._config.elastic.start_timeout_s / 2
        if is_restart(os.environ) or (is_hopeless and has_company):  # the others may be started again, too
            return min(_RESTART_S, half_s)
        return min(2 * self._config.fault.time_outs.lease_s, half_s)

    def _obstacle(self, view: View) -> str | None:
        """Why this node cannot begin the run again, and the way out; None: it can."""
        path, run_id = self._config.ckpt.path, self._config.run.id
        if path is None:
            return (
                "this node has no ckpt.path to go on from: give it the one with this run's checkpoints, or start anew "
                "with another --run.id"
            )
        assert view.committed is not None
        storage = open_storage(path, run_id, self._node_id)
        try:
            owner, steps = read_owner(storage), steps_in_order(storage)
        except OSError as error:
            return f"{storage.url} cannot be read: {reason_of(error)}"
        if not steps:
            return f"{storage.url} holds no checkpoint: start anew with another --run.id"
        if owner is None or owner.session != view.committed.session:
            return (
                f"the checkpoints in {storage.url} are another run's: go on from them with --resume, or start anew "
                "with another --run.id"
            )
        return None

    def _say_wait(self, view: View, wait_s: float, obstacle: str | None) -> None:
        assert view.committed is not None
        until = datetime.now(UTC) + timedelta(seconds=wait_s)
        path = f"{self._config.ckpt.path}/{self._config.run.id}"
        then = f"goes on from the newest checkpoint in {path}" if obstacle is None else f"ends, since {obstacle}"
        self._events.emit(
            "run_abandoned",
            round=view.committed.round,
            members=sorted(members_of(view)),
            wait_s=wait_s,
            until=f"{until:%H:%M:%SZ}",
            then=then,
            type="--resume to go on from a checkpoint without this wait, another --run.id to start anew",
        )

    def _is_cut_off(self, view: View) -> bool:
        """Whether a member without a lease answers on its port, so that it lives and may have the newest state."""
        taken = {_address(view, member) for member in view.alive}
        asked: Mapping[str, Address] = {
            member: address
            for member in sorted(members_of(view) - view.alive)
            if (address := _address(view, member)) is not None and address not in taken
        }
        with ThreadPoolExecutor(_PROBES_AT_ONCE, thread_name_prefix="still-there") as pool:
            there = [m for m, is_there in zip(asked, pool.map(is_listening, asked.values()), strict=True) if is_there]
        said = ", ".join(f"{member} at {':'.join(map(str, asked[member]))}" for member in there)
        if said and said != self._said:
            why = "it is cut off from the store only, or another program has its port; --resume does not wait for it"
            _log.warning(
                "a member without a lease answers, so this node waits for it",
                extra={"fields": {"members": said, "why": why}},
            )
        self._said = said
        return bool(there)


def _address(view: View, member: str) -> Address | None:
    with contextlib.suppress(KeyError):
        return view.peers[member].host, view.peers[member].port
    return None


class Restart:
    """This node's part in beginning its run on a checkpoint, whether it was asked to resume or no member is left."""

    def __init__(self, node: NodeParts, run: NodeRuntime, events: Events) -> None:
        self._node, self._run, self._events = node, run, events
        self._start_nodes, self._total_steps = node.config.elastic.start_nodes, node.config.train.total_steps
        self._timeout_s = node.config.elastic.start_timeout_s
        self._abandoned = AbandonedRunWait(node, events)
        self._saved: SavedState | None = None
        """The checkpoint that lies in the section buffers."""
        self._is_read, self._founding_round = False, 0
        """Whether that was read here or fetched, and the round to found; of what was agreed on."""
        self._told: Mapping[str, Holding] = {}
        """What the living nodes said that they have at their ckpt.path, as of the last look."""
        self._standing: tuple[int | None, Holding] | None = None
        """What this node has, for the step that was asked for, until something is known to have changed."""
        self._rejected: dict[int, str] = {}
        """Steps of checkpoints that were read on this way in and do not verify, and why."""
        self._refusal: tuple[float, ZerobandError] | None = None
        """Since when the nodes cannot agree, and why not."""
        self._from_s = 0.0
        self._said = ""

    # -- what the nodes have ------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Look at the checkpoints of this node anew: time has passed."""
        self._standing, self._rejected = None, {}

    def exchange(self, view: View, *, resumes: bool, step: int | None = None) -> None:
        """Tell the others what this node has at its ckpt.path, and hear them.

        `step`: of the checkpoint that others ask for. Raises ConfigError.
        """
        if self._standing is None or self._standing[0] != step:
            self._standing = step, self.holding(step)
        standing = replace(self._standing[1], resumes=resumes)
        self._told = self._run.holdings.exchange(self._run.mesh.member_id, view.alive, standing)

    def holding(self, step: int | None = None) -> Holding:
        """What this node has to begin the run with; `step`: of the checkpoint that others ask for."""
        restorer = self._run.restorer
        return Holding() if restorer is None else restorer.holding(step, self._rejected)

    def may_begin(self, view: View) -> bool:
        """Whether this node may found the run again on a checkpoint: as asked, with others, or since no member is left.

        Without being asked, only where the checkpoints are those of this very run, and its members had time to come
        back. Raises RecoveryFailed where they did not, and there is no checkpoint.
        """
        own = self._run.mesh.member_id
        others = any(said.resumes for member, said in self._told.items() if member != own and member in view.alive)
        return others or self._node.resumes or self._abandoned.is_over(view, own)

    # -- on which they agree ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Come to a founding: nothing is agreed on yet."""
        self._saved, self._from_s = None, time.monotonic()

    def agree(self) -> tuple[JoinEvent, int]:
        """Look once for an agreement, and take over what it names. Called by all local ranks.

        Returns what came of it, and the round of the founding where that is AGREED.
        """
        local = self._run.mesh.local
        event, founding_round, is_read = on_first_rank(
            local, lambda: [self._agree(), self._founding_round, self._is_read]
        )
        if event == JoinEvent.AGREED:
            self._take_state(founding_round, is_read=is_read)
        return JoinEvent(event), founding_round

    def _take_state(self, founding_round: int, *, is_read: bool) -> None:
        run, local = self._run, self._run.mesh.local
        saved = state_on_all(local, SavedState, lambda: self._saved)
        assert saved is not None, "it was read or fetched"
        digest = take_over(run.outer, saved, f"the checkpoint of step {saved.step}", local)
        if not is_read:
            run.forget_inner()
        self._events.emit(
            "resumed_from",
            round=founding_round,
            step=saved.step,
            source="checkpoint" if is_read else "members",
            rejected=list(saved.rejected),
            digest=digest,
            has_inner=is_read and run.load_inner(saved.step),
            took_s=round(time.monotonic() - self._from_s, 3),
        )

    def _agree(self) -> JoinEvent:
        """Look once. What ends this node is raised a moment later, so that the others see it, too."""
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
        """Look at what the others have, with a checkpoint in the section buffers if one was read."""
        view = self._run.store.view(BOOTSTRAP_ROUND)
        way = way_in(view, resumes=True)
        agreed = None
        if isinstance(way, RestartPoint):
            agreed = way
        elif way is JoinEvent.BEGIN and not self.may_begin(view):
            return JoinEvent.JOIN  # whom it followed is gone
        elif way in (JoinEvent.WAIT, JoinEvent.JOIN):
            return way
        asked = agreed.step if agreed is not None else ordered_step(self._told)
        if asked is None:
            self._require_unfinished(view)
        self.exchange(view, resumes=True, step=asked)
        return self._choose(view) if agreed is None else self._take_over(agreed)

    def _choose(self, view: View) -> JoinEvent:
        """Read and name the newest checkpoint of all where this node has it, else wait for who has."""
        start_nodes = 1 if self._run.mesh.is_start_over else self._start_nodes
        is_over = time.monotonic() > self._from_s + self._timeout_s
        chosen = choose_checkpoint(self._told, view.alive, start_nodes=start_nodes, is_start_over=is_over)
        if chosen is None:
            return self._without_checkpoint(view)
        if isinstance(chosen, Wait):
            if self._refusal is not None:
                raise self._refusal[1]  # the others have left because of it
            return self._wait(chosen.reason, chosen.waiting_for)
        if chosen.step >= self._total_steps:
            raise RunOver(f"the checkpoint of step {chosen.step} is that of the end of the run (train.total_steps)")
        own = self._told[self._run.mesh.member_id].held
        if own is None or not is_same_state(own, chosen):
            named = holders(self._told, chosen)
            return self._wait(f"the newest checkpoint is that of step {chosen.step}, which they read", named)
        if (saved := self._read(chosen)) is not None:
            self._propose(view, saved)
        return JoinEvent.AGAIN

    def _require_unfinished(self, view: View) -> None:
        """Raise RunOver where the run is complete, on whichever node its last checkpoint is."""
        if view.committed is not None and _inner_step_of(view) >= self._total_steps:
            raise RunOver(
                f"the run is complete since round {view.committed.round}; start another with a new run.id, or name an "
                "older checkpoint with --resume.step"
            )

    def _read(self, held: Held) -> SavedState | None:
        """Have a checkpoint in the section buffers; None where it cannot be taken, which the others are told then."""
        if self._saved is None or (self._saved.step, self._saved.state_digest) != (held.step, held.state_digest):
            self._saved, restorer = None, self._run.restorer
            assert restorer is not None, "it told of a checkpoint"
            try:
                self._saved = restorer.restore(self._run.sections, held.step)
            except RecoveryFailed as error:
                self._rejected[held.step], self._standing = str(error), None
            else:
                restorer.warn_of_newer()
        return self._saved

    def _propose(self, view: View, saved: SavedState) -> None:
        """Name the checkpoint to begin with, unless something has changed since this view."""
        if (at := _inner_step_of(view)) > saved.step:
            fields = {"step": saved.step, "run_was_at": at, "of": sorted(map(node_id_of_member, members_of(view)))}
            _log.warning(
                "the last steps of the run are in no checkpoint that a node here has", extra={"fields": fields}
            )
        member_id, digest = self._run.mesh.member_id, saved.state_digest
        point = propose_restart(view, round=saved.round, step=saved.step, state_digest=digest, member=member_id)
        self._run.store.propose_restart_point(point, view)

    def _take_over(self, agreed: RestartPoint) -> JoinEvent:
        """Take the state that was agreed on: read it where this node has it, else fetch it from who named it."""
        held = self._told[self._run.mesh.member_id].held
        if held is not None and (held.step, held.state_digest) == (agreed.step, agreed.state_digest):
            saved, self._is_read = self._read(held), True
            if saved is None:
                return JoinEvent.AGAIN
        elif self._start_nodes == 1:
            return self._wait("they are about to begin the run again", (agreed.member,))
        else:
            self._saved, self._is_read = None, False
            try:
                got = self._run.recovery.fetch_restart(self._run.outer.sections, agreed)
            except RecoveryFailed as error:
                return self._wait(str(error), (agreed.member,))
            saved = SavedState(got.round, got.record, got.state_digest, step=agreed.step)
        passed_over = {} if self._run.restorer is None else self._run.restorer.passed_over
        for step, why in passed_over.items():
            if step not in self._rejected:  # those that were read have been said
                _log.error("checkpoint skipped", extra={"fields": {"step": step, "why": why}})
        self._saved = replace(saved, rejected=tuple(passed_over.values()))
        self._founding_round = agreed.round
        return JoinEvent.AGREED

    def _wait(self, why: str, waits_for: Sequence[str]) -> JoinEvent:
        """Wait, and say once for what."""
        if why != self._said:
            self._said = why
            fields = {"why": why, "waits_for": [node_id_of_member(member) for member in waits_for]}
            _log.info("not begun again yet", extra={"fields": fields})
        return JoinEvent.WAIT

    def _without_checkpoint(self, view: View) -> JoinEvent:
        if why := no_checkpoint_reason(self._told):
            raise RecoveryFailed(f"{why}; start the run anew with another run.id")
        if view.committed is not None:
            raise RecoveryFailed(
                f"the nodes of this run are gone since round {view.committed.round}, and no node has a checkpoint of "
                "it; start it anew with another run.id"
            )
        if self._node.resumes and self._run.restorer is not None:
            say_new(self._run.restorer.url)
        self.exchange(view, resumes=False)
        return JoinEvent.NOTHING


def _inner_step_of(view: View) -> int:
    """Inner steps of the run, as its newest verdict has them; 0: there is none."""
    return 0 if view.committed is None else view.committed.record["progress"].get("inner_step", 0)


def say_new(url: str) -> None:
    """Warn that there is nothing to resume."""
    _log.warning("nothing to resume: a new run begins", extra={"fields": {"no_checkpoint_in": url}})
