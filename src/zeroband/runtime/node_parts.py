"""What a node is, alone or among others, whoever trains on it: the trainer, or a loop of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zeroband.config.schema import RunConfig
from zeroband.elastic.membership.departure import Departure
from zeroband.node.faults import FaultPoints

if TYPE_CHECKING:  # they load torch, and a node has a name before it has that
    from zeroband.elastic.rounds.interfaces import Inner, OuterAlgorithm, OuterParts
    from zeroband.node.mesh import LocalMesh
    from zeroband.node.sharding import Parameters


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
    model: Parameters
    inner: Inner
    departure: Departure
    faults: FaultPoints
    build_algorithm: Callable[[OuterParts], OuterAlgorithm] | None = None
    """Makes the outer algorithm; None: as [outer] and [optim] say."""
