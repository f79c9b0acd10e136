"""Interfaces of rounds: the parts of a node, the trainer's hooks, and the services that a round calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from zeroband.data.ledger import Range
from zeroband.elastic.membership.departure import Departure
from zeroband.elastic.membership.loss_record import LossRecord
from zeroband.elastic.membership.progress import Progress, RunShape
from zeroband.elastic.membership.trust import ScoringRule
from zeroband.elastic.rounds.carriage import Carriage
from zeroband.elastic.rounds.elastic_device_mesh import ElasticDeviceMesh
from zeroband.elastic.rounds.journal import Journal
from zeroband.elastic.rounds.phase import PhaseLength
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.errors import RecoveryFailed
from zeroband.kernels.codec import Codec
from zeroband.node.faults import FaultPoints
from zeroband.node.mesh import LocalMesh, broadcast_json
from zeroband.node.sharding import Parameters
from zeroband.state.crash_memory import NodeMemory
from zeroband.state.feedback import ErrorFeedback
from zeroband.state.flat import ShardMap, SharedBuffers
from zeroband.state.fragments import Fragment
from zeroband.state.round_state import RoundState, RoundUpdate

CONTRIBUTION, RESULT = "contribution", "result"
"""Names of the shared buffers that a mean is made from and written to."""


class Inner(Protocol):
    """The inner optimizer, as used by rounds of many inner steps."""

    def seek(self, step: int) -> None:
        """Continue the schedule at this inner step."""
        ...

    def forget_moments(self) -> None:
        """Reset the moments; the schedule keeps its position."""
        ...


@runtime_checkable
class Stepper(Inner, Protocol):
    """The inner optimizer, as used by rounds of one inner step."""

    @property
    def moment_names(self) -> tuple[str, ...]:
        """Names of the `moments`."""
        ...

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        ...

    @property
    def update_count(self) -> int:
        """Steps that the moments have seen."""
        ...

    def step(self) -> None:
        """Step by the model's gradients, if there are any, and advance the schedule by one inner step."""
        ...

    def zero_grad(self) -> None:
        """Drop the gradients."""
        ...

    def seek(self, step: int, *, update_count: int | None = None) -> None:
        """Continue at this inner step. `update_count`: updates that the moments hold; None: unchanged."""
        ...

    def moments(self) -> Mapping[str, Any]:
        """This rank's shards of the moments; writing into them sets them."""
        ...


class Scorer(Protocol):
    """Measures losses on held-out rows. Called by all local ranks."""

    def loss(self, values: Iterable[tuple[str, Tensor]], lot: int) -> float:
        """Mean loss with these parameters, in nats per token, the same on all local ranks; changes nothing.

        `values`: name of each parameter, and this rank's shard of it, (n,) float32. `lot`: draws the rows.
        """
        ...


class RollbackRule(Protocol):
    """Decides on a rollback by the loss of a committed round. Called by all local ranks."""

    def is_due(self, record: LossRecord) -> bool:
        """Whether the run should roll back the round of this record."""
        ...

    def answer(self, round: int, record: LossRecord) -> None:
        """Order a rollback of all nodes at the next boundary, if it is due."""
        ...


class StateSource(Protocol):
    """States and rounds that this node lacks, from peers and checkpoints. Called by all local ranks."""

    def fetch_entry(self, round: int, room: Callable[[int], Tensor]) -> RoundUpdate:
        """Fetch a round's journal entry from a peer. `room`: allocates memory for its bytes on local rank 0.

        Raises RecoveryFailed.
        """
        ...

    def fetch_ahead(self, round: int, room: Callable[[int], Tensor]) -> RoundUpdate:
        """Like `fetch_entry`, on local rank 0 alone, during training. Raises RecoveryFailed."""
        ...

    def stage(self, step: int, sections: Sequence[str]) -> RoundState:
        """Read, verify and keep the checkpoint of an inner step, on local rank 0. Raises RecoveryFailed."""
        ...


@dataclass(frozen=True)
class History:
    """Past rounds that this node keeps, and states that it can roll back to."""

    journal: Journal
    source: StateSource
    auto_rollback: RollbackRule | None = None
    """Orders a rollback when a round's loss calls for it; None: only operators order one."""
    memory: NodeMemory | None = None
    """Labels the contents of the section buffers for a trainer restarted after a crash; on local rank 0 only."""


@dataclass(frozen=True)
class RunLength:
    """The length of the run, of this node's part in it, and of its rounds."""

    shape: RunShape
    phase_length: PhaseLength
    departure: Departure
    """A request to this node to leave before the run's end."""
    flush_every: int | None = None
    """Outer steps between checkpoints, at which nodes that overlap rounds wait; None: no checkpoints."""


