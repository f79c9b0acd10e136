"""What outer algorithms share: the trainer's two hooks, the state that a joiner receives, the report of a round."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from zeroband.elastic.epoch import FOUNDING_ROUND, Opening, Ready, Verdict
from zeroband.elastic.mesh import ElasticDeviceMesh
from zeroband.elastic.progress import Progress, RunShape
from zeroband.faults import FaultPoints
from zeroband.optim import InnerOptimizer
from zeroband.outer.flat import ShardMap, SharedBuffers
from zeroband.outer.journal import Journal, JournalEntry
from zeroband.outer.transaction import CONTRIBUTION, RESULT, Committed, commit_round, found_run


@dataclass(frozen=True)
class RoundReport:
    """A committed round as this node saw it."""

    round: int
    epoch: int
    member_id: str
    """This node in the run."""
    members: tuple[str, ...]
    weights: tuple[int, ...]
    state: str
    """Digest of the outer state after the round; local rank 0 only."""
    progress: Progress
    """The run after the round."""
    wait_s: float
    transfer_s: float
    apply_s: float
    sent_bytes: int
    received_bytes: int
    failures: tuple[str, ...]
    """Why the round was opened again, once for each time."""
    is_left_out: bool
    """This node's update was not finite, so it had no weight."""

    @property
    def retries(self) -> int:
        return len(self.failures)


@dataclass(frozen=True)
class StateCopy:
    """The outer state after a committed round, copied so that training goes on while a joiner fetches it."""

    round: int
    sections: Mapping[str, Tensor]
    payload: Mapping[str, Any]
    """The verdict's payload, which holds the run's progress."""
    state: str


@dataclass(frozen=True)
class OuterParts:
    """What an outer algorithm works with."""

    mesh: ElasticDeviceMesh
    model: nn.Module
    inner: InnerOptimizer
    buffers: SharedBuffers
    shards: ShardMap
    journal: Journal
    shape: RunShape
    faults: FaultPoints


class SyncHooks(Protocol):
    """The trainer's two hooks. Called by all local ranks."""

    @property
    def progress(self) -> Progress:
        """How far the run is after the newest committed round."""
        ...

    @property
    def round(self) -> int:
        """The newest committed round that this node's state holds; -1 before the founding."""
        ...

    def sync_gradients(self, step: int, tokens: int) -> float | None:
        """Before the inner optimizer step. `tokens`: targets that this node learned from in this step.

        Returns the global norm of the gradient if it is the nodes' common one, clipped already; else None.
        """
        ...

    def sync_parameters(self, step: int, tokens: int) -> RoundReport | None:
        """After the inner optimizer step; the report of the round that ended here, if one did."""
        ...


class OuterAlgorithm(SyncHooks, Protocol):
    """An algorithm between nodes. All methods are called by all local ranks, except the two that say otherwise."""

    @property
    def sections(self) -> tuple[str, ...]:
        """Names of the buffers that make up the outer state."""
        ...

    @property
    def state(self) -> str:
        """Digest of the outer state; local rank 0 only, empty on the others."""
        ...

    def found(self) -> RoundReport:
        """Start the run together with the other founders (round 0). Raises Fenced if it started without this node."""
        ...

    def adopt(self, round: int, payload: Mapping[str, Any]) -> str:
        """Take the state that a joiner wrote into the section buffers; returns its digest."""
        ...

    def replay(self, entry: JournalEntry) -> str:
        """Catch up by one committed round; returns the digest of the state after it."""
        ...

    def join(self, await_opening: Callable[[], Opening]) -> RoundReport:
        """Take part in the next round with weight 0, which makes this node a member."""
        ...

    def copy_state(self) -> StateCopy:
        """A copy of the outer state. Any thread of local rank 0."""
        ...


