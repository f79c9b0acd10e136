"""What the mesh asks of a data path between nodes: the mean of an opening's members, or their payloads; abortable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from zeroband.elastic.membership.records import Opening
from zeroband.elastic.transport.engine import Encoded


@dataclass(frozen=True)
class Transfer:
    """What one reduce or gathering moved over the network, on this node."""

    took_s: float
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True)
class Rates:
    """Mbit/s in one direction; 0 and absent: not known."""

    own: int = 0
    """Rate of this node's access link."""
    links: Mapping[str, int] = field(default_factory=dict[str, int])
    """Rates to other members."""
    took_ms: int = 0
    """Milliseconds of the last transfer, as `PacedKind.after` wants it; 0: there was none, or it failed."""


@dataclass(frozen=True)
class Gathering:
    """How many bytes each member sends to whom: the same on all members of an opening."""

    lengths: tuple[int, ...]
    """Bytes of each member's payload, in the order of the members; 0: it sends nothing."""
    receiver: str | None = None
    """The one member that gets them. None: all do."""
    number: int = 0
    """Counts the gatherings of one opening, in their order."""

    @property
    def total_bytes(self) -> int:
        return sum(self.lengths)

    def part_of(self, member: int) -> slice:
        """Where the payload of the n-th member lies among all of them."""
        start = sum(self.lengths[:member])
        return slice(start, start + self.lengths[member])


class DataPlane(Protocol):
    """A data path. Every method is called by the main thread of all local ranks, in the same order."""

    @property
    def keeps_buffers(self) -> bool:
        """Whether the result buffer is the caller's again after PeerLost; else something may still write to it."""
        ...

    def reduce_mean(
        self,
        contribution: Tensor,
        result: Tensor,
        opening: Opening,
        member_id: str,
        on_progress: Callable[[float], None],
        stops: Sequence[float] = (),
        errors: Tensor | None = None,
        encoded: Encoded | None = None,
    ) -> tuple[int, int]:
        """Write this rank's part of the weighted mean into `result`; the bytes that the node sent and received.

        Shapes: all (n,) float32 on CPU, shared by the local ranks. `on_progress`: called with the share of this rank's
        part that is done. `stops`: shares, in order, at which it stands still until `on_progress` returned, where the
        path can. `errors`: gets what encoding took from this node's part in the mean, in units of `contribution`,
        unless its share is 0; after PeerLost it holds nothing of use. `encoded`: the contribution and the mean as they
        travel, where the caller encodes; `contribution` is not read then. The bytes are right on local rank 0. Raises
        PeerLost.
        """
        ...

    def gather(
        self,
        payload: Tensor,
        result: Tensor,
        gathering: Gathering,
        opening: Opening,
        member_id: str,
        on_progress: Callable[[float], None],
        stops: Sequence[float] = (),
    ) -> tuple[int, int]:
        """Write the members' payloads into `result`, one behind the other; the bytes that the node sent and received.

        Shapes: payload (its length,), result (gathering.total_bytes,), uint8 on CPU, shared by the local ranks. The
        result of a member that does not receive may have any length, and stays as it is. `on_progress`, `stops` and
        the rest: as for `reduce_mean`.
        """
        ...

    def measured(self) -> Rates:
        """What the links were seen to carry; on local rank 0."""
        ...

    def leave_behind(self) -> None:
        """Forget what was connected for openings so far, without waiting for anybody."""
        ...

    def close(self) -> None: ...
