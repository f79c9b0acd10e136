"""A node and its run as they see each other: what a node brings, and what its training loop asks of the run.

The same for the trainer and for a loop of the user's, for a node among others and for one alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from zeroband.config.schema import RunConfig
from zeroband.data.ledger import SHARED
from zeroband.elastic.membership.departure import Departure
from zeroband.node.faults import FaultPoints

if TYPE_CHECKING:  # they load torch, and a node has a name before it has that
    from torch import Tensor

    from zeroband.checkpoint.own_state import OwnState
    from zeroband.checkpoint.writer_process import PeerWriters
    from zeroband.elastic.rounds.interfaces import OuterParts, SyncHooks
    from zeroband.elastic.rounds.rollback import RolledBack
    from zeroband.elastic.rounds.round_report import RoundReport
    from zeroband.errors import Fenced
    from zeroband.node.mesh import LocalMesh
    from zeroband.node.sharding import Parameters
    from zeroband.outer.schedule import Schedule


class HeldPort(NamedTuple):
    """A node's port that is open before its guardian is there: a process of the node's holds it, with its store."""

    handover_socket: str
    """Unix socket at which that process hands over the calls for the guardian."""
    number: int
    """The port under which others reach it."""


@dataclass(frozen=True)
class TrainedOn:
    """What a checkpoint says of its model, to export and evaluate it."""

    model: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What `blueprint_of_record` makes it of; empty where the model is a user's."""
    tokenizer: str = ""
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The record of `data.tokens.Corpus`."""


@dataclass(frozen=True, kw_only=True)
class NodeParts:
    """What a node brings to a run."""

    config: RunConfig
    node_id: str
    node_dir: Path
    """`<run.dir>/<run.id>/<node id>`."""
    shared: Mapping[str, str]
    """What all nodes of the run must agree on, by the name that a node which differs is told."""
    local: LocalMesh
    parameters: Parameters
    """What the nodes train together."""
    inner: OwnState
    departure: Departure
    faults: FaultPoints
    port: HeldPort | None = None
    """The node's port where it is open already; None: its guardian opens it."""
    corpus: str = SHARED
    """Name of the corpus that its samples are of, among those of the run; SHARED: the one of all nodes."""
    build_schedule: Callable[[OuterParts], Schedule[Any]] | None = None
    """Makes the outer algorithm; None: as [outer] and [optim] say."""

    @property
    def resumes(self) -> bool:
        """Whether this node was asked to begin the run again on a checkpoint."""
        return self.config.resume is not None

    @property
    def sample_tokens(self) -> int:
        """Targets of a sample at most, which bounds what members may weigh; 0: not known."""
        return 0

    def trained_on(self) -> TrainedOn:
        """The model's origin, as far as the package knows it."""
        return TrainedOn()


Staying = Literal["others", "nobody", "none of us"]
"""Which nodes continue when one leaves: others; "nobody": it is the last; "none of us": all leave in this round."""


@dataclass(frozen=True)
class StateParts:
    """Where the state lies now that a checkpoint of this node holds: FSDP2 moves shards at the first pass."""

    common: tuple[str, ...]
    """Names of the sections that all nodes of the run hold alike."""
    own: tuple[str, ...]
    """Names of those that only this node has; saved with its inner optimizer."""
    buffers: Mapping[str, Tensor]
    """The sections that lie in buffers, which all local ranks see."""
    shards: Mapping[str, Mapping[str, Tensor]]
    """The sections that lie in the model alone: this rank's shards, by parameter."""
    has_moments: bool
    """The sections hold the moments of the inner optimizer, too."""


class TrainingRun(Protocol):
    """A node's place in its run. All local ranks call the methods together."""

    @property
    def outer(self) -> SyncHooks: ...

    @property
    def state_digest(self) -> str:
        """Digest of what all nodes hold alike; local rank 0 only, empty on the others and where there is one node."""
        ...

    @property
    def state_parts(self) -> StateParts: ...

    @property
    def outer_parameters(self) -> Tensor | None:
        """(n,) float32 on CPU, in the order of the names: what the nodes hold alike; None: what the model holds."""
        ...

    def show_progress(self) -> None:
        """Show the guardian of this trainer that it is alive."""
        ...

    def sharing(self, members: Sequence[str]) -> tuple[frozenset[str], frozenset[str]]:
        """Node ids of those among some members that write a checkpoint with this node, and of those that do not.

        The second ones have a ckpt.path that is another folder. Local rank 0.
        """
        ...

    @property
    def fellows(self) -> PeerWriters:
        """The writers of the other nodes' checkpoints."""
        ...

    def open_folder(self, stack: ExitStack) -> Path:
        """The node's folder in shared memory; `stack` removes it where nothing but checkpoints needs it."""
        ...

    def announce_leaving(self) -> Staying:
        """Say that this node leaves, once; who goes on then. Unless others do, it must save what it holds."""
        ...


class Entry(Protocol):
    """A node's way into its run, and back into it. All local ranks call the methods together."""

    def enter(self) -> Sequence[RoundReport]:
        """Found or join the run; returns the round with which this node became a member.

        None where it trains alone, or becomes one with what it learns.
        """
        ...

    @property
    def verified_at_s(self) -> float | None:
        """Monotonic time at which the state was verified that this node trains on; None: it began with that."""
        ...

    def come_back(self, why: Fenced | RolledBack) -> Sequence[RoundReport]:
        """Become a member again: the run went on without this node, or went back to a checkpoint. As `enter`."""
        ...
