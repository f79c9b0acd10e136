"""A node's part in a run that the user's own loop drives. Main thread of every rank.

Built of the trainer's parts, except its model and data.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import torch

from zeroband.config.outer import DilocoConfig
from zeroband.config.schema import RunConfig
from zeroband.config.store_url import shown_stores
from zeroband.data.ledger import count
from zeroband.dropin.inner import OptimizerFactory, ScheduledOptimizer, frozen_items, parameters_of
from zeroband.dropin.loop_state import CommonOptimizer, LoopDdp, LoopState, SignSteps, loop_state_of
from zeroband.dropin.peer_checks import PeerChecks
from zeroband.dropin.settings import LOCAL, OuterStep, address_of, config_of, shared_of
from zeroband.elastic.membership.departure import Departure
from zeroband.elastic.membership.records import BOOTSTRAP_ROUND
from zeroband.elastic.membership.resume_rules import members_of
from zeroband.elastic.rounds.elastic_device_mesh import on_first_rank
from zeroband.elastic.rounds.interfaces import OuterParts
from zeroband.elastic.rounds.rollback import RolledBack
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.elastic.store.local_server import RedisServer
from zeroband.errors import ConfigError, Fenced, Leaving, RunOver
from zeroband.node.faults import FaultPoints
from zeroband.node.mesh import LocalMesh, all_ok, barrier, broadcast_json, each_ok, join_local_mesh
from zeroband.node.names import node_dir_of, node_id_of
from zeroband.node.sharding import NamedParameters, is_sharded
from zeroband.observe.log import get_logger
from zeroband.observe.metrics import MetricValue
from zeroband.outer.registry import build_schedule, schedule_of
from zeroband.outer.schedule import Schedule
from zeroband.outer.torch_optimizer import TorchDiLoCo, TorchOuterOptimizer
from zeroband.runtime.checkpointing import Checkpointing, drain, open_checkpoints, save_if_last
from zeroband.runtime.join import open_runtime
from zeroband.runtime.node_parts import NodeParts
from zeroband.runtime.own_store import open_own_store
from zeroband.runtime.report import NodeReport, Report
from zeroband.state.digest import digest_of

_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class DropInOptions:
    """The user's options."""

    batch_size: int
    """Samples of this node in one inner step, over all its ranks."""
    inner_steps: int | None
    """None: the algorithm's default."""
    total_steps: int | None
    """Inner steps of the whole run; None: no end."""
    store: str | Sequence[str] | None
    """Address of the run's store; None: from the environment, else LOCAL."""
    outer: OuterStep | None = None
    """None: the algorithm's own step."""
    settings: Mapping[str, object] = field(default_factory=dict[str, object])
    inner: OptimizerFactory | None = None
    """Builds the inner optimizer; None: the user passed a built one."""
    state: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Objects with a state_dict that checkpoints include."""


class Session:
    """Created and used by all ranks of the node together. The node is a member of the run when it is created.

    `is_done` is true at once if the run is complete. Raises ConfigError, also if the node's settings differ from the
    run's, RecoveryFailed, StoreLost.
    """

    def __init__(self, inner: ScheduledOptimizer, options: DropInOptions) -> None:
        groups = inner.optimizer.param_groups
        self._inner = inner
        self._options = options
        self.is_done = False
        """Whether the run is complete, or this node has left as it was asked to."""
        self.last_round: RoundReport | None = None
        address = address_of(options.store, os.environ)
        with ExitStack() as stack:
            first = next((parameter for group in groups for parameter in group["params"]), torch.empty(0))
            self._local = join_local_mesh(first.device)
            stack.callback(self._local.close)
            parameters = parameters_of(groups, ranks=self._local.world_size)
            if _holds_copies(parameters, self._local):
                _require_equal_copies(parameters, self._local)
            self._parameters = parameters
            self.store_url = _open_store(address, self._local, stack)
            self._node = self._build_node(parameters, stack)
            self.store_url = self._node.config.store.address or self.store_url
            self._report = self._open_report(parameters, stack)
            self._run, self._joiner = open_runtime(self._node, self._report.events, stack)
            self._peer_checks = self._build_peer_checks(is_own=address == LOCAL)
            self._checkpoints: Checkpointing = Checkpointing()
            joined = self._enter_first(is_own_store=address == LOCAL)
            if joined is not None:
                self._checkpoints = open_checkpoints(self._node, self._run, self._report.events, stack)
            if joined:
                self._checkpoints.take_if_due(joined)
            self._stack = stack.pop_all()

    # -- becoming a member --------------------------------------------------------------------------------------

    def _build_node(self, parameters: NamedParameters, stack: ExitStack) -> NodeParts:
        options, local = self._options, self._local
        config = config_of(
            options.settings,
            os.environ,
            store_url=self.store_url,
            inner_steps=options.inner_steps,
            outer=options.outer,
            total_steps=options.total_steps,
        )
        copies = local.world_size if _holds_copies(parameters, local) else 1
        _require_usable(config, options.outer, copies=copies)
        self._own, inner_items = loop_state_of(
            config.outer, self._inner, options.inner, options.state, parameters.named, ranks=local.world_size
        )
        if config.ckpt.path is not None:
            self._own.pack()  # a state that a checkpoint cannot hold fails here, not at the first checkpoint
        node_id, departure = broadcast_json(node_id_of(config), local), Departure(config.fault.grace_s)
        config, port = open_own_store(config, local, departure, stack)
        return NodeParts(
            config=config,
            node_id=node_id,
            node_dir=node_dir_of(config),
            shared={
                **shared_of(config, parameters.shapes, options.total_steps, options.outer),
                **frozen_items(self._inner.optimizer.param_groups),
                **inner_items,
            },
            local=local,
            parameters=parameters,
            inner=self._own,
            departure=departure,
            port=port,
            faults=FaultPoints(config.fault.inject if local.rank == 0 else ()),
            build_schedule=partial(_build_schedule, config, options.outer, self._own),
        )

    def _open_report(self, parameters: NamedParameters, stack: ExitStack) -> Report:
        """Open the report of local rank 0; an error is raised on all ranks."""
        reports: list[NodeReport] = []

        def open_one() -> None:
            try:
                report = NodeReport(self._node, parameters=parameters.numel, total_steps=self._options.total_steps)
            except OSError as error:
                raise ConfigError(
                    f"cannot write to {self._node.node_dir}: {error.strerror}; set run.dir in settings to a folder "
                    "that this user may write to"
                ) from error
            stack.callback(report.close)
            report.started()
            stack.push(report.leave)
            reports.append(report)

        on_first_rank(self._local, open_one)
        return reports[0] if reports else Report()

    def _build_peer_checks(self, *, is_own: bool) -> PeerChecks | None:
        """Build the checks of peers on local rank 0; None on the others."""
        if self._local.rank != 0:
            return None
        address = None if is_own else shown_stores(self.store_url)
        return PeerChecks(self._run.store, self._node.config.run.id, address, self._report.events.emit)

    def _enter_first(self, *, is_own_store: bool) -> Sequence[RoundReport] | None:
        """Enter the run and log where; returns the round that made this node a member, if one did.

        Returns None after setting `is_done` if the run is complete, or if this node is to leave already.
        """
        run_id, shown = self._node.config.run.id, shown_stores(self.store_url)
        try:
            rounds = self._enter(None)
        except RunOver as over:
            self._end_complete(over)
            return None
        except Leaving as early:
            self._end_unfinished(early)
            return None
        if self._local.rank != 0:
            return rounds
        place = self._place(self.last_round)
        where = f"store {shown}"
        if is_own_store:
            where = (
                "this process holds the store, reachable only by its address: peers on this machine join with "
                f"store={self.store_url!r}"
            )
        say(f"in run {run_id!r} as {self._node.node_id}, {place}, at inner step {self.inner_step}; {where}")
        return rounds

    def _place(self, joined: RoundReport | None) -> str:
        """Describe which member this node is; before its first contribution, how many members it joins."""
        if joined is not None:
            return f"member {joined.members.index(joined.member_id) + 1} of {len(joined.members)}"
        view = self._run.store.view(BOOTSTRAP_ROUND)
        return f"joining {len(members_of(view) & view.alive)}"

    def _end_complete(self, over: RunOver) -> None:
        """End because the run is complete, although this node had no part in its last round."""
        self.is_done = True
        if self._local.rank == 0:
            say(f"run {self._node.config.run.id!r}: {over}. is_done is true, and further steps do not count")

    def _end_unfinished(self, leaving: Leaving) -> None:
        """End because this node was asked to leave and no node takes over its work."""
        self.is_done = True
        _log.warning("left without handing over", extra={"fields": {"why": str(leaving)}})

    def _enter(self, why: Fenced | RolledBack | None) -> Sequence[RoundReport]:
        joined = self._joiner.enter() if why is None else self._joiner.rejoin(why)
        self.last_round = joined[-1] if joined else self.last_round
        self._report.run_entered(self._run.outer.record["session"], joined, self._joiner.verified_at_s)
        self._begin_phase()
        self._end_if_due()
        return joined

    def _begin_phase(self) -> None:
        """Begin the phase of the steps that the run has dealt this node."""
        self._steps = 0
        self._dealt = count(self._run.outer.upcoming())
        self._from_s = time.monotonic()
        self.is_done = self._run.outer.progress.is_complete
        if self._peer_checks is not None and self.last_round is not None:
            self._peer_checks.begin_round(self.last_round)

    # -- inner steps --------------------------------------------------------------------------------------------

    @property
    def inner_step(self) -> int:
        """Inner steps of the run so far, including those before this node joined."""
        return self._run.outer.inner_step

    def ask_to_leave(self) -> None:
        """End the phase with the next inner step, and leave. Safe in a signal handler."""
        self._node.departure.ask(time.monotonic())

    def begin_step(self) -> None:
        """Begin an inner step. Raises RunOver after the last one."""
        if self.is_done:
            raise RunOver(f"this node is done after inner step {self.inner_step}; end the loop when is_done is true")
        self._checkpoints.wait_for_copy()

    def end_step(self, loss: float | None) -> None:
        """End an inner step, with the outer step that is due. `loss`: of the step, if known.

        Sets `is_done` if the run was completed without this node. Raises RecoveryFailed, StoreLost.
        """
        try:
            self._step(loss)
        except RunOver as over:
            self._end_complete(over)
        except Leaving as late:
            self._end_unfinished(late)

    def _step(self, loss: float | None) -> None:
        node, hooks = self._node, self._run.outer
        self._steps += 1
        if self._steps == 1 and self._peer_checks is not None:
            self._peer_checks.first_step_done(self._parameters.named.values())
        hooks.learned(self._options.batch_size, math.nan if loss is None else loss)
        node.faults.at("inner", hooks.round + 1)
        ends_round, before = self._ends_round(), hooks.progress
        step_s, from_s = time.monotonic() - self._from_s, time.monotonic()
        if ends_round and self._peer_checks is not None:
            self._peer_checks.publish(hooks.round + 1, self._run.mesh.member_id)
        try:
            if not hooks.has_own_steps:
                hooks.sync_gradients(hooks.inner_step, self._options.batch_size)
                assert isinstance(self._own, CommonOptimizer | SignSteps)
                self._own.step()
            synced = hooks.sync_parameters(hooks.inner_step, ends_round=ends_round)
        except (Fenced, RolledBack) as why:
            self._rejoin(why)
            return
        self.last_round = synced[-1] if synced else self.last_round
        if self._peer_checks is not None:
            self._peer_checks.round_done(list(synced))
        if hooks.progress is not before:
            self._checkpoints.take_if_due(synced)
        self._record(loss, step_s, time.monotonic() - from_s, list(synced))
        self._from_s = time.monotonic()
        if ends_round or hooks.progress.is_complete:
            self._begin_phase()
            self._end_if_due()

    @property
    def has_common_steps(self) -> bool:
        """Whether all nodes make each inner step together, in `end_step`."""
        return not self._run.outer.has_own_steps

    def _rejoin(self, why: Fenced | RolledBack) -> None:
        """Become a member again. A fenced node that is to leave does not: the others hold a newer state than it."""
        if isinstance(why, RolledBack):
            self._enter(why)
            return
        self._end_if_due(saves=False)
        if not self.is_done:
            self._checkpoints.take_if_due(self._enter(why))

    def _ends_round(self) -> bool:
        """Whether the round ends now. All ranks get one answer, whichever was asked to leave or is out of time."""
        hooks, departure = self._run.outer, self._node.departure
        stays, has_time = each_ok([not departure.is_urgent, not hooks.is_time_over(self._steps)], self._local)
        if not stays:
            departure.ask(time.monotonic())
        return not (stays and has_time) or self._steps >= self._dealt

    def _end_if_due(self, *, saves: bool = True) -> None:
        """Set `is_done` if the run is complete, or if this node was asked to leave. Call between two rounds.

        `saves`: take a checkpoint if no other node continues.
        """
        if self.is_done:
            self._report.run_finished()
        elif broadcast_json(self._node.departure.is_asked, self._local):
            drain(self._node, self._run, self._checkpoints if saves else Checkpointing(), self._report)
            self.is_done = True

    def _record(self, loss: float | None, step_s: float, blocked_s: float, synced: list[RoundReport]) -> None:
        values: dict[str, MetricValue | None] = {
            "train/loss": loss,
            "train/lr": float(self._inner.optimizer.param_groups[0]["lr"]),
            "train/step_s": step_s + blocked_s,
            "outer/blocked_s": blocked_s,
        }
        self._report.record(self.inner_step, values, synced)

    # -- the end ------------------------------------------------------------------------------------------------

    def close(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """Leave at once, and release everything, including the process groups that were created here.

        After a clean end the ranks wait for each other first: a rank that closes its group fails the others'.
        """
        try:
            if kind is None:
                barrier(self._local)
                if not self.is_done and self._node.config.ckpt.path is not None:
                    save_if_last(self._run, self._checkpoints)
        finally:
            self._stack.__exit__(kind, error, trace)

    def abandon(self) -> None:
        """Release everything without waiting for the other ranks or nodes."""
        self._stack.close()


def say(text: str) -> None:
    """Log a message for the user; on standard error if the program has no logging set up."""
    if _log.hasHandlers() and _log.isEnabledFor(logging.INFO):
        _log.info(text)
    else:
        print(f"zeroband: {text}", file=sys.stderr, flush=True)


def _open_store(url: str, local: LocalMesh, stack: ExitStack) -> str:
    """Return the address of the run's store, which is started here for LOCAL."""
    if url != LOCAL:
        return url
    return str(on_first_rank(local, lambda: stack.enter_context(RedisServer()).url))


