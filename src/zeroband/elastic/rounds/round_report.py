"""Report of a committed round from this node's view, with its costs. Plain values, for metrics and events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.transport.base import Transfer, sum_known


@dataclass
class RoundCosts:
    """Costs of a round for this node, over all attempts."""

    wait_s: float = 0.0
    transfer_s: float = 0.0
    hash_s: float = 0.0
    """Time to hash the result for the vote."""
    sent_bytes: int = 0
    received_bytes: int = 0
    wide_bytes: int | None = None
    """Bytes sent to other sites, of `sent_bytes`; None: there were no sites."""
    score_s: float | None = None
    """Time to score its payloads; None: not scored."""
    failures: list[str] = field(default_factory=list[str])
    """Reason of each retry."""
    newest: Transfer | None = None
    """The transfer of the newest attempt."""

    def add(self, transfer: Transfer) -> None:
        self.newest = transfer
        self.transfer_s += transfer.took_s
        self.sent_bytes += transfer.sent_bytes
        self.received_bytes += transfer.received_bytes
        self.wide_bytes = sum_known((self.wide_bytes, transfer.wide_bytes))


@dataclass(frozen=True)
class RoundReport:
    """A committed round as this node saw it."""

    round: int
    epoch: int
    member_id: str
    """This node's member id."""
    members: tuple[str, ...]
    weights: tuple[int, ...]
    samples: tuple[int, ...]
    """Samples in each member's update, whether or not it had weight."""
    late: tuple[str, ...]
    """Members whose update goes into a later round."""
    state_digest: str
    """Digest of the outer state after the round; local rank 0 only."""
    progress: Progress
    """The run after the round."""
    wait_s: float
    transfer_s: float
    apply_s: float
    """Time of this node's own work: contribution, hash of the result, outer step, digest, write-back."""
    sent_bytes: int
    received_bytes: int
    failures: tuple[str, ...]
    """Reason of each retry."""
    is_left_out: bool
    """This node's update was not finite, so it had no weight."""
    carried: tuple[tuple[str, int, int], ...] = ()
    """Members that a carrier brought: id, weight and samples of each."""
    uncommitted_tokens: int = 0
    """Tokens that this node trained on since its contribution to the round."""
    refused: tuple[tuple[str, str], ...] = ()
    """Members whose payload was dropped, and why."""
    wide_bytes: int | None = None
    """Bytes sent to other sites, of `sent_bytes`; None: there were no sites."""
    payload_bytes: int | None = None
    """Size of this node's payload, as sent to each node or site; None: it sent none."""
    trust: float | None = None
    """Factor on this node's weight from the next round on; None: the run does not use it (`outer.robust`)."""
    gains: tuple[tuple[str, float], ...] = ()
    """Members whose previous payload was scored, and its value as measured by the others (`Gain`)."""
    claims: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """Claims of joiners that the round dealt to them, as records, by member."""
    score_s: float | None = None
    """Time in which this node scored this round's payloads; None: it scored none."""

    leaving: tuple[str, ...] = ()
    """Members that leave after the round because they were asked to."""

    @property
    def retries(self) -> int:
        return len(self.failures)
