"""The run that a node is in, as its training loop sees it: one of several nodes, or of this one alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from zeroband.checkpoint.writer_process import PeerWriters
from zeroband.elastic.rounds.interfaces import SyncHooks

Staying = Literal["others", "nobody", "none of us"]
"""Who goes on when a node leaves: others; nobody, since it was the last; none of us, since all leave in this round."""


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
        """Show whoever watches this trainer that it is alive."""
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