class RoundKeeper:
    """The bookkeeping of rounds that the algorithms share by composition."""

    def __init__(self, parts: OuterParts) -> None:
        self.parts = parts
        self.round = -1
        self.progress = Progress.at_start()
        self.payload: Mapping[str, Any] = {}
        self.state = ""
        self.state_lock = threading.Lock()
        """Held by local rank 0 while the sections change."""
        self._tokens = 0
        self._is_left_out = False

    def count(self, tokens: int) -> None:
        """Add to the tokens of the round in progress, and show the guardian that this node trains."""
        self._tokens += tokens
        if self.parts.mesh.local.rank == 0:
            self.parts.mesh.board.advance()

    def ends_round(self, step: int) -> bool:
        """Whether the inner step with this number (from 0) is the last one of its round."""
        return step + 1 == self.progress.inner_step + self.progress.steps_in_next_round(self.parts.shape)

    def found(self) -> RoundReport:
        """Agree with the other founders on the initial state. Raises Fenced if the run started without this node."""
        mesh = self.parts.mesh
        mesh.announce_ready(Ready(FOUNDING_ROUND, 0, self.state))

        def payload(opening: Opening) -> Mapping[str, Any]:
            progress = Progress.at_start().after(opening, self.parts.shape)
            return {"progress": progress.to_record(), "weight": 0, "state_before": self.state}

        founded = found_run(mesh, self.state, payload)
        self.advance(founded.verdict, self.state)
        return self.report(founded, apply_s=0.0)

    def commit(
        self,
        *,
        weighted: bool = True,
        await_opening: Callable[[], Opening] | None = None,
        extra: Callable[[Tensor], Mapping[str, Any]] = lambda result: {},
    ) -> Committed:
        """Run the next round's transaction with what lies in the contribution buffer.

        `weighted`: whether this node's update counts. `extra`: what the algorithm adds to the verdict's payload.
        """
        mesh, round = self.parts.mesh, self.round + 1
        self._is_left_out = not weighted and await_opening is None
        if await_opening is None:
            weight = self._tokens if weighted else 0
            self.parts.faults.at("ready", round)
            mesh.announce_ready(Ready(round, weight, self.state))
            await_opening = lambda: mesh.await_opening(round)  # noqa: E731

        def payload(opening: Opening, result: Tensor) -> Mapping[str, Any]:
            progress = self.progress.after(opening, self.parts.shape)
            return {
                "progress": progress.to_record(),
                "weight": opening.total_weight,
                "state_before": self.state,
                **extra(result),
            }

        return commit_round(mesh, self.parts.buffers, await_opening, payload, self.parts.faults)

    def advance(self, verdict: Verdict, state: str) -> None:
        """Note that the state now holds a committed round."""
        self.settle(verdict.round, verdict.payload, state)
        self._tokens = 0

    def settle(self, round: int, payload: Mapping[str, Any], state: str) -> None:
        """Note which round the state holds, however it came to it."""
        self.round = round
        self.payload = payload
        self.progress = Progress.from_record(payload["progress"])
        self.state = state

    def record(self, committed: Committed) -> None:
        """Add a committed round to the journal. Local rank 0 keeps it for all."""
        if self.parts.mesh.local.rank == 0:
            entry = JournalEntry(self.round, committed.result.clone(), committed.verdict.payload, self.state)
            self.parts.journal.add(entry)

    def report(self, committed: Committed, apply_s: float) -> RoundReport:
        opening = committed.opening
        return RoundReport(
            round=opening.round,
            epoch=opening.epoch,
            member_id=self.parts.mesh.member_id,
            members=opening.members,
            weights=opening.weights,
            state=self.state,
            progress=self.progress,
            wait_s=committed.wait_s,
            transfer_s=committed.transfer_s,
            apply_s=apply_s,
            sent_bytes=committed.sent_bytes,
            received_bytes=committed.received_bytes,
            failures=committed.failures,
            is_left_out=self._is_left_out,
        )


def open_buffers(buffers: SharedBuffers, sections: tuple[str, ...]) -> None:
    """Map the outer state and the two work buffers of a transaction."""
    buffers.open(*sections, CONTRIBUTION, RESULT)
