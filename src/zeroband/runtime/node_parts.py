"""What a node is, alone or among others, whoever trains on it: the trainer, or a loop of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroband.config.schema import RunConfig
from zeroband.data.ledger import SHARED
from zeroband.elastic.membership.departure import Departure
from zeroband.node.faults import FaultPoints

if TYPE_CHECKING:  # they load torch, and a node has a name before it has that
    from zeroband.checkpoint.own_state import OwnState
    from zeroband.elastic.rounds.interfaces import OuterAlgorithm, OuterParts
    from zeroband.node.mesh import LocalMesh
    from zeroband.node.sharding import Parameters
    from zeroband.runtime.transport_setup import HeldPort


@dataclass(frozen=True)
class TrainedOn:
    """What a checkpoint says of its model, for whoever exports or evaluates it."""

    model: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What `blueprint_of_record` makes it of; empty where the model is a loop's own."""
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
    build_algorithm: Callable[[OuterParts], OuterAlgorithm] | None = None
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
        """Where the model comes from, as far as the package knows."""
        return TrainedOn()
