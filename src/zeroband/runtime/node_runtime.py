"""A node in a run of several: its membership, outer state, journal, checkpoints, and the state that it serves."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from zeroband.checkpoint.restorer import Restorer, source_for
from zeroband.checkpoint.writer_process import PeerWriters, StoreWriters
from zeroband.checks.needs import COPIED_BYTES
from zeroband.config.outer import DilocoConfig, RoundsConfig
from zeroband.elastic.recovery.client import RecoveryClient
from zeroband.elastic.recovery.serving import StateServer
from zeroband.elastic.rounds.carriage import Carriage
from zeroband.elastic.rounds.elastic_device_mesh import on_first_rank
from zeroband.elastic.rounds.interfaces import (
    History,
    OuterParts,
    RunLength,
    Scorer,
    Scoring,
    verify,
)
from zeroband.elastic.rounds.journal import Journal, JournalBounds
from zeroband.errors import ConfigError, Leaving, RecoveryFailed, RunOver
from zeroband.kernels.codec import CODECS
from zeroband.node.launched import restarting_launcher
from zeroband.node.mesh import LocalMesh, all_ok, barrier
from zeroband.outer.device_state import require_device
from zeroband.outer.many_steps import ManySteps
from zeroband.outer.registry import are_rounds_steps, build_schedule
from zeroband.outer.schedule import Schedule
from zeroband.runtime.auto_rollback import AutoRollback
from zeroband.runtime.checkpoint_reports import CheckpointReports
from zeroband.runtime.node_membership import NodeMembership
from zeroband.runtime.node_parts import NodeParts, Remaining, StateParts
from zeroband.runtime.run_rules import phase_length_of, scoring_of, shape_of
from zeroband.state.feedback import ErrorFeedback
from zeroband.state.flat import FlatLayout, ShardMap, SharedBuffers
from zeroband.state.fragments import arranged, fragments_of, whole
from zeroband.state.round_state import RoundState, RoundUpdate

S = TypeVar("S", bound=RoundState | None)

_CLEAN_ENDS = (RunOver, Leaving, ConfigError)
"""Exceptions after which restarting the trainer would not help."""


def state_on_all(local: LocalMesh, kind: type[RoundState], get: Callable[[], S]) -> S:
    """Return a state from local rank 0 on all local ranks, or None; only rank 0 has its sections.

    Raises on all ranks what `get` raises on rank 0.
    """
    got: list[S] = []

    def described() -> dict[str, Any] | None:
        got.append(state := get())
        names = [one.name for one in fields(kind) if one.name != "sections"]
        return None if state is None else {name: getattr(state, name) for name in names}

    record = on_first_rank(local, described)
    return got[0] if got else cast(S, None if record is None else kind(**record))


def load_state(outer: Schedule[Any], state: RoundState, what: str, local: LocalMesh) -> str:
    """Load a state from its sections, or from the section buffers if it has none; returns its digest.

    `what`: names the state in an error. Raises RecoveryFailed if it does not have the digest that it claims.
    """
    digest = outer.adopt(state.round, state.record, state.sections or None)
    verify(digest, state.state_digest, what, local)
    return digest


class NodeRuntime:
    """A node's part in a run of several. Created by all local ranks together; `leave` releases everything.

    `on_event`: called on local rank 0. `scorer`: measures payloads, if the configuration asks for it.
    """

    def __init__(self, node: NodeParts, on_event: Callable[..., object], scorer: Scorer | None = None) -> None:
        self._node = node
        self._scoring = _scoring(node, scorer)
        config, layout = node.config, FlatLayout.of(node.parameters)
        with ExitStack() as stack:
            self.membership = member = NodeMembership(node, layout, stack, on_event)
            self.store, self.mesh, self.memory = member.store, member.mesh, member.memory
            self.journal = Journal(
                node.node_dir, JournalBounds(config.elastic.journal_s, round(config.elastic.journal_gb * 1e9))
            )
            stack.callback(self.journal.settle)
            self.buffers = SharedBuffers(member.folder, layout.numel, self.mesh.local)
            dialler, flags = member.dialler(), member.flags
            self.recovery = RecoveryClient(self.store, dialler, self.buffers, flags, node.faults, on_event)
            self.restorer = self._build_restorer(layout)
            """Reads checkpoints; None without a folder of them."""
            self.outer = self._build_outer(layout, on_event)
            # closed in reverse order: no request is served and no round travels once their buffers are gone
            stack.callback(self.outer.abandon)
            stack.callback(self.carriage.close)
            self.checkpoint_reports = CheckpointReports(self.store, config, node.node_id)
            stack.callback(self.checkpoint_reports.close)
            self._serve(stack)
            self._stack = stack.pop_all()

    def _build_restorer(self, layout: FlatLayout) -> Restorer | None:
        node, config = self._node, self._node.config
        if config.ckpt.path is None and not node.resumes:
            return None
        data, on_piece = node.describe_model().data, self.membership.flags.advance
        return Restorer(
            source_for(config, node.node_id), node.node_id, layout, node.faults, on_piece, node.shared, data
        )

    def _build_outer(self, layout: FlatLayout, on_event: Callable[..., object]) -> Schedule[Any]:
        node, config, local = self._node, self._node.config, self.mesh.local
        codec = CODECS[config.codec_name]
        if isinstance(config.outer, DilocoConfig):
            require_device(config.outer, codec, local.device)
        fragments = whole(layout)
        if isinstance(config.outer, RoundsConfig) and config.outer.fragments > 1:
            fragments = fragments_of(layout, config.outer.fragments, config.outer.fragment_pattern)
        wire_layout = ShardMap.of(arranged(layout, fragments), node.parameters, local)
        feedback = ErrorFeedback(self.buffers, wire_layout, codec)
        self.carriage = Carriage(local, self.buffers, feedback, self.recovery.fetch_offer)
        every = config.ckpt.rounds_between(are_rounds_steps=are_rounds_steps(config.outer))
        flush_every = every if config.ckpt.path is not None else None
        parts = OuterParts(
            mesh=self.mesh,
            model=node.parameters,
            inner=node.inner,
            buffers=self.buffers,
            shards=ShardMap.of(layout, node.parameters, local),
            fragments=fragments,
            feedback=feedback,
            length=RunLength(
                shape_of(config, node.sample_tokens), phase_length_of(config), node.departure, flush_every
            ),
            history=self._history(on_event),
            faults=node.faults,
            scoring=self._scoring,
            carriage=self.carriage if local.machines == 1 else None,
        )
        if node.build_schedule is not None:
            return node.build_schedule(parts)
        assert config.outer is not None, "a run of several nodes has an outer algorithm"
        return build_schedule(parts, config.outer, clip_norm=config.optim.clip_norm)

    def _history(self, on_event: Callable[..., object]) -> History:
        local, restorer, rollback = self.mesh.local, self.restorer, self._node.config.rollback
        auto_rollback = None
        if rollback is not None:
            assert restorer is not None, "the configuration requires it"
            auto_rollback = AutoRollback(rollback, self.store, restorer, local, on_event)
        return History(self.journal, self, auto_rollback, self.memory if local.rank == 0 else None)

    def _serve(self, stack: ExitStack) -> None:
        """Serve the state to joiners. The guardian announces the address."""
        if self._node.local.rank != 0:
            return
        outer = self.outer
        has_phases = isinstance(outer, ManySteps)
        server = StateServer(
            outer.live_state if has_phases and self.is_large else outer.copy_state,
            self.journal.await_entry,
            current_round=lambda: outer.round,
            needs_link=lambda: has_phases and outer.needs_link,
            offered=lambda: self.carriage.offered,
        )
        stack.callback(server.close)
        self.membership.serve_state(server.take)

    # -- the state ----------------------------------------------------------------------------------------------

    @property
    def state_bytes(self) -> int:
        """Size of the outer state."""
        return 4 * self.buffers.numel * len(self.outer.sections)

    @property
    def is_large(self) -> bool:
        """Whether the outer state is served in place, and a joiner may do better with a checkpoint."""
        return self.state_bytes > COPIED_BYTES

    @property
    def state_parts(self) -> StateParts:
        common, own = self.outer.sections, self.outer.local_sections
        held = {name: self.buffers[name] for name in (*common, *own)}
        return StateParts(common, own, held, {}, has_moments=self.outer.has_moments)

    @property
    def outer_parameters(self) -> Tensor:
        return self.buffers[self.outer.sections[0]]

    @property
    def sections(self) -> Mapping[str, Tensor]:
        """The outer state by section, (n,) float32 each, on CPU."""
        return {name: self.buffers[name] for name in self.outer.sections}

    def load_inner(self, step: int) -> bool:
        """Load this node's inner optimizer and local sections from the checkpoint that was read.

        Returns False, with fresh moments, if it has none. With DDP the outer state has the moments. All local ranks.
        """
        local, inner = self._node.local, self._node.inner
        if self.outer.has_moments and inner.moment_names:
            return True
        assert self.restorer is not None, "a checkpoint was read"
        own = {name: self.buffers[name] for name in self.outer.local_sections}
        has_inner = self.restorer.load_inner(step, inner, local, own if local.rank == 0 else {})
        if all_ok(has_inner, local):
            return True
        self.forget_inner()
        return False

    def forget_inner(self) -> None:
        """Reset the moments and the outer algorithm's local sections. Called by all local ranks."""
        self._node.inner.forget_moments()
        for name in self.outer.local_sections:
            if self._node.local.rank == 0:
                self.buffers[name].zero_()
        barrier(self._node.local)

    # -- for the outer algorithm: states and rounds that this node lacks ---------------------------------------------

    def fetch_entry(self, round: int, room: Callable[[int], Tensor]) -> RoundUpdate:
        """Fetch a round's update from a peer; `room` allocates memory on local rank 0. Called by all local ranks."""
        updates = [torch.empty(0, dtype=torch.uint8)]

        def fetch() -> dict[str, Any]:
            entry = self.recovery.fetch_entry(round, room)
            updates.append(entry.update)
            return {"record": entry.record, "state_digest": entry.state_digest}

        fetched = on_first_rank(self._node.local, fetch)
        return RoundUpdate(round, updates[-1], **fetched)

    def fetch_ahead(self, round: int, room: Callable[[int], Tensor]) -> RoundUpdate:
        """Fetch a round's update from a peer during training. On local rank 0."""
        return self.recovery.fetch_ahead(round, room)

    def stage(self, step: int, sections: Sequence[str]) -> RoundState:
        """Read and verify a checkpoint, and keep it until it is loaded. Called by all local ranks."""

        def stage() -> RoundState:
            if self.restorer is None:
                raise RecoveryFailed("this node has no ckpt.path, so it cannot read a checkpoint")
            return self.restorer.stage(step, sections)

        return state_on_all(self._node.local, RoundState, stage)

    # -- for the training loop ----------------------------------------------------------------------------------

    def show_progress(self) -> None:
        if self._node.local.rank == 0:
            self.membership.flags.advance()

    def folder_peers(self, members: Sequence[str]) -> tuple[frozenset[str], frozenset[str]]:
        return self.checkpoint_reports.folder_peers(self.mesh.member_id, members)

    @property
    def peer_writers(self) -> PeerWriters:
        return StoreWriters(self.store, self.membership.own_key.name(self._node.node_id))

    def open_folder(self, stack: ExitStack) -> Path:
        return self.membership.folder

    def announce_leaving(self) -> Remaining:
        assigned = set(self.outer.progress.assigned)
        staying = on_first_rank(self._node.local, lambda: sorted(self.store.announce_leaving(self.mesh.member_id)))
        if not assigned:
            return "all leave"
        return "others" if assigned & set(staying) else "none"

    def leave(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Release everything; if the launcher restarts a crashed trainer, keep this node's memory for the next one."""
        is_crash = kind is not None and issubclass(kind, Exception) and not issubclass(kind, _CLEAN_ENDS)
        self.membership.is_left = is_crash and bool(restarting_launcher(os.environ, left=True))
        self._stack.close()


def _scoring(node: NodeParts, scorer: Scorer | None) -> Scoring | None:
    """Return how payloads are scored, if at all. Raises ConfigError without a scorer."""
    rule = scoring_of(node.config)
    if rule is None:
        return None
    if scorer is None:
        raise ConfigError(
            "outer.score measures with the trainer's model and data, which a custom loop lacks; remove it"
        )
    return Scoring(rule, scorer)
