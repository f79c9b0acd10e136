"""What rounds are made with: the parts of a node, the trainer's hooks, and what others have to do for a round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from zeroband.data.ledger import Range
from zeroband.elastic.membership.departure import Departure
from zeroband.elastic.membership.loss_record import LossRecord
from zeroband.elastic.membership.progress import Progress, RunShape
from zeroband.elastic.membership.scoring import ScoringRule
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
    """The inner optimizer, as far as rounds of many inner steps are concerned with it."""

    def seek(self, step: int) -> None:
        """Go on with the schedule at this inner step."""
        ...

    def forget_moments(self) -> None:
        """Start the moments anew, at the same place of the schedule."""
        ...


@runtime_checkable
class Stepper(Inner, Protocol):
    """The inner optimizer, as far as rounds of one inner step are concerned with it."""

    @property
    def moment_names(self) -> tuple[str, ...]:
        """What `moments` are called."""
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
        """Step by the gradients that lie in the model, if any do, and move on by one inner step."""
        ...

    def zero_grad(self) -> None:
        """Drop the gradients."""
        ...

    def seek(self, step: int, *, update_count: int | None = None) -> None:
        """Go on at this inner step, with moments that have seen so many updates where that is said."""
        ...

    def moments(self) -> Mapping[str, Any]:
        """This rank's shards of the moments; writing into them sets them."""
        ...


class Scorer(Protocol):
    """Measures losses on rows that nobody trains on. Called by all local ranks."""

    def loss(self, values: Iterable[tuple[str, Tensor]], lot: int) -> float:
        """Mean loss with these parameters, in nats per token, the same on all local ranks; changes nothing.

        `values`: name and (n,) float32 of what this rank holds of each parameter. `lot`: draws the rows.
        """
        ...


class RollbackRule(Protocol):
    """What follows of the loss of a committed round. Called by all local ranks."""

    def is_due(self, record: LossRecord) -> bool:
        """Whether the run should leave what the round of this record led to."""
        ...

    def answer(self, round: int, record: LossRecord) -> None:
        """Have all nodes go back at the next boundary, where that is due."""
        ...


class StateSource(Protocol):
    """States and rounds that this node does not hold, from peers and from checkpoints. Called by all local ranks."""

    def fetch_entry(self, round: int, room: Callable[[int], Tensor]) -> RoundUpdate:
        """Fetch the journal's entry of a round from a peer, into the room that local rank 0 has for its bytes.

        Raises RecoveryFailed.
        """
        ...

    def fetch_ahead(self, round: int, room: Callable[[int], Tensor]) -> RoundUpdate:
        """As `fetch_entry`, on local rank 0 alone, during training. Raises RecoveryFailed."""
        ...

    def stage(self, step: int, sections: Sequence[str]) -> RoundState:
        """Read and verify the checkpoint of an inner step, on local rank 0, and keep it. Raises RecoveryFailed."""
        ...


@dataclass(frozen=True)
class History:
    """What lies behind the newest round: the rounds that this node keeps, and the states that it can go back to."""

    journal: Journal
    source: StateSource
    auto_rollback: RollbackRule | None = None
    """Answers rounds whose loss calls for going back; None: the run never does by itself."""
    memory: NodeMemory | None = None
    """Stamps what the section buffers hold, for a trainer that is started after a crash; on local rank 0 only."""


@dataclass(frozen=True)
class RunLength:
    """How far the run goes, and how this node cuts its inner steps into rounds."""

    shape: RunShape
    phase_length: PhaseLength
    flush_every: int | None = None
    """Outer steps from one checkpoint to the next, at which nodes that overlap rounds wait; None: there are none."""


@dataclass(frozen=True)
class Scoring:
    """Which payloads are scored by held-out loss, and what measures it."""

    rule: ScoringRule
    scorer: Scorer


@dataclass(frozen=True)
class OuterParts:
    """What an outer algorithm works with."""

    mesh: ElasticDeviceMesh
    model: Parameters
    inner: Inner
    buffers: SharedBuffers
    shards: ShardMap
    """Where this rank's parameters lie in the sections."""
    fragments: tuple[Fragment, ...]
    """The parts of the state that are synchronised one after the other; one: the whole."""
    feedback: ErrorFeedback
    """With the layout of contributions on the wire, and the codec of these and of their mean."""
    length: RunLength
    history: History
    departure: Departure
    faults: FaultPoints
    scoring: Scoring | None = None
    """None: no payload is scored."""
    carriage: Carriage | None = None
    """None: contributions are not carried."""

    @property
    def wire_layout(self) -> ShardMap:
        """Where this rank's parameters lie in contributions and results, which have one fragment after the other."""
        return self.feedback.shards

    @property
    def codec(self) -> Codec:
        """Encodes contributions and their mean."""
        return self.feedback.codec

    @property
    def stepper(self) -> Stepper:
        """The inner optimizer, for an algorithm that takes its steps by itself."""
        assert isinstance(self.inner, Stepper), "such an algorithm needs one that all nodes have"
        return self.inner


class SyncHooks(Protocol):
    """What the trainer asks of a schedule of rounds, and tells it, at each inner step. Called by all local ranks.

    In this order: `sync_gradients`, the step of the inner optimizer, `is_boundary`, `sync_parameters`. `learned` comes
    when the device has computed what it tells: after the hooks of the next step; but before `sync_parameters` at a
    boundary, and before `sync_gradients` where nodes have no steps of their own.
    """

    @property
    def has_own_steps(self) -> bool:
        """Whether this node makes inner steps of its own; False: all nodes make the same one."""
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
        """What its verdict recorded: the progress, and the run's session."""
        ...

    @property
    def inner_step(self) -> int:
        """Inner steps behind this node, those included that are in no committed round yet."""
        ...

    def upcoming(self) -> Sequence[Range]:
        """The samples that this node trains on up to its next contribution."""
        ...

    def sync_gradients(self, step: int, tokens: int) -> float | None:
        """Before the inner optimizer step. `tokens`: targets of this node in this step.

        Returns the global norm of the gradient if it is the nodes' common one, clipped already; else None.
        """
        ...

    def flush(self) -> Sequence[RoundReport]:
        """Wait for a round that is on its way beside training, and take its state over; its report, if there is one."""
        ...

    def is_time_over(self, steps: int) -> bool:
        """Whether the round should end with this inner step, the `steps`-th that this node made in it."""
        ...

    def learned(self, tokens: int, loss: float) -> None:
        """What an inner step showed, once for each, in order.

        `tokens`: targets that this node learned from; 0 where its gradient was not finite. `loss`: mean over the node's
        targets, in nats; NaN where it is not known.
        """
        ...

    def is_boundary(self, *, ends_round: bool) -> bool:
        """Whether `sync_parameters` of this step needs all that was learned up to it: sends it, or reports it."""
        ...

    def sync_parameters(self, step: int, *, ends_round: bool) -> Sequence[RoundReport]:
        """After the inner optimizer step; reports of the rounds that the state has got, which may be earlier ones.

        `ends_round`: the same on all local ranks: the samples are used up, the time is over, or the node leaves.
        """
        ...


def verify(digest: str, expected: str, what: str, local: LocalMesh) -> None:
    """Raise RecoveryFailed on all local ranks where what a donor gave is not what it said. Local rank 0 has digests."""
    if not broadcast_json(digest == expected, local):
        raise RecoveryFailed(f"{what} has digest {digest} here and {expected} at its donor")


def open_buffers(buffers: SharedBuffers, sections: tuple[str, ...]) -> None:
    """Map the outer state and the two work buffers of a transaction."""
    buffers.open(*sections, CONTRIBUTION, RESULT)
