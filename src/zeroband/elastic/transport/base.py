"""Interface of a data plane: abortable reductions and gatherings among a plan's members."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from zeroband.elastic.membership.records import Evidence, RoundPlan
from zeroband.elastic.transport.engine import Encoded
from zeroband.kernels.keyed_hash import HashKey, PartHashes
from zeroband.kernels.robust import Robustly


@dataclass(frozen=True)
class MovedBytes:
    """Bytes that one operation moved between this node and others."""

    sent_bytes: int
    received_bytes: int
    wide_bytes: int | None = None
    """Bytes sent to other sites; None: no sites."""
    borders: tuple[int, ...] = ()
    """Bounds of each member's part of the result, if all parts come directly from their members; else empty."""
    hashes: PartHashes | None = None
    """Hashes of the parts received for this node's shard, if requested and not relayed."""
    has_encoded_mean: bool = False
    """Whether `RoundRequest.encoded_mean` holds the bytes that the result was decoded from."""


@dataclass(frozen=True, kw_only=True)
class Transfer(MovedBytes):
    """Result of one reduction or gathering on this node."""

    took_s: float
    payload_bytes: int | None = None
    """Size of this node's payload; None: it sent none."""
    refused: tuple[tuple[str, str], ...] = ()
    """Members whose payload was dropped, with the reason."""
    is_refused: bool = False
    """Its audit failed; on local rank 0."""
    agreement: Mapping[str, float] = field(default_factory=dict[str, float])
    """Cosine of each measured member's contribution and the result; equal on all members."""


def sum_known(counts: Iterable[int | None]) -> int | None:
    """Sum the known counts; None if none is known."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


@dataclass(frozen=True)
class Rates:
    """Measured rates in Mbit/s, in one direction; 0 or absent: unknown."""

    own: int = 0
    """Rate of this node's access link."""
    links: Mapping[str, int] = field(default_factory=dict[str, int])
    """Rates to other members."""
    took_ms: int = 0
    """Duration of the last transfer for `PacedKind.after`, in milliseconds; 0: none, or it failed."""


@dataclass(frozen=True)
class RoundRequest:
    """A node's data for one operation of a plan. Tensors are on CPU, shared by the local ranks."""

    plan: RoundPlan
    member_id: str
    """Member id of this node."""
    sent: Tensor
    """(n,) float32 contribution to a mean, or (nbytes,) uint8 payload of a gathering; not modified."""
    result: Tensor
    """(n,) float32 or (bytes of all payloads,) uint8: receives the result."""
    residual: Tensor | None = None
    """(n,) float32: receives the encoding error of this node's data, in units of `sent`, unless its share is 0;
    undefined after PeerLost."""
    robust: Robustly | None = None
    """Robust combination in place of the weighted mean; not with sites."""
    encoded: Encoded | None = None
    """Encoded contribution and mean, if the caller encodes; `sent` is then not read."""
    encoded_mean: Tensor | None = None
    """(nbytes,) uint8: receives the encoded mean, if the data plane encodes; that of `encoded`, if given."""
    hash_key: HashKey | None = None
    """Key for hashes of the parts received for this node's shard; None: no hashes."""


@dataclass(frozen=True)
class Gathering:
    """Layout of a gathering, equal on all members of a plan."""

    lengths: tuple[int, ...]
    """Bytes of each member's payload, in member order; 0: it sends nothing."""
    receiver: str | None = None
    """The only receiver; None: all members."""
    number: int = 0
    """Index among the gatherings of one plan."""
    is_report: bool = False
    """A few bytes about another transfer, excluded from measurement and pacing."""

    @property
    def total_bytes(self) -> int:
        return sum(self.lengths)

    def part_of(self, member: int) -> slice:
        """Return the slice of the n-th member's payload in the result."""
        start = sum(self.lengths[:member])
        return slice(start, start + self.lengths[member])


class DataPlane(Protocol):
    """A data plane. All local ranks call every method in the same order, in their main threads.

    It reports progress to the guardian and passes the fault points of a transfer (`FaultPoints.transfer`).
    """

    @property
    def keeps_buffers(self) -> bool:
        """Whether the result buffer may be reused after PeerLost; False: something may still write to it."""
        ...

    def reduce_mean(self, request: RoundRequest) -> MovedBytes:
        """Write this rank's part of the weighted mean into the result, bit-identical on all members.

        Returns the bytes that the node moved, valid on local rank 0. Raises PeerLost.
        """
        ...

    def gather(self, request: RoundRequest, gathering: Gathering) -> MovedBytes:
        """Write the members' payloads into the result, concatenated; bytes and errors as for `reduce_mean`.

        On a member that does not receive, the result may have any length and stays unchanged.
        """
        ...

    def measured(self) -> Rates:
        """Return the measured link rates; on local rank 0."""
        ...

    def gaps(self) -> Evidence:
        """Return what was missing or invalid when the newest operation failed; on local rank 0.

        Empty if it succeeded; without what was missing if parts were relayed.
        """
        ...

    def abandon(self) -> None:
        """Abandon the connections of earlier plans without waiting."""
        ...

    def close(self) -> None: ...
