"""A run of a single node: no store, and no outer state in shared memory."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from zeroband.checkpoint.ownership import read_owner
from zeroband.checkpoint.restorer import Restorer, SavedState, source_for
from zeroband.checkpoint.storage import open_storage, reason_of
from zeroband.checkpoint.writer_process import PeerWriters
from zeroband.elastic.rounds.elastic_device_mesh import on_each_machine, on_first_rank
from zeroband.elastic.rounds.rollback import RolledBack
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.errors import Fenced, RecoveryFailed, RunOver
from zeroband.node.launched import is_restart, launch_of
from zeroband.node.mesh import all_ok
from zeroband.node.shm import NodeFolder
from zeroband.observe.events import Events
from zeroband.outer.no_algorithm import NoAlgorithm
from zeroband.runtime.build import TrainerParts
from zeroband.runtime.node_parts import Remaining, StateParts
from zeroband.runtime.node_runtime import state_on_all
from zeroband.runtime.restart import warn_nothing_to_resume
from zeroband.runtime.run_rules import shape_of
from zeroband.state.flat import FlatLayout, ShardMap, parameter_shards

PARAMS = "params"
"""The state's only section."""


class SingleNode:
    """The run of a single node, and its way in."""

    def __init__(self, node: TrainerParts, events: Events) -> None:
        self._node = node
        self.outer = NoAlgorithm(shape_of(node.config), launch_of(os.environ))
        self._events = events

    # -- its run ------------------------------------------------------------------------------------------------

    @property
    def state_parts(self) -> StateParts:
        return StateParts((PARAMS,), (), {}, {PARAMS: parameter_shards(self._node.parameters)}, has_moments=False)

    @property
    def outer_parameters(self) -> None:
        return None

    def show_progress(self) -> None:
        """Do nothing: a single node has no guardian."""

    def folder_peers(self, members: Sequence[str]) -> tuple[frozenset[str], frozenset[str]]:
        return frozenset({self._node.node_id}), frozenset()

    @property
    def peer_writers(self) -> PeerWriters:
        return PeerWriters()

    def open_folder(self, stack: ExitStack) -> Path:
        config, node_id = self._node.config, self._node.node_id

        def claim() -> None:
            stack.callback(NodeFolder(config.node.shm_dir, config.run.id, node_id).close)

        on_each_machine(self._node.local, claim)
        return NodeFolder.path_of(config.node.shm_dir, config.run.id, node_id)

    def announce_leaving(self) -> Remaining:
        return "none"

    # -- its way in ---------------------------------------------------------------------------------------------

    verified_at_s = None

    def enter(self) -> Sequence[RoundReport]:
        """Resume from a checkpoint as asked or after a crash. No round makes this node a member."""
        if self._node.config.resume is not None or on_first_rank(self._node.local, self._continues_after_crash):
            self._resume()
        return ()

    def rejoin(self, why: Fenced | RolledBack) -> Sequence[RoundReport]:
        raise AssertionError("a single node is never fenced or rolled back") from why

    def _continues_after_crash(self) -> bool:
        """Whether the previous trainer crashed and left checkpoints of this run. Local rank 0."""
        path, run_id = self._node.config.ckpt.path, self._node.config.run.id
        if path is None or not is_restart(os.environ):
            return False
        storage = open_storage(path, run_id, self._node.node_id)
        try:
            owner = read_owner(storage)
        except OSError as error:
            raise RecoveryFailed(f"cannot read {storage.url}: {reason_of(error)}") from error
        return owner is not None and owner.session == self.outer.record["session"]

    def _resume(self) -> None:
        """Resume from a checkpoint if there is one. Every local rank reads it and loads its shards.

        Raises RecoveryFailed, ConfigError, RunOver.
        """
        node, config, local, from_s = self._node, self._node.config, self._node.local, time.monotonic()
        layout = FlatLayout.of(node.parameters)
        source = source_for(config, node.node_id)
        targets = {PARAMS: torch.empty(layout.numel)}
        data = node.describe_model().data
        restorer = Restorer(source, node.node_id, layout, node.faults, shared=node.shared, data=data)

        def read() -> SavedState | None:
            saved = restorer.restore(targets)
            if saved is not None and saved.step >= config.train.total_steps:
                raise RunOver(f"the checkpoint of step {saved.step} is that of the end of the run (train.total_steps)")
            return saved

        saved = state_on_all(local, SavedState, read)
        if saved is None:
            if local.rank == 0:
                warn_nothing_to_resume(source.own.url)
            return
        if local.rank != 0:
            restorer.restore(targets, saved.step)
        ShardMap(layout, local.rank, local.world_size).load(parameter_shards(node.parameters), targets[PARAMS])
        self.outer.adopt(saved.round, saved.record)
        node.inner.seek(saved.step)
        has_inner = all_ok(restorer.load_inner(saved.step, node.inner, local), local)
        place = {"round": saved.round, "step": saved.step, "digest": saved.state_digest}
        took_s = round(time.monotonic() - from_s, 3)
        self._events.emit("resumed_from", **place, took_s=took_s, has_inner=has_inner, rejected=list(saved.rejected))
