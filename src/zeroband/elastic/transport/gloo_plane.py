"""The gloo data plane: one process group between nodes per lane and epoch.

Processes rendezvous through the run's store, so that no node hosts a rendezvous for the others. gloo cannot abort an
operation, so nothing here blocks in it: completion is polled together with the node's abort flag. A group with
unfinished operations at the end of its epoch is abandoned, along with the tensors that they may still write to.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from zeroband.elastic.membership.records import Evidence, RoundPlan
from zeroband.elastic.transport.base import Gathering, MovedBytes, Rates, RoundRequest
from zeroband.elastic.transport.stalls import StallLimit, StallWatch, TransferBounds
from zeroband.errors import PeerLost, TransferStalled, ZerobandError
from zeroband.kernels.scan import largest
from zeroband.node.backoff import Backoff
from zeroband.node.faults import FaultPoints, TransferPoints
from zeroband.node.shared_flags import SharedFlags

_POLL_S, _LOOK_S = 0.0005, 0.25
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.002, 0.05
"""Pauses between two reads of a key that another process writes."""


class GroupStore(Protocol):
    """Rendezvous keys of process groups. Raises StoreLost, ConfigError."""

    def group_prefix(self, plan: RoundPlan, lane: int) -> str:
        """Return the key prefix of a lane's group."""
        ...

    def group_set(self, key: str, value: bytes) -> None: ...

    def group_get(self, keys: list[str]) -> list[bytes | None]: ...

    def group_add(self, key: str, amount: int) -> int: ...

    def group_delete(self, key: str) -> bool: ...


