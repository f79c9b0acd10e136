"""What the mesh asks of a data path between nodes: the mean of a plan's members, or their payloads; abortable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from zeroband.elastic.membership.records import RoundPlan
from zeroband.elastic.transport.engine import Encoded
from zeroband.kernels.keyed_hash import HashKey, PartHashes
from zeroband.kernels.robust import Robustly


@dataclass(frozen=True)
class Transfer:
    """What one reduce or gathering moved over the network, on this node."""

    took_s: float
    sent_bytes: int
    received_bytes: int
    wide_bytes: int | None = None
    """As `Moved` has it."""
    payload_bytes: int | None = None
    """Size of this node's payload, as it goes to each node or site; None: it sent none."""
    refused: tuple[tuple[str, str], ...] = ()
    """Members whose payload was left out, and why."""
    borders: tuple[int, ...] = ()
    """As `Moved` has them."""
    hashes: PartHashes | None = None
    """As `Moved` has them."""
    has_encoded_mean: bool = False
    """As `Moved` has it."""
    is_refused: bool = False
    """Its audit contradicts it, on local rank 0."""
    agreement: Mapping[str, float] = field(default_factory=dict[str, float])
    """Cosine of members' contributions and the result, as far as it was measured; the same on all members."""


@dataclass(frozen=True)
class Gaps:
    """What the newest operation lacked when it failed; empty where it did not, or where parts come through others."""

    lacks: tuple[str, ...] = ()
    """Members whose own contribution stopped coming."""
    lacks_mean: tuple[str, ...] = ()
    """Members whose contribution came, and whose part of the mean stopped coming."""
    refused: tuple[str, ...] = ()
    """Members that sent what cannot be taken."""


class Moved(NamedTuple):
    """Bytes that one operation moved between this node and others."""

    sent_bytes: int
    received_bytes: int
    wide_bytes: int | None = None
    """Part of those sent that went to other sites; None: there are no sites."""
    borders: tuple[int, ...] = ()
    """Borders of the parts of the result that each member made, where all come directly from there; else empty."""
    hashes: PartHashes | None = None
    """Hashes of what came for this node's shard, where they were asked for and parts come directly."""
    has_encoded_mean: bool = False
    """Whether the result was decoded from what `RoundRequest.encoded_mean` holds now."""


def sum_known(counts: Iterable[int | None]) -> int | None:
    """Add up what is counted; None where nothing is."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


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
class RoundRequest:
    """What a node asks its data path to move for a plan. Tensors lie on CPU, shared by the local ranks."""

    plan: RoundPlan
    member_id: str
    """This node among the members."""
    sent: Tensor
    """(n,) float32 contribution to a mean, or (nbytes,) uint8 payload of a gathering. It stays as it is."""
    result: Tensor
    """(n,) float32 or (bytes of all payloads,) uint8: where this node wants what comes of it."""
    residual: Tensor | None = None
    """(n,) float32: gets what encoding took from this node's part in the mean, in units of `sent`, unless its share is
    0; after PeerLost it holds nothing of use."""
    robust: Robustly | None = None
    """How contributions are combined, where it is not their weighted mean; not at sites."""
    encoded: Encoded | None = None
    """The contribution and the mean as they travel, where the caller encodes; `sent` is not read then."""
    encoded_mean: Tensor | None = None
    """(nbytes,) uint8: gets the mean as it travelled, where it did; that of `encoded`, if there is one."""
    hash_key: HashKey | None = None
    """Asks for hashes of what comes for this node's shard."""


@dataclass(frozen=True)
class Gathering:
    """How many bytes each member sends to whom: the same on all members of a plan."""

    lengths: tuple[int, ...]
    """Bytes of each member's payload, in the order of the members; 0: it sends nothing."""
    receiver: str | None = None
    """The one member that gets them. None: all do."""
    number: int = 0
    """Counts the gatherings of one plan, in their order."""
    is_report: bool = False
    """It is a few bytes about another transfer, by which no link is measured nor paced."""

    @property
    def total_bytes(self) -> int:
        return sum(self.lengths)

    def part_of(self, member: int) -> slice:
        """Where the payload of the n-th member lies among all of them."""
        start = sum(self.lengths[:member])
        return slice(start, start + self.lengths[member])


class DataPlane(Protocol):
    """A data path. Every method is called by the main thread of all local ranks, in the same order.

    It shows the guardian that bytes move, and passes the fault points of a transfer (`FaultPoints.transfer`).
    """

    @property
    def keeps_buffers(self) -> bool:
        """Whether the result buffer is the caller's again after PeerLost; else something may still write to it."""
        ...

    def reduce_mean(self, request: RoundRequest) -> Moved:
        """Write this rank's part of the weighted mean into the result; the bytes that the node moved.

        The result is bit-identical on all members. The bytes are right on local rank 0. Raises PeerLost.
        """
        ...

    def gather(self, request: RoundRequest, gathering: Gathering) -> Moved:
        """Write the members' payloads into the result, one behind the other; bytes and errors as for `reduce_mean`.

        The result of a member that does not receive may have any length, and stays as it is.
        """
        ...

    def measured(self) -> Rates:
        """What the links were seen to carry; on local rank 0."""
        ...

    def gaps(self) -> Gaps:
        """What the newest operation lacked, if it failed; on local rank 0."""
        ...

    def leave_behind(self) -> None:
        """Forget what was connected for plans so far, without waiting for anybody."""
        ...

    def close(self) -> None: ...