@dataclass(frozen=True)
class Scoring:
    """The rule that picks payloads to score by held-out loss, and the scorer."""

    rule: ScoringRule
    scorer: Scorer


@dataclass(frozen=True)
class OuterParts:
    """Everything that an outer algorithm is built from."""

    mesh: ElasticDeviceMesh
    model: Parameters
    inner: Inner
    buffers: SharedBuffers
    shards: ShardMap
    """Where this rank's parameters lie in the sections."""
    fragments: tuple[Fragment, ...]
    """Parts of the state that are synchronised in turn; a single one is the whole state."""
    feedback: ErrorFeedback
    """Also has the wire layout of contributions, and the codec of contributions and mean."""
    length: RunLength
    history: History
    faults: FaultPoints
    scoring: Scoring | None = None
    """None: no payload is scored."""
    carriage: Carriage | None = None
    """None: contributions are not carried."""

    @property
    def wire_layout(self) -> ShardMap:
        """Where this rank's parameters lie in contributions and results, which are ordered by fragment."""
        return self.feedback.shards

    @property
    def codec(self) -> Codec:
        """Encodes contributions and their mean."""
        return self.feedback.codec

    @property
    def stepper(self) -> Stepper:
        """The inner optimizer, for an algorithm that makes the inner steps itself."""
        assert isinstance(self.inner, Stepper), "rounds of one inner step need an inner optimizer that is a Stepper"
        return self.inner


class SyncHooks(Protocol):
    """The trainer's calls to a schedule of rounds at each inner step, on all local ranks.

    Order: `sync_gradients`, the inner optimizer's step, `is_boundary`, `sync_parameters`. `learned` is called when the
    device has computed its arguments: usually after the hooks of the next step, but before `sync_parameters` at a
    boundary, and before `sync_gradients` if all nodes make the same inner steps.
    """

    @property
    def has_own_steps(self) -> bool:
        """Whether nodes make different inner steps; False: all nodes make the same ones."""
        ...

    @property
    def progress(self) -> Progress:
        """How far the run is after the newest committed round."""
        ...

    @property
    def round(self) -> int:
        """The newest committed round that this node's state holds; -1 before the founding."""
        ...

    @property
    def record(self) -> Mapping[str, Any]:
        """Record of that round's verdict: the progress, and the run's session."""
        ...

    @property
    def state_digest(self) -> str:
        """Digest of the state that all nodes share; empty for a single node and on ranks other than 0."""
        ...

    @property
    def inner_step(self) -> int:
        """Inner steps of this node, including those in no committed round yet."""
        ...

    def upcoming(self) -> Sequence[Range]:
        """Samples that this node trains on until its next contribution."""
        ...

    def sync_gradients(self, step: int, tokens: int) -> float | None:
        """Called before the inner optimizer's step. `tokens`: targets of this node in this step.

        Returns the global gradient norm if all nodes share one gradient, which is clipped already; else None.
        """
        ...

    def flush(self) -> Sequence[RoundReport]:
        """Wait for the background round, if there is one, and apply it; returns its report."""
        ...

    def is_time_over(self, steps: int) -> bool:
        """Whether the phase should end with this inner step, this node's `steps`-th in it."""
        ...

    def learned(self, tokens: int, loss: float) -> None:
        """Take the results of an inner step; called once for each step, in order.

        `tokens`: targets that this node trained on; 0 if its gradient was not finite. `loss`: mean over the node's
        targets, in nats; NaN if unknown.
        """
        ...

    def is_boundary(self, *, ends_round: bool) -> bool:
        """Whether `sync_parameters` of this step needs the results of all steps so far, to send or to report them."""
        ...

    def sync_parameters(self, step: int, *, ends_round: bool) -> Sequence[RoundReport]:
        """Called after the inner optimizer's step; returns reports of the rounds now applied, perhaps earlier ones.

        `ends_round`: the same on all local ranks: the samples are used up, the time is over, or the node leaves.
        """
        ...


def verify(digest: str, expected: str, what: str, local: LocalMesh) -> None:
    """Raise RecoveryFailed on all local ranks if a donor's data do not match its digest. Local rank 0 has digests."""
    if not broadcast_json(digest == expected, local):
        raise RecoveryFailed(f"{what} has digest {digest} here and {expected} at its donor")


def open_buffers(buffers: SharedBuffers, sections: tuple[str, ...]) -> None:
    """Map the outer state and a transaction's two work buffers."""
    buffers.open(*sections, CONTRIBUTION, RESULT)
