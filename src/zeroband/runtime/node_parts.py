"""The interface between a node and its run: what a node brings, and what a training loop asks of the run.

The trainer and drop-in loops, single nodes and nodes among others, all use it.
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

if TYPE_CHECKING:  # these load torch, and a command that only needs a node's name must not
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


class OpenPort(NamedTuple):
    """A node's port that is open before its guardian starts: the process that holds the node's store listens on it."""

    handover_socket: str
    """Unix socket at which that process hands over the calls for the guardian."""
    number: int
    """Port number."""


@dataclass(frozen=True)
class ModelDescription:
    """Description of the model in its checkpoints, for export and evaluation."""

    model: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Record for `blueprint_of_record`; empty for a model that the user built."""
    tokenizer: str = ""
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Record of `data.tokens.Corpus`."""


@dataclass(frozen=True, kw_only=True)
class NodeParts:
    """The parts that a node brings to a run."""

    config: RunConfig
    node_id: str
    node_dir: Path
    """`<run.dir>/<run.id>/<node id>`."""
    shared: Mapping[str, str]
    """Values that all nodes of the run must agree on, by the name shown to a node that differs."""
    local: LocalMesh
    parameters: Parameters
    """The trained parameters."""
    inner: OwnState
    departure: Departure
    faults: FaultPoints
    port: OpenPort | None = None
    """The node's port if it is open already; None: its guardian opens it."""
    corpus: str = SHARED
    """Name of the corpus of this node's samples; SHARED: all nodes use one."""
    build_schedule: Callable[[OuterParts], Schedule[Any]] | None = None
    """Builds the outer algorithm; None: the one of [outer] and [optim]."""

    @property
    def resumes(self) -> bool:
        """Whether the user asked to resume from a checkpoint."""
        return self.config.resume is not None

    @property
    def sample_tokens(self) -> int:
        """Most targets of a sample, which bounds the members' weights; 0: unknown."""
        return 0

    def describe_model(self) -> ModelDescription:
        """Describe the model, as far as it is known."""
        return ModelDescription()


Remaining = Literal["others", "none", "all leave"]
"""Nodes that continue after one leaves; "none": it is the last; "all leave": all members leave in the same round."""


@dataclass(frozen=True)
class StateParts:
    """Location of the state to save. Ask again for each checkpoint: FSDP2 moves shards at the first pass."""

    common: tuple[str, ...]
    """Names of the sections that are equal on all nodes."""
    own: tuple[str, ...]
    """Names of the sections that only this node has; saved with its inner optimizer."""
    buffers: Mapping[str, Tensor]
    """Sections in buffers that all local ranks share."""
    shards: Mapping[str, Mapping[str, Tensor]]
    """Sections that only the model has: this rank's shards, by parameter."""
    has_moments: bool
    """Whether the sections include the inner optimizer's moments."""


class TrainingRun(Protocol):
    """A node's part in its run. Call the methods on all local ranks together, unless they say otherwise."""

    @property
    def outer(self) -> SyncHooks: ...

    @property
    def state_parts(self) -> StateParts: ...

    @property
    def outer_parameters(self) -> Tensor | None:
        """(n,) float32 on CPU, in the order of the names; None: they are the model's parameters."""
        ...

    def show_progress(self) -> None:
        """Show the guardian that this trainer is alive."""
        ...

    def folder_peers(self, members: Sequence[str]) -> tuple[frozenset[str], frozenset[str]]:
        """Return the node ids of the members that share this node's checkpoint folder, and of those with another.

        Local rank 0.
        """
        ...

    @property
    def peer_writers(self) -> PeerWriters:
        """The checkpoint writers of the other nodes."""
        ...

    def open_folder(self, stack: ExitStack) -> Path:
        """Return the node's folder in shared memory; for a single node `stack` removes it."""
        ...

    def announce_leaving(self) -> Remaining:
        """Announce once that this node leaves. Unless others remain, it must save its state."""
        ...


class Entry(Protocol):
    """A node's way into its run, and back into it. Call the methods on all local ranks together."""

    def enter(self) -> Sequence[RoundReport]:
        """Start or join the run; returns the round that made this node a member.

        Empty for a single node, and if its first contribution makes it a member.
        """
        ...

    @property
    def verified_at_s(self) -> float | None:
        """Monotonic time at which the node's state was verified; None if it trains from the initial state."""
        ...

    def rejoin(self, why: Fenced | RolledBack) -> Sequence[RoundReport]:
        """Become a member again after the run continued without this node or rolled back. Returns as `enter` does."""
        ...
