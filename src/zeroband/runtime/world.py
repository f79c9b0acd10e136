"""The run that a node is in, as its training loop sees it: one of several nodes, or of this one alone."""

from __future__ import annotations

from typing import Literal, Protocol

from zeroband.elastic.rounds.interfaces import SyncHooks

Staying = Literal["others", "nobody", "none of us"]
"""Who goes on when a node leaves: others; nobody, since it was the last; none of us, since all leave in this round."""


class World(Protocol):
    """A node's place in its run. All local ranks call the methods together."""

    @property
    def outer(self) -> SyncHooks: ...

    def announce_leaving(self) -> Staying:
        """Say that this node leaves, once; who goes on then. Unless others do, it must save what it holds."""
        ...
