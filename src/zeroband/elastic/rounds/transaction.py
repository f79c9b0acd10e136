"""One round as a transaction: open, reduce into a staging buffer, vote for the digest, apply only what is committed.

A round that loses a member is opened again with the survivors; their contributions stay untouched until the verdict,
so no inner step is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from zeroband.elastic.membership.records import Opening, Verdict
from zeroband.elastic.rounds.elastic_device_mesh import ElasticDeviceMesh, Transfer
from zeroband.elastic.rounds.packing import pack, packed_sizes, unpack
from zeroband.elastic.transport.base import RoundRequest
from zeroband.elastic.transport.engine import Encoded
from zeroband.errors import Fenced, PeerLost, RecoveryFailed
from zeroband.kernels.codec import Codec
from zeroband.node.faults import FaultPoints
from zeroband.node.mesh import barrier
from zeroband.observe.log import get_logger
from zeroband.state.feedback import ErrorFeedback
from zeroband.state.flat import SharedBuffers, digest_of

CONTRIBUTION, RESULT = "contribution", "result"
"""Names of the shared buffers that a transaction reads and writes."""

GoBack = Callable[[Opening], tuple[str, Callable[[], Mapping[str, Any]]]]


class Exchange(Protocol):
    """What the members of a round make together of what each of them contributes. Called by all local ranks."""

    @property
    def result(self) -> Tensor:
        """(n,) float32 on CPU, shared by the local ranks; bit-identical on all members after `run`."""
        ...

    def run(self, opening: Opening) -> Transfer:
        """Move the contributions and write the result; what is contributed stays, so that it can be run again.

        Raises PeerLost.
        """
        ...

    def discard(self) -> None:
        """After PeerLost: make the result's memory this node's alone again."""
        ...

    def pack(self, result: Tensor) -> Tensor:
        """What the last round's result was made from: (nbytes,) uint8, the same on all members.

        On local rank 0, in any thread, before the next `run`.
        """
        ...

    def room(self, nbytes: int) -> Tensor:
        """(nbytes,) uint8 for what a round that this node missed was made from. Local rank 0.

        Raises RecoveryFailed where that never has so many bytes.
        """
        ...

    def unpack(self, update: Tensor | None) -> None:
        """Write the result that another member packed. `update`: in `room`, on local rank 0.

        Raises RecoveryFailed on all local ranks where it is none.
        """
        ...


class MeanExchange:
    """The weighted mean of the members' contributions.

    `feedback`: gets what encoding by `codec` took from the contribution in the attempt that is committed. `part`: of
    the buffers, that the next round is about. `encoded`: holds a contribution of all of it, and gets the mean, as they
    travel. Means are packed as elastic/rounds/packing.py says.
    """

    def __init__(
        self,
        mesh: ElasticDeviceMesh,
        buffers: SharedBuffers,
        feedback: ErrorFeedback,
        codec: Codec,
        part: Callable[[], slice] = lambda: slice(None),
        encoded: Encoded | None = None,
    ) -> None:
        self._mesh = mesh
        self._buffers = buffers
        self._feedback = feedback
        self._codec = codec
        self._part = part
        self._encoded = encoded

    @property
    def result(self) -> Tensor:
        return self._buffers[RESULT][self._part()]

    def run(self, opening: Opening) -> Transfer:
        part = self._part()
        contribution, residual = self._buffers[CONTRIBUTION][part], self._feedback.residual
        residual = None if residual is None else residual[part]
        buffers = contribution, self.result, residual, self._encoded
        return self._mesh.reduce_mean(RoundRequest(opening, self._mesh.member_id, *buffers))

    def discard(self) -> None:
        if not self._mesh.keeps_buffers:
            self._buffers.renew(RESULT)

    def pack(self, result: Tensor) -> Tensor:
        return pack(result, self._codec)

    def room(self, nbytes: int) -> Tensor:
        numel = self.result.numel()
        if nbytes not in packed_sizes(numel, self._codec):
            raise RecoveryFailed(f"no mean of {numel} values takes {nbytes} bytes")
        return self.result.view(torch.uint8) if nbytes == 4 * numel else torch.empty(nbytes, dtype=torch.uint8)

    def unpack(self, update: Tensor | None) -> None:
        if update is not None and update.data_ptr() != self.result.data_ptr():
            unpack(update, self._codec, self.result)
        barrier(self._mesh.local)


_log = get_logger(__name__)


@dataclass(frozen=True)
class Committed:
    """A round whose result all members hold, and what it cost this node."""

    verdict: Verdict
    result: Tensor
    """Mean of the contributions, valid until the next round; empty for the founding."""
    wait_s: float
    transfer_s: float
    sent_bytes: int
    received_bytes: int
    failures: tuple[str, ...]
    """Why the round was opened again, once for each time."""


def commit_round(
    mesh: ElasticDeviceMesh,
    exchange: Exchange,
    await_turn: Callable[[], Opening | Verdict],
    record: Callable[[Opening, Tensor], Mapping[str, Any]],
    go_back: GoBack,
    faults: FaultPoints,
) -> Committed | Verdict:
    """Bring a round to its verdict with whoever is left.

    Called by all local ranks. `record` runs on local rank 0. `go_back`: stages what an opening asks for that reduces
    nothing, and gives its digest and the verdict's record. Returns the verdict of the others where they committed
    the round without this node. Raises Fenced when the run went on without it.
    """
    costs = _Costs()
    while True:
        waited_from_s = time.monotonic()
        opening = await_turn()
        if isinstance(opening, Verdict):
            return opening
        costs.wait_s += time.monotonic() - waited_from_s
        faults.at("opened", opening.round)
        try:
            if opening.rollback is not None:
                return costs.of(_go_back(mesh, opening, go_back), torch.empty(0))
            costs.add(exchange.run(opening))
            faults.at("reduced", opening.round)
            waited_from_s = time.monotonic()
            digest = digest_of(exchange.result) if mesh.local.rank == 0 else ""
            verdict = mesh.commit(opening, digest, partial(_describe, opening, exchange.result, record, faults))
        except PeerLost as error:
            costs.failures.append(str(error))
            _log.warning("round opened again", extra={"fields": {"round": opening.round, "why": str(error)}})
            exchange.discard()
            continue
        costs.wait_s += time.monotonic() - waited_from_s
        faults.at("committed", opening.round)
        return costs.of(verdict, exchange.result)


def _go_back(mesh: ElasticDeviceMesh, opening: Opening, go_back: GoBack) -> Verdict:
    """Vote for the state of a checkpoint. Raises PeerLost where it cannot be had: the order is taken back."""
    try:
        digest, record = go_back(opening)
    except RecoveryFailed as error:
        mesh.refuse_rollback(opening, str(error))
        raise PeerLost(f"round {opening.round} does not go back: {error}") from error
    return mesh.commit(opening, digest, record)


def _describe(
    opening: Opening,
    result: Tensor,
    record: Callable[[Opening, Tensor], Mapping[str, Any]],
    faults: FaultPoints,
) -> Mapping[str, Any]:
    """What this node would write into the verdict; asked for when it has voted."""
    faults.at("voted", opening.round)
    return record(opening, result)


@dataclass
class _Costs:
    """What a round cost this node, over all its attempts."""

    wait_s: float = 0.0
    transfer_s: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    failures: list[str] = field(default_factory=list[str])

    def add(self, transfer: Transfer) -> None:
        self.transfer_s += transfer.took_s
        self.sent_bytes += transfer.sent_bytes
        self.received_bytes += transfer.received_bytes

    def of(self, verdict: Verdict, result: Tensor) -> Committed:
        moved = (self.sent_bytes, self.received_bytes)
        return Committed(verdict, result, self.wait_s, self.transfer_s, *moved, tuple(self.failures))


def found_run(
    mesh: ElasticDeviceMesh, round: int, state: str, record: Callable[[Opening], Mapping[str, Any]]
) -> Committed:
    """Start the run, or start it again: nothing is reduced, the founders vote for the state that all of them hold.

    Raises Fenced where the others founded it.
    """
    costs, started_at_s = _Costs(), time.monotonic()
    while True:
        opening = mesh.await_turn(round, is_member=False)
        if isinstance(opening, Verdict):
            raise Fenced(f"{len(opening.members)} others founded the run")
        try:
            verdict = mesh.commit(opening, state, partial(record, opening))
        except PeerLost as error:
            costs.failures.append(str(error))
            _log.warning("founding again", extra={"fields": {"why": str(error)}})
            continue
        costs.wait_s = time.monotonic() - started_at_s
        return costs.of(verdict, torch.empty(0))
