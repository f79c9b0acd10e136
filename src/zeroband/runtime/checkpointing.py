"""Checkpoints: at committed rounds the state is copied to shared memory, and a writer process makes it durable.

The trainer waits only for that copy, which overlaps the next forward and backward passes: they do not change the state.
One checkpoint is in flight at a time; one that is due earlier is skipped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from torch import Tensor

from zeroband.checkpoint.layout import MAX_FILE_BYTES
from zeroband.checkpoint.manifest import Stamp
from zeroband.checkpoint.own_state import OWN_FILE, gather_random_states
from zeroband.checkpoint.ownership import Owner, claim
from zeroband.checkpoint.saving import SaveOrder, SaveRules
from zeroband.checkpoint.storage import open_storage
from zeroband.checkpoint.writer import WriterSpec
from zeroband.checkpoint.writer_process import LOG_FILE, WriterProcess
from zeroband.elastic.rounds.elastic_device_mesh import on_first_rank
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.errors import Leaving, LineEnds, RunOver
from zeroband.node.async_copy import HostCopier, copier_for
from zeroband.node.mesh import barrier, broadcast_json
from zeroband.observe.events import Events
from zeroband.observe.log import get_logger
from zeroband.observe.metrics import MetricValue
from zeroband.observe.view import node_id_of_member
from zeroband.outer.registry import are_rounds_steps
from zeroband.runtime.node_parts import NodeParts, StateParts, TrainingRun
from zeroband.runtime.report import Report
from zeroband.state.flat import FlatLayout, ShardMap, SharedBuffers

_LOCK_FILE = "checkpoint_writer.lock"
_STAGED = "staged-"

_log = get_logger(__name__)


class Staging:
    """Preallocated buffers in shared memory, and the copy into them. Call the methods on all local ranks together."""

    def __init__(self, node: NodeParts, run: TrainingRun, stack: ExitStack) -> None:
        self._local = node.local
        self._run, state = run, run.state_parts
        self.layout = FlatLayout.of(node.parameters)
        self._shards = ShardMap(self.layout, self._local.rank, self._local.world_size)
        self._names = [slot.name for slot in self.layout.slots]
        self.outer = state.common
        moments = () if state.has_moments else node.inner.moment_names
        self.inner = (*moments, *state.own)
        self._folder = folder = run.open_folder(stack)
        # their addresses never change, and looking them up takes as long as copying a small model
        self._moments = node.inner.moments() if moments else {}
        self.buffers = SharedBuffers(folder, self.layout.numel, self._local)
        self.buffers.open(*(f"{_STAGED}{name}" for name in self.names))
        self.paths = {name: folder / f"{_STAGED}{name}.f32" for name in self.names}
        for name in self.names:  # fault the pages in now rather than in the first copy
            self._part(self._staged(name)).zero_()
        self._of_host = HostCopier(stack)
        self._of_device = copier_for(self._local.device, [part for part, _ in self._of_shards(state)], stack)

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.outer, *self.inner)

    @property
    def total_bytes(self) -> int:
        """Size of all buffers."""
        return 4 * self.layout.numel * len(self.names)

    def _staged(self, name: str) -> Tensor:
        return self.buffers[f"{_STAGED}{name}"]

    def _part(self, buffer: Tensor) -> Tensor:
        """Return the part of a shared buffer that this rank copies."""
        return buffer[slice(*self._local.part_of(buffer.numel()))]

    def put_own_state(self, packed: bytes | None) -> dict[str, str]:
        """Write this rank's own state next to the buffers; returns the paths of all ranks' files, by name."""
        path = self._folder / f"{_STAGED}{OWN_FILE.format(rank=self._local.rank)}"
        if packed is None:
            return {}
        fresh = path.with_suffix(".new")
        fresh.write_bytes(packed)
        fresh.replace(path)  # never written in place: the writer may still map the previous file
        names = [OWN_FILE.format(rank=rank) for rank in range(self._local.world_size)]
        return {name: str(self._folder / f"{_STAGED}{name}") for name in names}

    def begin(self) -> None:
        """Start copying this rank's part. The state must not change until `finish`."""
        state = self._run.state_parts
        self._of_host.begin(
            [(self._part(self._staged(name)), self._part(held)) for name, held in state.buffers.items()]
        )
        self._of_device.begin(self._of_shards(state))

    def finish(self) -> None:
        """Wait until all ranks have copied their parts."""
        self._of_host.finish()
        self._of_device.finish()
        barrier(self._local)
        for name in (*self._run.state_parts.shards, *self._moments):
            self.buffers.collect(f"{_STAGED}{name}", self._shards, self._names)

    def _of_shards(self, state: StateParts) -> list[tuple[Tensor, Tensor]]:
        """Pair this rank's shards on their devices with their places in the staged buffers."""
        by_section: Mapping[str, Mapping[str, Tensor]] = {**state.shards, **self._moments}
        return [
            (part, shards[parameter].detach().reshape(-1))
            for name, shards in by_section.items()
            for parameter, part in self._shards.parts(self._staged(name), shards)
        ]