class GroupRendezvous(dist.Store):  # pyright: ignore[reportPrivateImportUsage]
    """A `torch.distributed.Store` with the keys of one process group in the run's store, where they expire.

    `is_abandoned` is polled while a key is awaited; True raises PeerLost, so that building a group with a dead node
    fails before the time-out.
    """

    def __init__(self, store: GroupStore, prefix: str, *, timeout_s: float, is_abandoned: Callable[[], bool]) -> None:
        super().__init__()
        self._store = store
        self._prefix = prefix
        self._wait_timeout = timedelta(seconds=timeout_s)
        self._is_abandoned = is_abandoned

    def _key(self, key: str) -> str:
        return f"{self._prefix}:{key}"

    def set(self, key: str, value: str | bytes) -> None:
        self._store.group_set(self._key(key), value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._await([key], self._wait_timeout)[0]

    def add(self, key: str, value: int) -> int:
        return self._store.group_add(self._key(key), value)

    def check(self, keys: list[str]) -> bool:
        return None not in self._store.group_get([self._key(key) for key in keys])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._await(keys, timeout or self._wait_timeout)

    def delete_key(self, key: str) -> bool:
        return self._store.group_delete(self._key(key))

    def set_timeout(self, timeout: timedelta) -> None:
        self._wait_timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._wait_timeout

    def _await(self, keys: list[str], timeout: timedelta) -> list[bytes]:
        deadline = time.monotonic() + timeout.total_seconds()
        pauses = Backoff(_FIRST_LOOK_S, _LONGEST_LOOK_S)
        while True:
            values = self._store.group_get([self._key(key) for key in keys])
            found = [value for value in values if value is not None]
            if len(found) == len(keys):
                return found
            if self._is_abandoned() or time.monotonic() > deadline:
                missing = [key for key, value in zip(keys, values, strict=True) if value is None]
                raise PeerLost(f"no process wrote {missing[0]} for the group {self._prefix}")
            time.sleep(pauses.pause_s())


def lane_bounds(numel: int, lanes: int) -> list[tuple[int, int]]:
    """Split a flat buffer into contiguous parts, one per lane, equal up to one element."""
    return [(numel * lane // lanes, numel * (lane + 1) // lanes) for lane in range(lanes)]


def ring_bytes(numel: int, nodes: int) -> int:
    """Bytes that one node sends (and receives) in a float32 ring all-reduce: 2 (M - 1) / M of the buffer."""
    return 8 * numel * (nodes - 1) // nodes


@dataclass(frozen=True)
class _Running:
    """The newest operations."""

    works: Sequence[dist.Work] = ()
    used: object = None
    """Tensors that they write to."""

    @property
    def is_over(self) -> bool:
        return all(work.is_completed() for work in self.works)


class _AbandonedGroups:
    """Groups of former epochs with running operations: destroying such a group blocks until its time-out.

    Only the transfer thread destroys them: a process that exits while another thread destroys a group is aborted.
    """

    def __init__(self) -> None:
        self._held: list[tuple[list[dist.ProcessGroup], _Running]] = []
        self._holder: threading.Thread | None = None

    def add(self, groups: list[dist.ProcessGroup], running: _Running) -> None:
        self._held.append((groups, running))

    def release(self) -> None:
        """Destroy the groups that have become idle, which takes milliseconds."""
        self._held[:] = [(groups, running) for groups, running in self._held if not running.is_over]
        if self._held and self._holder is None:
            self._holder = threading.Thread(
                target=_hold_forever, args=(self._held,), name="groups left behind", daemon=True
            )
            self._holder.start()


def _hold_forever(_held: object) -> None:
    """Keep references to groups until the process exits: destroying them would block the exit."""
    threading.Event().wait()


class LaneGroups:
    """The gloo data plane of this rank's lanes: float32, unencrypted, for trusted networks.

    `lanes`: of the node. `owned`: this rank's, disjoint over the local ranks; rank 0 owns lane 0. `gloo_timeout_s`:
    gloo's time-out, above all waits here. `bounds`: of these waits.
    """

    keeps_buffers = False

    def __init__(
        self,
        store: GroupStore,
        flags: SharedFlags,
        faults: FaultPoints,
        *,
        lanes: int,
        owned: Sequence[int],
        host: str,
        chunk_bytes: int,
        gloo_timeout_s: float,
        bounds: TransferBounds,
    ) -> None:
        self._lanes = lanes
        self._owned = owned
        self._store = store
        self._flags = flags
        self._faults = faults
        self._host = host
        self._chunk_numel = max(1, chunk_bytes // 4)
        self._gloo_timeout_s = gloo_timeout_s
        self._building = StallLimit(bounds.connect_s, bounds.max_stall_s)
        self._moving = StallLimit(bounds.stall_s, bounds.max_stall_s)
        self._connected: tuple[int, tuple[str, ...]] | None = None
        self._groups: dict[int, dist.ProcessGroup] = {}
        self._running = _Running()
        self._abandoned = _AbandonedGroups()

    def reduce_mean(self, request: RoundRequest) -> MovedBytes:
        assert request.residual is None and request.encoded is None, "nothing is encoded here"
        plan, result = request.plan, request.result
        self.connect(plan, plan.members.index(request.member_id))
        share = plan.share(request.member_id)
        bounds = lane_bounds(result.numel(), self._lanes)
        parts: list[tuple[int, torch.Tensor]] = []
        for lane in self._owned:
            start, stop = bounds[lane]
            part = result[start:stop]
            if share > 0:
                torch.mul(request.sent[start:stop], share, out=part)
            else:
                part.zero_()
            parts.append((lane, part))
        self.all_reduce(parts, plan)
        self._require_in_range(parts, plan)
        moved = ring_bytes(result.numel(), len(plan.members))
        return MovedBytes(moved, moved)

    def _require_in_range(self, parts: Sequence[tuple[int, torch.Tensor]], plan: RoundPlan) -> None:
        """Raise PeerLost if a mean exceeds the members' announced values; gloo does not show who caused it."""
        for lane, part in parts:
            size = largest(part)
            if not (math.isfinite(size) and size <= plan.max_value):
                members = ", ".join(plan.members)
                raise PeerLost(
                    f"the mean of round {plan.round}, lane {lane}, has the value {size:.3g}; the members' announced "
                    f"values allow {plan.max_value:.3g}; one of {members} sent larger ones"
                )

    def gather(self, request: RoundRequest, gathering: Gathering) -> MovedBytes:
        """Broadcast each member's payload to all; `receiver` is not supported."""
        assert gathering.receiver is None, "the configuration refuses it"
        plan, result = request.plan, request.result
        own = plan.members.index(request.member_id)
        self.connect(plan, own)
        works, is_alone = list[dist.Work](), len(plan.members) == 1
        for lane in self._owned:
            for sender, length in enumerate(gathering.lengths):
                start, stop = lane_bounds(length, self._lanes)[lane]
                part = result[gathering.part_of(sender)][start:stop]
                if sender == own:
                    part.copy_(request.sent[start:stop])
                pieces = () if is_alone else part.split(4 * self._chunk_numel)
                works += [self._groups[lane].broadcast(piece, sender) for piece in pieces if piece.numel()]
        if not is_alone:
            self._await_all(works, result, plan)
        own_bytes = gathering.lengths[
            own
        ]  # counted as sent to each member: gloo's broadcast tree moves as many in total
        return MovedBytes(own_bytes * (len(plan.members) - 1), gathering.total_bytes - own_bytes)

    def connect(self, plan: RoundPlan, node_rank: int) -> None:
        """Ensure groups with exactly the plan's members. Raises PeerLost if the plan is aborted."""
        self._abandoned.release()
        if self._connected == (plan.epoch, plan.members):
            return
        self.abandon()
        if len(plan.members) > 1:
            for lane in self._owned:
                self._groups[lane] = self._build(plan, node_rank, lane)
        self._connected = (plan.epoch, plan.members)

    def _build(self, plan: RoundPlan, node_rank: int, lane: int) -> dist.ProcessGroup:
        def is_aborted() -> bool:
            return self._flags.aborted_version >= plan.version

        def build() -> dist.ProcessGroup:
            prefix = self._store.group_prefix(plan, lane)
            rendezvous = GroupRendezvous(self._store, prefix, timeout_s=self._gloo_timeout_s, is_abandoned=is_aborted)
            gloo: Any = dist.ProcessGroupGloo  # its type stubs are incomplete
            options = gloo._Options()
            options._timeout = timedelta(seconds=self._gloo_timeout_s)
            options._devices = [gloo.create_device(hostname=self._host)]
            return gloo(rendezvous, node_rank, len(plan.members), options)

        what, bound_s, began_at_s = f"lane {lane} of epoch {plan.epoch}", self._building.limit_s, time.monotonic()
        others = tuple(m for m in plan.members if m != plan.members[node_rank])
        group = _in_daemon_thread(build, is_aborted, what, bound_s)
        if group is None:
            self._building.stalled()
            reason = f"building {what} failed: not all of {', '.join(others)} were reached within {bound_s:.1f} s"
            raise TransferStalled(reason, others, bound_s, 0, 0)
        self._building.succeeded(time.monotonic() - began_at_s)
        return group

    def all_reduce(self, parts: Sequence[tuple[int, torch.Tensor]], plan: RoundPlan) -> None:
        """Sum tensors over the nodes in place, each on its lane. After PeerLost the tensors must not be used again."""
        if len(plan.members) == 1:
            return
        chunks = [(lane, chunk) for lane, part in parts for chunk in part.split(self._chunk_numel) if chunk.numel()]
        works = [self._groups[lane].allreduce([chunk]) for lane, chunk in chunks]
        self._await_all(works, [part for _, part in parts], plan)

    def _await_all(self, works: Sequence[dist.Work], used: object, plan: RoundPlan) -> None:
        """Wait for operations. After PeerLost `used` stays referenced, since they may still write to it."""
        self._running = _Running(works, used)
        points = self._faults.transfer(plan.round)
        self._report(points, 0.0)
        progress = StallWatch(_LOOK_S, time.monotonic())
        for done, work in enumerate(works, start=1):
            self._await(work, plan, progress, done - 1, len(works))
            self._report(points, done / len(works))
        self._moving.succeeded(progress.longest_s)
        self._running = _Running()

    def _report(self, points: TransferPoints, done: float) -> None:
        """Report progress. A stalled transfer must not look alive to the guardian."""
        if 0 in self._owned:
            self._flags.advance()
        points.reach(done)

    def _await(self, work: dist.Work, plan: RoundPlan, progress: StallWatch, done: int, of: int) -> None:
        """Wait for one operation. gloo reports no bytes, so progress is the number of finished pieces."""
        while not work.is_completed():
            if self._flags.aborted_version >= plan.version:
                raise PeerLost(f"the transfer of round {plan.round} was aborted: a member was lost")
            if (stalled_s := progress.see(done, time.monotonic())) > self._moving.limit_s:
                self._moving.stalled()
                what = f"piece {done + 1} of {of} did not end for {stalled_s:.1f} s"
                reason = f"the transfer of round {plan.round} among {', '.join(plan.members)} failed: {what}"
                raise TransferStalled(reason, plan.members, round(stalled_s, 3), done, of)
            time.sleep(_POLL_S)
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerLost(f"the transfer of round {plan.round} broke: {error}") from error

    @property
    def stall_limit_s(self) -> float:
        """For so long no piece of the next transfer may end before it is given up."""
        return self._moving.limit_s

    def gaps(self) -> Evidence:
        return Evidence()  # gloo tells neither bytes nor members

    def measured(self) -> Rates:
        return Rates()

    def close(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        """Part from the current groups without waiting for what may still run in them."""
        self._abandoned.add(list(self._groups.values()), self._running)
        self._groups, self._running = {}, _Running()
        self._connected = None
        self._abandoned.release()


def _in_daemon_thread(
    build: Callable[[], dist.ProcessGroup], is_aborted: Callable[[], bool], what: str, bound_s: float
) -> dist.ProcessGroup | None:
    """Run a constructor that may block for minutes, and stop waiting for it when the plan is aborted.

    None: it did not end within `bound_s`.
    """
    outcome: list[dist.ProcessGroup | Exception] = []
    done = threading.Event()

    def run() -> None:
        try:
            outcome.append(build())
        except (RuntimeError, ValueError, ZerobandError) as error:  # handed to the waiting thread below
            outcome.append(error)
        done.set()

    threading.Thread(target=run, name=f"build {what}", daemon=True).start()
    end_s = time.monotonic() + bound_s
    while not done.wait(0.002):
        if is_aborted():
            raise PeerLost(f"building {what} was aborted: a member was lost")
        if time.monotonic() > end_s:
            return None
    result = outcome.pop()  # that thread shall not destroy the group
    if isinstance(result, Exception):
        raise PeerLost(f"building {what} failed: {result}") from result
    return result
