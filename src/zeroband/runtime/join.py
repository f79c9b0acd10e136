"""How a node gets into a run: with its founders, by the join path, and by the join path again after a fence.

Training nodes never wait for a joiner: it fetches a committed state, replays the rounds committed meanwhile, and takes
part in the next one with weight 0, which hands it the same result as everybody.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, Protocol

import torch

from zeroband.checkpoint.owner import read_owner
from zeroband.checkpoint.restorer import Restorer, SavedState, source_for
from zeroband.checkpoint.storage import open_storage, reason_of
from zeroband.elastic.membership.records import FOUNDING_ROUND, RestartPoint, View
from zeroband.elastic.membership.resume_rules import Way, members_of, pending, restart_point_after, way_in
from zeroband.elastic.rounds.elastic_device_mesh import on_first_rank
from zeroband.elastic.rounds.interfaces import SyncHooks, verify
from zeroband.elastic.rounds.rollback import RolledBack
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.errors import Fenced, RecoveryFailed, RunOver
from zeroband.node.mesh import LocalMesh, all_ok, broadcast_json
from zeroband.node.shm import is_restart, launch_of
from zeroband.observe.events import Events
from zeroband.observe.log import get_logger
from zeroband.outer.alone import Alone
from zeroband.runtime.build import TrainerParts
from zeroband.runtime.replica import Replica, shape_of
from zeroband.state.crash_memory import HeldState
from zeroband.state.flat import FlatLayout, ShardMap, parameter_shards

PARAMS = "params"
"""The one section of the state of a node that trains alone."""

_RETRY_S = 0.5

_log = get_logger(__name__)


class Joining(Protocol):
    """A node's way into its run, and its place there. All local ranks call the methods together."""

    @property
    def hooks(self) -> SyncHooks: ...

    @property
    def run(self) -> Replica | None:
        """Its place among other nodes; None: it trains alone."""
        ...

    def enter(self) -> RoundReport | None:
        """Get in. Returns the report of the round that made this node a member; None where there are no others."""
        ...

    def come_back(self, why: Fenced | RolledBack) -> RoundReport | None:
        """Get in again."""
        ...

    def announce_leaving(self) -> Literal["together", "alone"] | None:
        """Say that this node leaves, once; whether the run then stands still, and with whom it does."""
        ...


class SingleNode:
    """The way of a node that trains alone: it is in its run at once."""

    run: Replica | None = None

    def __init__(self, node: TrainerParts, events: Events) -> None:
        self._node = node
        self._alone = Alone(shape_of(node.config), launch_of(os.environ))
        self._events = events
        self.hooks: SyncHooks = self._alone

    def enter(self) -> RoundReport | None:
        if self._node.config.resume is not None or on_first_rank(self._node.local, self._goes_on_after_crash):
            self._begin_again()
        return None

    def _goes_on_after_crash(self) -> bool:
        """Whether the trainer before this one has crashed, and saved of this very run. Local rank 0."""
        path, run_id = self._node.config.ckpt.path, self._node.config.run.id
        if path is None or not is_restart(os.environ):
            return False
        storage = open_storage(path, run_id, self._node.node_id)
        try:
            owner = read_owner(storage)
        except OSError as error:
            raise RecoveryFailed(f"cannot look into {storage.url}: {reason_of(error)}") from error
        return owner is not None and owner.session == self._alone.record["session"]

    def _begin_again(self) -> None:
        """Go on from a checkpoint; anew where there is none. Every local rank reads it, and takes its shards.

        Raises RecoveryFailed, ConfigError, RunOver.
        """
        node, config, local, from_s = self._node, self._node.config, self._node.local, time.monotonic()
        layout = FlatLayout.of(node.model)
        source = source_for(config, node.node_id)
        targets = {PARAMS: torch.empty(layout.numel)}
        restorer = Restorer(source, node.node_id, layout, targets, node.faults)

        def read() -> dict[str, Any] | None:
            saved = restorer.restore()
            if saved is not None and saved.step >= config.train.total_steps:
                raise RunOver(f"the checkpoint of step {saved.step} is that of the end of the run (train.total_steps)")
            return None if saved is None else asdict(saved)

        saved = on_first_rank(local, read)
        if saved is None:
            if local.rank == 0:
                _say_new(source.own.url)
            return
        if local.rank != 0:
            restorer.restore(saved["step"])
        ShardMap(layout, local.rank, local.world_size).load(parameter_shards(node.model), targets[PARAMS])
        self._alone.adopt(saved["round"], saved["record"])
        node.inner.seek(saved["step"])
        has_inner = all_ok(restorer.load_inner(saved["step"], node.inner, local), local)
        place = {"round": saved["round"], "step": saved["step"], "digest": saved["state_digest"]}
        took_s = round(time.monotonic() - from_s, 3)
        self._events.emit("resumed_from", **place, took_s=took_s, has_inner=has_inner, rejected=saved["rejected"])

    def announce_leaving(self) -> Literal["together", "alone"] | None:
        return "alone"

    def come_back(self, why: Fenced | RolledBack) -> RoundReport | None:
        raise AssertionError("nobody fences a node that trains alone") from why