def _holds_copies(parameters: NamedParameters, local: LocalMesh) -> bool:
    """Whether several ranks hold the whole model each."""
    return local.world_size > 1 and not any(is_sharded(p) for p in parameters.named.values())


def _require_equal_copies(parameters: NamedParameters, local: LocalMesh) -> None:
    """Raise ConfigError on all ranks if their copies differ."""
    own = digest_of(*(p.detach().cpu() for p in parameters.named.values()))
    if not all_ok(own == broadcast_json(own, local), local):
        raise ConfigError(
            "the ranks of this node hold different parameters; wrap the model in DistributedDataParallel, or broadcast "
            "them from rank 0, before the optimizer is made"
        )


def _require_usable(config: RunConfig, outer: OuterStep | None, *, copies: int) -> None:
    """Raise ConfigError for options that need a single copy of the model, or an outer step by SGD."""
    for key, unfit in (("merge", "eager"), ("state_device", "cuda")):
        if getattr(config.outer, key, None) != unfit:
            continue
        if copies > 1:
            raise ConfigError(
                f"outer.{key} = {unfit!r} with {copies} ranks that each hold the whole model: shard it with FSDP2, or "
                "start a node for each rank"
            )
        if isinstance(outer, TorchOuterOptimizer):
            raise ConfigError(
                f"outer.{key} = {unfit!r} needs an outer step by SGD, and outer_optimizer is {outer}: drop the one, or "
                "give torch.optim.SGD"
            )


def _build_schedule(config: RunConfig, outer: OuterStep | None, own: LoopState, parts: OuterParts) -> Schedule[Any]:
    """Build the outer algorithm of a loop that clips its gradients itself."""
    assert config.outer is not None, "the drop-in has one"
    if isinstance(outer, TorchOuterOptimizer):
        assert isinstance(config.outer, DilocoConfig)
        return schedule_of(parts, config.outer, TorchDiLoCo(parts, config.outer, outer))
    if isinstance(own, CommonOptimizer):
        return schedule_of(parts, config.outer, LoopDdp(parts, own))
    return build_schedule(parts, config.outer, clip_norm=None)