class Checkpointing:
    """The checkpoints of a run as its loop sees them. This base class, for runs without `ckpt.path`, takes none.

    Call the methods on all local ranks together.
    """

    def take_if_due(self, rounds: Sequence[RoundReport]) -> None:
        """Take a checkpoint if one is due. Call after every committed round.

        `rounds`: those that were just applied; empty for a single node.
        """

    def wait_for_copy(self) -> None:
        """Wait for the copy in progress. Call before the state changes."""

    def take_before_leaving(self, *, is_alone: bool) -> None:
        """Make the newest round durable before this node leaves. `is_alone`: no other member of the round saves it."""

    def metrics(self) -> dict[str, MetricValue | None]:
        """Return the cost of checkpoints since the last call, and the writer's progress. Local rank 0."""
        return {}


class Checkpoints(Checkpointing):
    """Takes the checkpoints of a run. Created by all local ranks once the node is a member.

    `takes_over`: the run continues from the checkpoints in its folder.
    Raises ConfigError if the folder belongs to another run or is out of reach.
    """

    def __init__(self, node: NodeParts, run: TrainingRun, events: Events, *, takes_over: bool = False) -> None:
        self._node = node
        self._local = node.local
        self._config = node.config.ckpt
        self._run = run
        self._hooks = run.outer
        self._events = events
        self._durable_step: int | None = None
        self._stall_s: float | None = None
        self._staged_round: int | None = None
        self._is_copying = False
        self._order: SaveOrder | None = None
        """The order of the copy in progress; local rank 0 only."""
        self._members: tuple[str, ...] = (node.node_id,)
        """Node ids of the newest round's members."""
        self._checked_members: tuple[str, ...] = ()
        """Members for which `_sharing` was determined."""
        self._sharing = frozenset({node.node_id})
        """Node ids of the members that share this node's checkpoint folder."""
        self._is_apart = False
        """Whether other members have another folder."""
        self._every = self._config.rounds_between(are_rounds_steps=are_rounds_steps(node.config.outer))
        self._layout_digest = FlatLayout.of(node.parameters).digest()
        assert self._config.path is not None
        self._folder = open_storage(self._config.path, node.config.run.id, node.node_id)
        on_first_rank(self._local, lambda: self._claim_folder(takes_over=takes_over))
        with ExitStack() as stack:
            self._staging = Staging(node, run, stack)
            self._writer = self._start_writer(stack) if self._local.rank == 0 else None
            self._stack = stack.pop_all()

    def _claim_folder(self, *, takes_over: bool) -> None:
        owner = Owner(self._node.config.run.id, self._hooks.record["session"], self._layout_digest)
        claim(self._folder, owner, takes_over=takes_over, resumes=self._node.config.resume is not None)

    def _start_writer(self, stack: ExitStack) -> WriterProcess:
        config, staging = self._config, self._staging
        # descriptors instead of paths: the writer may outlive the trainer, which removes the files
        descriptors = {name: os.open(path, os.O_RDWR) for name, path in staging.paths.items()}
        for descriptor in descriptors.values():
            stack.callback(os.close, descriptor)
        assert config.path is not None
        spec = WriterSpec(
            path=config.path,
            run_id=self._node.config.run.id,
            node_id=self._node.node_id,
            slots=staging.layout.slots,
            outer={name: descriptors[name] for name in staging.outer},
            inner={name: descriptors[name] for name in staging.inner},
            rules=SaveRules(config.keep_last, config.keep_every, config.peer_wait_s, config.retry_s),
            max_file_bytes=MAX_FILE_BYTES,
            lock=str((self._node.node_dir / _LOCK_FILE).absolute()),
            token=token.get_secret_value() if (token := self._node.config.run.token) is not None else None,
        )
        log = self._node.node_dir / LOG_FILE
        return WriterProcess(spec, tuple(descriptors.values()), log, self._on_event, self._run.peer_writers)

    def take_if_due(self, rounds: Sequence[RoundReport]) -> None:
        """Take a checkpoint if the newest committed round is due. The copy continues until `wait_for_copy`.

        A node that replayed that round, or whose contribution was carried to it, takes none: its members save it, and
        none of them would answer this node. After the last round of the run, waits for an earlier write to finish
        first, and for this copy.
        """
        for report in rounds[-1:]:
            self._members = tuple(node_id_of_member(member) for member in report.members)
            if self._writer is not None:
                self._update_sharing(report.members)
                self._writer.go_on_with([node_id_of_member(member) for member in (*report.members, *report.late)])
        if self._node.config.outer is not None and (not rounds or rounds[-1].round != self._hooks.round):
            return
        is_last, outer_step = self._hooks.progress.is_complete, self._hooks.progress.outer_step
        is_new = not rounds or any(rounds[-1].weights)  # the bootstrap of a resumed run repeats a saved state
        if is_last or (is_new and outer_step > 0 and outer_step % self._every == 0):
            self.take(self._members, waits=is_last)

    def _update_sharing(self, members: tuple[str, ...]) -> None:
        """Determine which members write a checkpoint with this node; report if others have another folder."""
        if members == self._checked_members:
            return
        self._checked_members, was_apart = members, self._is_apart
        self._sharing, apart = self._run.folder_peers(members)
        self._is_apart = bool(apart)
        if self._is_apart and not was_apart:
            self._events.emit(
                "checkpoints_apart", folder=self._folder.url, nodes=sorted(self._sharing), apart=sorted(apart)
            )

    def take(self, members: Sequence[str], *, waits: bool) -> bool:
        """Stage the state of the newest committed round. Called by all local ranks; returns whether it is staged.

        `waits`: for a busy writer and for the copy, instead of skipping the checkpoint. Otherwise `wait_for_copy`
        completes it. `members`: ids of the nodes that save it.
        """
        self.wait_for_copy()
        from_s = time.monotonic()
        if self._writer is not None and waits:
            self._writer.await_free()
        is_free = broadcast_json(self._writer is not None and not self._writer.is_busy, self._local)
        if is_free:
            self._staged_round = self._hooks.round
            files = self._staging.put_own_state(self._node.inner.pack())
            self._staging.begin()
            self._is_copying = True
            randoms = gather_random_states(self._local)
            if self._writer is not None:
                self._order = self._order_of(members, node_state=self._node_state(randoms), files=files)
        elif self._writer is not None:
            self._writer.give(self._order_of(members, is_left_out=True))
            self._events.emit("checkpoint_skipped", round=self._hooks.round, step=self._hooks.progress.inner_step)
        self._stalled_since(from_s)
        if waits:
            self.wait_for_copy()
        return is_free

    def wait_for_copy(self) -> None:
        """Wait for the copy in progress, and hand it to the writer."""
        if not self._is_copying:
            return
        from_s = time.monotonic()
        self._staging.finish()
        self._is_copying = False
        order, self._order = self._order, None
        if self._writer is not None and order is not None:
            self._writer.give(order)
            place = {"round": order.stamp.round, "step": order.stamp.inner_step}
            self._events.emit("checkpoint_staged", **place, bytes=self._staging.total_bytes)
        self._stalled_since(from_s)

    def _stalled_since(self, from_s: float) -> None:
        self._stall_s = (self._stall_s or 0.0) + time.monotonic() - from_s

    def _order_of(self, members: Sequence[str], **staged: Any) -> SaveOrder:
        """Build the order to save the newest round. `staged`: SaveOrder's fields of this node's own state."""
        config, hooks, described = self._node.config, self._hooks, self._node.describe_model()
        stamp = Stamp(
            run_id=config.run.id,
            session=hooks.record["session"],
            round=hooks.round,
            inner_step=hooks.progress.inner_step,
            record=hooks.record,
            state_digest=hooks.state_digest,
            sections=self._staging.outer,
            members=tuple(sorted(members)),
            layout=self._layout_digest,
            model=described.model,
            tokenizer=described.tokenizer,
            data=described.data,
        )
        savers = tuple(member for member in stamp.members if member in self._sharing) or (self._node.node_id,)
        return SaveOrder(stamp, savers, **staged)

    def _node_state(self, randoms: list[str]) -> dict[str, Any]:
        return {
            "round": self._hooks.round,
            "local_world_size": self._local.world_size,
            **self._node.inner.counters(),
            "random_states": randoms,
        }

    def take_before_leaving(self, *, is_alone: bool) -> None:
        if self._staged_round != self._hooks.round:
            self.take((self._node.node_id,) if is_alone else self._members, waits=True)

    def metrics(self) -> dict[str, MetricValue | None]:
        writer = self._writer
        stall_s, self._stall_s = self._stall_s, None
        if writer is None:
            return {}
        left = self._staging.total_bytes - writer.written_bytes if writer.is_busy else 0
        return {
            "ckpt/stall_s": stall_s,
            "ckpt/durable_step": self._durable_step,
            "ckpt/backlog_bytes": max(left, 0),
            "ckpt/write_bytes_per_s": writer.bytes_per_s,
        }

    def _on_event(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "checkpoint_committed":
            self._durable_step = fields["step"]
        elif kind == "checkpoints_lost":
            self._durable_step = None
        self._events.emit(kind, **fields)

    def close(self, *, waits: bool) -> None:
        """Release everything. `waits`: all local ranks wait until the staged checkpoint is written."""
        if waits:
            self.wait_for_copy()
        if self._writer is not None:
            self._writer.close(waits=waits)
        self._stack.close()


def open_checkpoints(node: NodeParts, run: TrainingRun, events: Events, stack: ExitStack) -> Checkpointing:
    """Open the run's checkpoints. At a clean end `stack` waits until the last one is written."""
    if node.config.ckpt.path is None:
        return Checkpointing()
    is_sequel = run.outer.progress.follows is not None
    checkpoints = Checkpoints(node, run, events, takes_over=is_sequel)

    def close(kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        checkpoints.close(waits=kind is None or issubclass(kind, RunOver | Leaving | LineEnds))

    stack.push(close)
    return checkpoints


def drain(node: NodeParts, run: TrainingRun, checkpoints: Checkpointing, report: Report) -> None:
    """Hand over the work of a node that was asked to leave, between two rounds. Called by all local ranks.

    The rounds under way end and are reported, and the last node of the run saves its state.
    """
    for synced in run.outer.flush():
        report.round_committed(synced)
    save_if_last(run, checkpoints)
    if not node.departure.is_urgent:
        report.events.emit("drained", round=run.outer.round)


def save_if_last(run: TrainingRun, checkpoints: Checkpointing) -> None:
    """Announce that this node leaves, and take a checkpoint if no other node continues the run."""
    if (remaining := run.announce_leaving()) != "others":
        checkpoints.take_before_leaving(is_alone=remaining == "none")