class Joiner:
    """Brings a node into its run.

    `batch_size`: samples of an inner step.
    """

    def __init__(self, run: Replica, local: LocalMesh, events: Events, *, batch_size: int, patience_s: float) -> None:
        self.hooks: SyncHooks = run.outer
        self.run = run
        self._local = local
        self._events = events
        self._batch_size = batch_size
        self._patience_s = patience_s

    def announce_leaving(self) -> Literal["together", "alone"] | None:
        """Whether the run stands still when this node leaves: all members leave with this round, or it is the last one.

        Then it must save what it holds. Called once, by all local ranks.
        """
        assigned = set(self.hooks.progress.assigned)
        staying = on_first_rank(self._local, lambda: sorted(self.run.store.say_leaving(self.run.mesh.member_id)))
        if not assigned:
            return "together"
        return None if assigned & set(staying) else "alone"

    def enter(self) -> RoundReport:
        """Found the run, or join it where others did. Returns the report of the round that made this node a member.

        Raises ConfigError where another machine is in the run under this node's name.
        """
        on_first_rank(self._local, lambda: self.run.mesh.member.outlast_duplicates())
        report = self._go_on_from_memory()
        if report is not None:
            return report
        way = on_first_rank(self._local, self._way_in)
        was_member = self.hooks.round >= FOUNDING_ROUND  # the store lost its record, and others will bring it back
        if way == "begin":
            report = self._begin_again()
        elif way == "found" and not was_member:
            report = self._found(FOUNDING_ROUND)
        return report or self.join()

    def _way_in(self) -> Way | Literal["follow"]:
        """`follow`: join the run that others are about to begin again. Local rank 0."""
        while True:
            view = self.run.store.view(FOUNDING_ROUND)
            way = way_in(view, resumes=self.run.may_begin_again(view))
            agreed = pending(view)
            if way == "join" and agreed is not None and agreed.member in view.alive:
                return "follow"
            if way != "wait":
                return "begin" if isinstance(way, RestartPoint) else way
            time.sleep(_RETRY_S)

    def _found(self, round: int) -> RoundReport | None:
        """Found the run with the state that this node holds; None where others did meanwhile."""
        try:
            report = self.run.outer.found(round)
        except Fenced as fence:
            if self.run.mesh.is_fenced:
                raise
            _log.info("the others founded the run; joining", extra={"fields": {"why": str(fence)}})
            return None
        self._events.emit("joined", member_id=report.member_id, round=report.round)
        return report

    def _begin_again(self) -> RoundReport | None:
        """Found the run on a checkpoint, or anew where there is none; None where others are ahead of this node."""
        from_s = time.monotonic()
        agreed = on_first_rank(self._local, self._agree)
        if agreed["way"] != "begin":
            return self._found(FOUNDING_ROUND) if agreed["way"] == "found" else None
        digest = self.run.outer.adopt(agreed["after_round"], agreed["record"])
        verify(digest, agreed["state_digest"], f"the checkpoint of step {agreed['step']}", self._local)
        has_inner = self.run.load_inner(agreed["step"])
        took_s = round(time.monotonic() - from_s, 3)
        place = {"round": agreed["round"], "step": agreed["step"], "rejected": agreed["rejected"]}
        self._events.emit("resumed_from", **place, digest=digest, took_s=took_s, has_inner=has_inner)
        return self._found(agreed["round"])

    def _agree(self) -> dict[str, Any]:
        """Read a checkpoint into the buffers of the outer state, one that all nodes begin with. Local rank 0."""
        saved: SavedState | None = None
        is_read = False
        while True:
            view = self.run.store.view(FOUNDING_ROUND)
            way = way_in(view, resumes=True)
            if way == "wait":
                time.sleep(_RETRY_S)
                continue
            if way in ("join", "found"):
                return {"way": way}
            step = way.step if isinstance(way, RestartPoint) else None
            if not is_read or (step is not None and (saved is None or saved.step != step)):
                saved, is_read = self.run.read_checkpoint(step), True
                continue
            if saved is None:
                return self._without_checkpoint(view)
            restart_point = self._restart_point(view, way, saved)
            if restart_point is not None:
                return {"way": "begin", **asdict(saved), "round": restart_point.round, "after_round": saved.round}

    def _restart_point(self, view: View, way: Way | RestartPoint, saved: SavedState) -> RestartPoint | None:
        """What is agreed on; None: look again. Raises RecoveryFailed where others have another checkpoint of a step."""
        if isinstance(way, RestartPoint):
            if way.state_digest != saved.state_digest:
                raise RecoveryFailed(
                    f"the checkpoint of step {saved.step} is {saved.state_digest} here, and {way.state_digest} on "
                    f"{way.member}: ckpt.path is not the same folder on both"
                )
            return way
        member_id = self.run.mesh.member.member_id
        proposal = restart_point_after(
            view, round=saved.round, step=saved.step, state_digest=saved.state_digest, member=member_id
        )
        return proposal if self.run.store.propose_restart_point(proposal, view) else None

    def _without_checkpoint(self, view: View) -> dict[str, Any]:
        if view.committed is None:
            _say_new(self.run.restorer.url)
            return {"way": "found"}
        raise RecoveryFailed(
            f"the nodes of this run are gone since round {view.committed.round}, and it has no checkpoint; "
            "start it anew with another run.id"
        )

    def _go_on_from_memory(self) -> RoundReport | None:
        """Come back with what this node's trainer had in memory when it crashed; None where that is of no use."""
        from_s, held = time.monotonic(), list[HeldState]()

        def recall() -> dict[str, Any] | None:
            found = self.run.memory.recall(self.run.buffers.numel)
            held.extend([] if found is None else [found])
            return (
                None
                if found is None
                else {"round": found.round, "record": found.record, "state_digest": found.state_digest}
            )

        found = on_first_rank(self._local, recall)
        if found is None:
            return None
        sections = held.pop().sections if held else None
        digest = self.run.outer.adopt(found["round"], found["record"], sections)
        on_first_rank(self._local, self.run.memory.drop_held)
        verify(digest, found["state_digest"], "what this node had in memory", self._local)
        took_s = round(time.monotonic() - from_s, 3)
        on_first_rank(self._local, lambda: self._tell_of(found))
        self._events.emit("recovered", round=found["round"], digest=digest, took_s=took_s, source="memory")
        try:
            report = self.run.outer.join()
        except RecoveryFailed as error:
            _log.warning("what this node had in memory is too old", extra={"fields": {"why": str(error)}})
            return None
        self._events.emit("joined", member_id=report.member_id, round=report.round)
        return report

    def _tell_of(self, found: Mapping[str, Any]) -> None:
        """Say that the round in memory counts: the trainer that crashed may not have come to it. Local rank 0."""
        verdict = self.run.store.view(FOUNDING_ROUND).committed
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

    def _roll_back(self, order: RolledBack) -> RoundReport:
        """Take the checkpoint that the members agreed to go back to. Returns the report of the newest round."""
        report, sections = order.report, self.run.take_staged()
        digest = self.run.outer.adopt(report.round, order.record, sections)
        verify(digest, report.state_digest, f"the checkpoint of step {order.step}", self._local)
        has_inner = self.run.load_inner(order.step)
        skipped = [list(span) for span in order.record.get("skipped", ())]
        place = {"round": report.round, "step": order.step, "digest": digest}
        self._events.emit("rolled_back", **place, has_inner=has_inner, skipped=skipped)
        on_first_rank(self._local, lambda: self.run.point_latest(order.step))
        if report.progress.is_complete or self.hooks.upcoming():
            return report
        return self.run.outer.join()  # it asked for no samples, since the run was about to end

    def come_back(self, why: Fenced | RolledBack) -> RoundReport:
        """Return after the run went on without this node, whether or not it was founded by then, or went back."""
        if isinstance(why, RolledBack):
            return self._roll_back(why)
        self._events.emit("fenced", reason=str(why))
        self.run.come_back()
        return self.enter()

    def join(self) -> RoundReport:
        """Become a member of a run that goes on.

        Raises RunOver when it is complete, RecoveryFailed when attempts have failed for `patience_s` and none of them
        brought this node any nearer.
        """
        self._events.emit("recovering", round=self.run.outer.round)
        on_first_rank(self._local, lambda: self.run.fetcher.begin(self.run.outer.sections))
        failing_since_s, said = math.inf, ""
        while True:
            had_bytes, taken = self.run.fetcher.verified_bytes, None
            try:
                taken = self._recover()
                report = self.run.outer.join()
            except RecoveryFailed as error:
                way = on_first_rank(self._local, self._way_in)
                report = self._begin_again() if way == "begin" else None
                if report is not None:
                    return report
                now_s = time.monotonic()
                is_nearer = way == "follow" or self._came_nearer(had_bytes, taken)
                failing_since_s = math.inf if is_nearer else min(failing_since_s, now_s)
                if not broadcast_json(now_s - failing_since_s < self._patience_s, self._local):
                    raise RecoveryFailed(
                        f"{error}; came no further for {self._patience_s:g} s. If the run's nodes are gone, go on from "
                        "a checkpoint of it with --resume, or start one with a new run.id"
                    ) from error
                if str(error) != said:
                    said = str(error)
                    on_first_rank(self._local, lambda: self._say_wait(said, failing_since_s))  # noqa: B023
                time.sleep(_RETRY_S)
                continue
            self._events.emit("joined", member_id=self.run.mesh.member_id, round=report.round)
            return report

    def _say_wait(self, why: str, since_s: float) -> None:
        """Local rank 0."""
        view = self.run.store.view(FOUNDING_ROUND)
        left_s = min(since_s + self._patience_s - time.monotonic(), self._patience_s)
        until = datetime.now(UTC) + timedelta(seconds=left_s)
        fields = {"why": why, "waits_for": sorted(members_of(view) & view.alive), "until": f"{until:%H:%M:%SZ}"}
        way_out = "if these nodes are gone: --resume goes on from a checkpoint as soon as their leases have run out"
        _log.warning("no state yet", extra={"fields": {**fields, "type": way_out}})

    def _came_nearer(self, had_bytes: int, taken: int | None) -> bool:
        """Whether a failed attempt was of use: it verified more of a state, or led on from the round that was taken.

        The last round that it replayed may be the one that does not verify. Local rank 0.
        """
        return self.run.fetcher.verified_bytes > had_bytes if taken is None else self.run.outer.round > taken + 1

    def _recover(self) -> int:
        """Fetch a committed state and take it over; its round. Raises RecoveryFailed."""
        fetched = on_first_rank(self._local, self._fetch)
        digest = self.run.outer.adopt(fetched["round"], fetched["record"])
        try:
            verify(digest, fetched["state_digest"], f"the state of round {fetched['round']}", self._local)
        except RecoveryFailed:
            on_first_rank(self._local, self.run.fetcher.distrust_state)
            raise
        self._events.emit(
            "recovered", round=fetched["round"], digest=digest, took_s=fetched["took_s"], source="members"
        )
        return int(fetched["round"])

    def _fetch(self) -> dict[str, Any]:
        fetched = self.run.fetcher.fetch_state()
        return {
            "round": fetched.round,
            "record": fetched.record,
            "state_digest": fetched.state_digest,
            "took_s": fetched.took_s,
        }


def _say_new(url: str) -> None:
    _log.warning("nothing to resume: a new run begins", extra={"fields": {"no_checkpoint_in": url}})


def join_until_member(joiner: Joining, why: Fenced | RolledBack | None = None) -> RoundReport | None:
    """Become a member, again and again if the run goes on, or back, without this node meanwhile.

    `why`: this node was a member before. Returns the report of the round that it became a member with.
    """
    while True:
        try:
            return joiner.enter() if why is None else joiner.come_back(why)
        except (Fenced, RolledBack) as again:
            why = again
