"""Builds a node's place among the others: membership, data path, outer state, journal, checkpoints to begin from."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeroband.checkpoint.restorer import Restorer, SavedState, source_for
from zeroband.checkpoint.writer_process import PeerWriters, StoreWriters
from zeroband.checks.needs import COPIED_BYTES
from zeroband.config.outer import (
    CustomConfig,
    DdpConfig,
    DemoConfig,
    DilocoConfig,
    RoundsConfig,
    SparseLocoConfig,
)
from zeroband.config.schema import RunConfig
from zeroband.elastic.membership.epoch import Rules
from zeroband.elastic.membership.holdings import Holding
from zeroband.elastic.membership.node_key import NodeKey
from zeroband.elastic.membership.progress import RunShape
from zeroband.elastic.membership.records import FOUNDING_ROUND, View, view_to_record
from zeroband.elastic.membership.resume_rules import begins_on_checkpoint, rounds_since
from zeroband.elastic.membership.scoring import ScoringRule
from zeroband.elastic.recovery.client import RecoveryClient
from zeroband.elastic.recovery.serving import StateServer
from zeroband.elastic.rounds.elastic_device_mesh import ElasticDeviceMesh, on_first_rank
from zeroband.elastic.rounds.interfaces import OuterAlgorithm, OuterParts, Scorer
from zeroband.elastic.rounds.journal import Journal, JournalBounds
from zeroband.elastic.rounds.member import Member, NodeIdentity, RunAccess
from zeroband.elastic.rounds.phase import PhaseLength
from zeroband.elastic.store.backup import LiveBackup
from zeroband.elastic.store.failover import StoreFailover
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.elastic.transport.handover import HandedOver
from zeroband.errors import ConfigError, JoinRefused, Leaving, RecoveryFailed, RunOver
from zeroband.node.mesh import LocalMesh, all_ok, barrier
from zeroband.node.shared_flags import SharedFlags
from zeroband.node.shm import NodeFolder, is_restart, restarting_launcher
from zeroband.observe.log import get_logger
from zeroband.observe.stall import write_bundle
from zeroband.outer.ddp import Ddp
from zeroband.outer.device_state import require_device
from zeroband.outer.many_steps import ManySteps
from zeroband.outer.registry import are_rounds_steps, build_algorithm
from zeroband.runtime.abandoned_run import AbandonedRunWait
from zeroband.runtime.auto_rollback import AutoRollback
from zeroband.runtime.holdings import Holdings
from zeroband.runtime.node_parts import NodeParts
from zeroband.runtime.own_key import run_keys
from zeroband.runtime.training_run import StateParts, Staying
from zeroband.runtime.transport_setup import TransportSetup, codec_of
from zeroband.state.crash_memory import NodeMemory
from zeroband.state.feedback import ErrorFeedback
from zeroband.state.flat import FlatLayout, ShardMap, SharedBuffers
from zeroband.state.fragments import arranged, fragments_of, whole
from zeroband.state.round_state import RoundState, RoundUpdate

_CLEAN_ENDS = (RunOver, Leaving, ConfigError)
"""Ends after which another start would make nothing better."""

_FIRST_CONTACT_S = 30.0
"""A Redis that does not answer at the start for so long is most likely not there."""

_log = get_logger(__name__)


def shape_of(config: RunConfig, sample_tokens: int = 0) -> RunShape:
    """What turns rounds into steps and samples. `sample_tokens`: targets of a sample at most; 0: not known."""
    shape = RunShape(config.train.total_steps, config.train.batch_size, sample_tokens=sample_tokens)
    match config.outer:
        case RoundsConfig() as outer:
            return replace(shape, reads_ahead=outer.overlap != 0, closing_rounds=outer.fragments - 1)
        case DemoConfig() as outer:
            return replace(shape, reads_ahead=outer.overlap != 0)
        case _:
            return shape


def phase_length_of(config: RunConfig) -> PhaseLength:
    """How many inner steps this node makes in a round; DDP and DeMo have rounds of one step."""
    if not isinstance(config.outer, RoundsConfig):
        return PhaseLength(1)
    return PhaseLength(config.outer.phase_steps, config.outer.inner_seconds)


def scoring_of(config: RunConfig) -> ScoringRule | None:
    """Which payloads are scored by held-out loss; None: none is."""
    score = config.outer.score if isinstance(config.outer, SparseLocoConfig | DemoConfig) else None
    return None if score is None else ScoringRule(score.rounds, score.members, score.counts)


def rules_of(config: RunConfig, transfer_bytes: int = 0, sample_tokens: int = 0) -> Rules:
    """What the run asks of a round. `transfer_bytes`: of a contribution to it; 0: links do not matter.

    `sample_tokens`: as for `shape_of`.
    """
    outer, elastic = config.outer, config.elastic
    weighs_equally = isinstance(outer, RoundsConfig | DdpConfig) and outer.weights == "equal"
    rules = Rules(
        elastic.min_nodes,
        elastic.start_nodes,
        has_several_stores=config.store.are_several,
        counts_equally=weighs_equally,
        is_robust=isinstance(outer, RoundsConfig | DemoConfig) and outer.robust is not None,
        scoring=scoring_of(config),
        sites=config.comm.sites if config.comm.backend == "native" else "off",
        shape=shape_of(config, sample_tokens),
    )
    if not isinstance(outer, RoundsConfig):
        return rules
    return replace(
        rules,
        straggler_deadline_s=outer.straggler_deadline_s,
        straggler_grace=outer.straggler_grace,
        quorum=outer.quorum,
        transfer_bytes=transfer_bytes,
        hidden=1.0 if outer.overlap_steps is None else outer.overlap_steps / outer.phase_steps,
    )


class NodeRuntime:
    """A node's place in a run of several: owns the membership, the shared memory and the state server.

    Made by all local ranks together; `close()` gives everything back. `on_event`: told of events on local rank 0.
    `scorer`: measures payloads, where the configuration asks for it.
    """

    def __init__(self, node: NodeParts, on_event: Callable[..., object], scorer: Scorer | None = None) -> None:
        config, local = node.config, node.local
        self._scorer = _required(scorer, config)
        self._on_event = on_event
        assert config.store.address is not None and config.outer is not None
        self._node = node
        self._store_url = config.store.address
        self._keys = run_keys(config, node.node_dir)
        self._server: StateServer | None = None
        self._is_left = False
        self._is_restart = is_restart(os.environ)
        self._vacancy = AbandonedRunWait(config, node.node_id, is_restart=self._is_restart, on_event=on_event)
        with ExitStack() as stack:
            self.store = self._open_store(stack)
            layout = FlatLayout.of(node.parameters)
            self._shared: Mapping[str, str] = on_first_rank(local, self._match_run)
            self._folder = NodeFolder.path_of(config.node.shm_dir, config.run.id, node.node_id)
            self.memory = NodeMemory(
                self._folder,
                launcher=restarting_launcher(os.environ),
                layout=layout.digest(),
                is_restart=self._is_restart,
            )
            on_first_rank(local, lambda: self._claim_folder(stack))
            self._flags = SharedFlags(self._folder / "flags", create=False)
            stack.callback(self._flags.close)
            self._pids = _pids_of_ranks(local)
            self._plane = self._open_plane()
            stack.callback(self._plane.close)
            self.mesh = self._build_mesh(layout)
            stack.callback(self.mesh.close)
            self.journal = Journal(
                node.node_dir, JournalBounds(config.elastic.journal_s, round(config.elastic.journal_gb * 1e9))
            )
            stack.callback(self.journal.settle)
            self.buffers = SharedBuffers(self._folder, layout.numel, self.mesh.local)
            self.recovery = RecoveryClient(
                self.store, self._plane.dialler(node.node_id), self.buffers, self._flags, node.faults, on_event
            )
            self._restorer: Restorer | None = None
            self.outer = self._build_outer(layout)
            stack.callback(self.outer.abandon)
            self._restorer = self._build_restorer(layout)
            self.holdings = Holdings(self.store, config, node.node_id)
            stack.callback(self.holdings.close)
            self._serve(stack)
            self._stack = stack.pop_all()

    def _open_store(self, stack: ExitStack) -> RedisStore:
        """Reach the store: soon, where the address is wrong; later on a node waits for it at its boundary."""
        config = self._node.config

        def before_retry() -> None:
            if self._node.departure.is_overdue(time.monotonic()):
                raise Leaving("asked to leave while Redis was out of reach")

        store = RedisStore(
            self._store_url,
            config.run.id,
            key=self._keys,
            lease_s=config.fault.time_outs.lease_s,
            patience_s=config.fault.time_outs.store_s,
            before_retry=before_retry,
        )
        store.judge.on_forgery = lambda place, member: self._tell_impostor(member, place)
        stack.callback(store.close)
        if config.run.token is None and self._node.local.rank == 0:
            _log.warning(
                "no run.token: whoever reaches the store or a node's port can join this run and fetch the model"
            )
        waits_s = config.elastic.start_timeout_s if config.store.are_of_nodes else _FIRST_CONTACT_S
        on_first_rank(self._node.local, lambda: store.reach(patience_s=waits_s, least_stores=config.least_stores))
        store.trust_address()
        return store

    def _open_plane(self) -> TransportSetup:
        node = self._node
        return TransportSetup(
            node.config,
            self.store,
            self._flags,
            node.local,
            node.faults,
            self._answer_requests,
            key=self._keys,
            on_poser=self._tell_impostor,
            port=node.port,
        )

    def _tell_impostor(self, member_id: str, where: str) -> None:
        self._on_event("impostor", member_id=member_id, where=where)

    @property
    def _own_key(self) -> NodeKey:
        assert self._keys.node is not None, "run_keys gives it one"
        return self._keys.node

    def _match_run(self) -> dict[str, str]:
        try:
            return self.store.found_or_match(self._node.shared)
        except JoinRefused:
            if self.resumes and self._outlives_dead_run():
                return self.store.found_or_match(self._node.shared)
            raise

    def _claim_folder(self, stack: ExitStack) -> None:
        config = self._node.config
        launcher = restarting_launcher(os.environ, left=True)
        folder = NodeFolder(
            config.node.shm_dir, config.run.id, self._node.node_id, self.memory.set_aside, launcher=launcher
        )
        stack.callback(lambda: folder.close(is_left=self._is_left))
        SharedFlags(folder.path / "flags", create=True).close()

    def _new_member(self) -> Member | None:
        """Another membership of this node; on local rank 0 only."""
        if self._node.local.rank != 0:
            return None
        config = self._node.config
        identity = NodeIdentity(
            node_id=self._node.node_id,
            listen=self._plane.listen,
            rank_pids=self._pids,
            launcher_pid=os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid(),
            shm_dir=self._folder,
            site=config.node.site,
            store_port=0 if self._node.port is None else self._node.port.number,
        )
        run = RunAccess(
            store=self.store,
            store_url=self._store_url,
            run_id=config.run.id,
            shared=self._shared,
            on_stall=self._record_stall,
            inbox=self._plane.inbox,
            on_event=self._on_event,
            start_mover=self._start_mover,
            name_member=self._own_key.new_member_id,
        )
        return Member(run, identity, self._flags, config.fault.time_outs, self._node.departure)

    def _start_mover(self, member_id: str, memory: LiveBackup) -> StoreFailover | None:
        if not self.store.has_several:
            return None
        tell_s = self._node.config.fault.time_outs.lease_s
        return StoreFailover(self.store, member_id, memory, self._flags, self._on_event, tell_s=tell_s)

    def _record_stall(self, reason: str, view: View) -> None:
        write_bundle(self._node.node_dir, reason=reason, view=view_to_record(view), rank_pids=self._pids)

    def _build_mesh(self, layout: FlatLayout) -> ElasticDeviceMesh:
        config, local = self._node.config, self._node.local
        return ElasticDeviceMesh(
            local.twin(),
            self._new_member(),
            self._plane.open(),
            self._flags,
            rules_of(config, self._transfer_bytes(layout), self._node.sample_tokens),
            start_timeout_s=config.elastic.start_timeout_s,
        )

    def _transfer_bytes(self, layout: FlatLayout) -> int:
        """What a contribution takes where it is encoded values; payloads are so small that links do not matter."""
        outer = self._node.config.outer
        if not isinstance(outer, DilocoConfig | CustomConfig):
            return 0
        return codec_of(self._node.config).encoded_size(layout.numel // outer.fragments)

    def _build_outer(self, layout: FlatLayout) -> OuterAlgorithm:
        config, local = self._node.config, self.mesh.local
        codec = codec_of(config)
        if isinstance(config.outer, DilocoConfig):
            require_device(config.outer, codec, local.device)
        fragments = whole(layout)
        if isinstance(config.outer, RoundsConfig) and config.outer.fragments > 1:
            fragments = fragments_of(layout, config.outer.fragments, config.outer.fragment_pattern)
        sent = ShardMap.of(arranged(layout, fragments), self._node.parameters, local)
        every = config.ckpt.rounds_between(are_rounds_steps=are_rounds_steps(config.outer))
        parts = OuterParts(
            mesh=self.mesh,
            model=self._node.parameters,
            inner=self._node.inner,
            buffers=self.buffers,
            shards=ShardMap.of(layout, self._node.parameters, local),
            fragments=fragments,
            sent=sent,
            codec=codec,
            feedback=ErrorFeedback(self.buffers, sent, codec),
            journal=self.journal,
            shape=shape_of(config, self._node.sample_tokens),
            phase_length=phase_length_of(config),
            departure=self._node.departure,
            faults=self._node.faults,
            fetch_entry=self._fetch_entry,
            stage=self._stage,
            corpus=self._node.corpus,
            flush_every=every if config.ckpt.path is not None else None,
            auto_rollback=self._auto_rollback(),
            scoring=scoring_of(config),
            scorer=self._scorer,
            memory=self.memory if local.rank == 0 else None,
        )
        if self._node.build_algorithm is not None:
            return self._node.build_algorithm(parts)
        assert config.outer is not None, "a run of several nodes has an outer algorithm"
        return build_algorithm(parts, config.outer, clip_norm=config.optim.clip_norm)

    def _auto_rollback(self) -> AutoRollback | None:
        config = self._node.config.rollback
        if config is None:
            return None
        return AutoRollback(config, self.store, lambda: self.restorer, self.mesh.local, self._on_event)

    def _fetch_entry(self, round: int, room: Callable[[int], Tensor]) -> RoundUpdate:
        updates = [torch.empty(0, dtype=torch.uint8)]

        def fetch() -> dict[str, Any]:
            entry = self.recovery.fetch_entry(round, room)
            updates.append(entry.update)
            return {"record": entry.record, "state_digest": entry.state_digest}

        said = on_first_rank(self.mesh.local, fetch)
        return RoundUpdate(round, updates[-1], **said)

    @property
    def mixes_rounds(self) -> bool:
        """Whether a joiner can make one state of parts that are of several rounds.

        So it is where an outer step moves each value by itself; an inner optimizer may step whole matrices.
        """
        return isinstance(self.outer, ManySteps)

    # -- checkpoints --------------------------------------------------------------------------------------------

    @property
    def resumes(self) -> bool:
        """Whether this node may begin the run again on a checkpoint."""
        return self._node.config.resume is not None

    def may_begin_again(self, view: View) -> bool:
        """Whether this node may found the run again on a checkpoint: if it was asked to, or nobody is left.

        Without being asked, only where the checkpoints are those of this very run, and its members had time to come
        back. Raises RecoveryFailed where they did not, and there is no checkpoint. Local rank 0.
        """
        return self.resumes or self._vacancy.is_over(view, self.mesh.member_id)

    def _outlives_dead_run(self) -> bool:
        """Wait until it is clear whether the run in the store still lives: nodes that resume a dead one may differ."""
        time_outs = self._node.config.fault.time_outs
        deadline_s = time.monotonic() + 2 * time_outs.lease_s
        while not (is_dead := self.store.forget_dead_run()) and time.monotonic() < deadline_s:
            time.sleep(time_outs.renew_s)
        return is_dead

    def _build_restorer(self, layout: FlatLayout) -> Restorer | None:
        """Reads checkpoints, where there is a folder of them. Raises ConfigError."""
        node, config = self._node, self._node.config
        if config.ckpt.path is None and config.resume is None:
            return None
        source = source_for(config, node.node_id)
        targets = {name: self.buffers[name] for name in self.outer.sections}
        data = node.trained_on().data
        return Restorer(source, node.node_id, layout, targets, node.faults, self._flags.advance, node.shared, data)

    @property
    def restorer(self) -> Restorer:
        """Raises RecoveryFailed where this node cannot read checkpoints."""
        if self._restorer is None:
            raise RecoveryFailed("this node has no ckpt.path, so it cannot read a checkpoint")
        return self._restorer

    def holding(self, step: int | None = None, rejected: Mapping[int, str] | None = None) -> Holding:
        """What this node has to begin the run with; `step`: of the checkpoint that others ask for. Local rank 0.

        `rejected`: as `Restorer.holding` says.
        """
        return Holding() if self._restorer is None else self._restorer.holding(step, rejected)

    @property
    def passed_over(self) -> Mapping[int, str]:
        """Steps of this node's checkpoints that come before the one that it told of, and why they do not count."""
        return {} if self._restorer is None else self._restorer.passed_over

    def read_checkpoint(self, step: int) -> SavedState:
        """Into the buffers of the outer state. Raises RecoveryFailed, ConfigError. Local rank 0."""
        saved = self.restorer.restore(step)
        assert saved is not None, "of a step there is one, or an error"
        return saved

    def require_unfinished(self, step: int) -> None:
        """Raise RunOver where the run ends with this inner step, or before."""
        if step >= self._node.config.train.total_steps:
            raise RunOver(f"the checkpoint of step {step} is that of the end of the run (train.total_steps)")

    def checkpoint_to_join_from(self) -> dict[str, int] | None:
        """The step of the newest durable checkpoint, and the newest round, where all since is less than the state.

        None where it is not, or where members' journals do not go back so far. Local rank 0.
        """
        if self._restorer is None or self._node.config.ckpt.path is None or not self._is_large:
            return None
        stamp, view = self._restorer.newest(), self.store.view(FOUNDING_ROUND)
        missed = None if stamp is None else rounds_since(view, session=stamp.session, round=stamp.round)
        if stamp is None or missed is None:
            return None
        try:
            entry_bytes = self.recovery.entry_bytes(stamp.round + 1) if missed else 0
        except RecoveryFailed:
            return None
        is_taken = begins_on_checkpoint(missed, entry_bytes=entry_bytes, state_bytes=self._state_bytes)
        return {"step": stamp.inner_step, "newest": stamp.round + missed} if is_taken else None

    @property
    def _state_bytes(self) -> int:
        return 4 * self.buffers.numel * len(self.outer.sections)

    @property
    def _is_large(self) -> bool:
        return self._state_bytes > COPIED_BYTES

    def _stage(self, step: int) -> RoundState:
        def stage() -> dict[str, Any]:
            saved = self.restorer.stage(step)
            return {"round": saved.round, "record": saved.record, "state_digest": saved.state_digest}

        return RoundState(**on_first_rank(self.mesh.local, stage))

    def take_staged(self) -> Mapping[str, Tensor] | None:
        """What was staged, on local rank 0."""
        return self.restorer.take_staged() if self._node.local.rank == 0 else None

    def load_inner(self, step: int) -> bool:
        """Take this node's inner optimizer from the checkpoint that was read; False, with fresh moments, without one.

        So it is with what the outer algorithm keeps to itself. Called by all local ranks. DDP has all of the trainer's
        in the outer state.
        """
        local, inner = self._node.local, self._node.inner
        if isinstance(self.outer, Ddp) and inner.moment_names:
            return True
        own = {name: self.buffers[name] for name in self.outer.local_sections}
        has_inner = self.restorer.load_inner(step, inner, local, own if local.rank == 0 else {})
        if all_ok(has_inner, local):
            return True
        self.forget_inner()
        return False

    def forget_inner(self) -> None:
        """Begin with fresh moments, and without what the outer algorithm kept to itself. Called by all local ranks."""
        self._node.inner.forget_moments()
        for name in self.outer.local_sections:
            if self._node.local.rank == 0:
                self.buffers[name].zero_()
        barrier(self._node.local)

    def point_latest(self, step: int) -> None:
        """Whoever resumes begins with this step. Local rank 0."""
        self.restorer.point_latest(step)

    def _serve(self, stack: ExitStack) -> None:
        """Let joiners fetch the state from here; the guardian tells them where."""
        if self._node.local.rank == 0:
            outer = self.outer
            has_phases = isinstance(outer, ManySteps)
            state = outer.live_state if has_phases and self._is_large else outer.copy_state
            self._server = StateServer(
                state,
                self.journal.await_entry,
                current_round=lambda: outer.round,
                needs_link=lambda: has_phases and outer.needs_link,
            )
            stack.callback(self._server.close)
            self._flags.set_serves_state(True)

    def _answer_requests(self, connection: socket.socket, what: HandedOver) -> None:
        if self._server is None:
            connection.close()
        else:
            self._server.take(connection, what.keys)

    # -- as the training loop sees it ---------------------------------------------------------------------------

    @property
    def state_digest(self) -> str:
        return self.outer.state_digest

    @property
    def state_parts(self) -> StateParts:
        common, own = self.outer.sections, self.outer.local_sections
        held = {name: self.buffers[name] for name in (*common, *own)}
        return StateParts(common, own, held, {}, has_moments=isinstance(self.outer, Ddp))

    @property
    def outer_parameters(self) -> Tensor:
        return self.buffers[self.outer.sections[0]]

    def show_progress(self) -> None:
        if self._node.local.rank == 0:
            self._flags.advance()

    def sharing(self, members: Sequence[str]) -> tuple[frozenset[str], frozenset[str]]:
        return self.holdings.sharing(self.mesh.member_id, members)

    @property
    def fellows(self) -> PeerWriters:
        return StoreWriters(self.store, self._own_key.name(self._node.node_id))

    def open_folder(self, stack: ExitStack) -> Path:
        return self._folder

    def announce_leaving(self) -> Staying:
        """Say that this node leaves; who goes on then. Called once, by all local ranks."""
        assigned = set(self.outer.progress.assigned)
        staying = on_first_rank(self._node.local, lambda: sorted(self.store.say_leaving(self.mesh.member_id)))
        if not assigned:
            return "none of us"
        return "others" if assigned & set(staying) else "nobody"

    def come_back(self) -> None:
        """Become another member after a fence. Called by all local ranks."""
        if self._node.local.rank == 0:
            self.mesh.member.close()
        self.mesh.replace_member(self._new_member())

    def leave(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Give everything back; after a crash that the launcher makes good, all but the memory of this node."""
        is_crash = kind is not None and issubclass(kind, Exception) and not issubclass(kind, _CLEAN_ENDS)
        self._is_left = is_crash and bool(restarting_launcher(os.environ, left=True))
        self._stack.close()


def _required(scorer: Scorer | None, config: RunConfig) -> Scorer | None:
    """What measures payloads. Raises ConfigError where they are to be scored and nothing does."""
    if scoring_of(config) is not None and scorer is None:
        raise ConfigError(
            "outer.score measures with the trainer's model and data, which a loop of your own lacks; drop it"
        )
    return scorer


def _pids_of_ranks(local: LocalMesh) -> tuple[int, ...]:
    """Process ids of all local ranks, on all of them."""
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(local.world_size)]
    dist.all_gather(pids, torch.tensor([os.getpid()]), group=local.control)
    return tuple(int(pid) for pid in pids)
